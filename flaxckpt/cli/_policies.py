"""Preservation policies from options, for runs that record none, or other policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from flaxckpt import _policy_forms, errors
from flaxckpt.cli._parameters import Option
from flaxckpt.policies import PreservationPolicy  # its module fills `FORMS`

if TYPE_CHECKING:
    from flaxckpt._run.judge import Rules

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
    """Returns the policies, or None without options; raises OptionError if invalid."""
    rules = parse_rules(keep, config, group)
    return None if rules is None else rules.keep


def parse_rules(
    keep: list[str] | None, config: str | None, group: str | None
) -> Rules | None:
    """Returns the rules, or None without options; raises OptionError if one is none."""
    if group is not None and config is None:
        raise errors.OptionError(
            "--group names a table of the --config file: pass --config, too"
        )
    if not keep and config is None:
        return None
    from flaxckpt import _formats, _run

    parsed = tuple(_parse(text) for text in keep or ())
    if config is None:
        return _run.judge.Rules(parsed)
    from flaxckpt.configs import CheckpointConfig

    settings = CheckpointConfig.from_file(config, group=group)
    return _run.judge.Rules.of(
        (*parsed, *settings.keep),
        settings.keep_dataset,
        settings.keep_items,
        None,
        _formats.native_names.make_items(settings.items, settings.dataset_item),
    )


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
