"""Preservation policies from options, for runs that record none, or other policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Required, TypedDict

from flaxckpt import _policy_forms, errors
from flaxckpt.cli._parameters import Option
from flaxckpt.policies import PreservationPolicy

_EXAMPLES = ", ".join(form.example for form in _policy_forms.FORMS.values())

KeepOption = Annotated[
    list[str] | None,
    Option(
        "--keep",
        "-k",
        metavar="POLICY",
        help=f"A preservation policy: {_EXAMPLES}. May be repeated.",
    ),
]
ConfigOption = Annotated[
    str | None,
    Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The settings of the run, in TOML, YAML or JSON; uses its keep.",
    ),
]
GroupOption = Annotated[
    str | None,
    Option(
        "--group",
        metavar="TABLE",
        help="Table of the file with the settings: train.checkpoint.",
    ),
]


def parse_policies(
    keep: list[str] | None, config: str | None, group: str | None
) -> tuple[PreservationPolicy, ...] | None:
    """Returns the policies of these options; None without any option.

    Raises:
        OptionError: An option is not a policy.
    """
    if not keep and config is None and group is None:
        return None  # without an import of all of flaxckpt
    return parse_rules(keep, config, group)["keep"]


class RetentionOptions(TypedDict, total=False):
    """Options of retention, as for `Checkpointer`."""

    keep: Required[tuple[PreservationPolicy, ...] | None]
    keep_dataset: tuple[PreservationPolicy, ...]
    keep_items: Mapping[str, tuple[PreservationPolicy, ...]]
    items: str | tuple[str, ...]
    dataset_item: str


def parse_rules(
    keep: list[str] | None, config: str | None, group: str | None
) -> RetentionOptions:
    """Returns the rules of these options, and the items of the config.

    Without any option, `keep` is None.

    Raises:
        OptionError: An option is not a policy.
    """
    if group is not None and config is None:
        raise errors.OptionError(
            "--group names a table of the --config file: pass --config, too"
        )
    parsed = tuple(_parse(text) for text in keep or ())
    if config is None:
        return {"keep": parsed or None}
    from flaxckpt.configs import CheckpointConfig

    settings = CheckpointConfig.from_file(config, group=group)
    return {
        "keep": (*parsed, *settings.keep),
        "keep_dataset": settings.keep_dataset,
        "keep_items": settings.keep_items,
        "items": settings.items,
        "dataset_item": settings.dataset_item,
    }


def _parse(text: str) -> PreservationPolicy:
    from flaxckpt import configs

    try:
        return configs.parse_option("keep[0]", text)
    except errors.OptionError as error:
        raise errors.OptionError(f"--keep {text}: {error}") from None
    except (KeyError, ValueError):
        raise errors.OptionError(
            f"--keep {text} is not a policy: write one of {_EXAMPLES}"
        ) from None
