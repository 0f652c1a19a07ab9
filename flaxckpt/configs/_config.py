"""Checkpoint options of a run as a record, from files and to files."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from flaxckpt import (
    _arrays,
    _distributed,
    _formats,
    _run,
    _steps,
    _training,
    _util,
    errors,
)
from flaxckpt._maps import named
from flaxckpt._run.checkpointer import Checkpointer
from flaxckpt._training.callback import CheckpointCallback
from flaxckpt._types import PathLike, PyTree
from flaxckpt._zarr.array_layout import ArrayLayout
from flaxckpt.configs import _parsing, _policies
from flaxckpt.policies import PreservationPolicy
from flaxckpt.transforms import Transform, cast

_LAYOUT = ArrayLayout()


@dataclass(frozen=True, slots=True)
class Cast:
    """A cast at every save, with the arguments of `transforms.cast`."""

    pattern: str
    dtype: str
    lossy: bool = False

    def __post_init__(self) -> None:
        for name, parse in _CAST_PARSERS.items():
            parse(name, getattr(self, name))
        self.transform()  # raises if they are invalid

    def transform(self) -> Transform:
        """Returns the transform for `transforms` of a `Checkpointer`."""
        return cast(self.pattern, self.dtype, lossy=self.lossy)


@_util.guessed_names.explain
@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Options of `Checkpointer` and `CheckpointCallback`, as plain data.

    Meanings and defaults are those of these classes. Policies, casts and the layout may
    be mappings, as in files; numbers of bytes and seconds may be strings, such as
    "64 MiB" and "15 min".

    Attributes:
        directory: The run directory. If None, pass it to `checkpointer`.
        keep: Policies, such as `{latest = 3}`, or
            `{best = 1, metric = "eval/loss", mode = "min"}`; the guide to retention has
            the table of each.
        keep_dataset: As `keep`, for the states of dataset iterators.
        keep_items: Item -> policies as `keep`, for the item: `{opt_state = [{latest =
            2}]}`.
        items: A name, or a list of names.
        staging: A directory on a faster disk, where steps are saved first.
        keep_staging: As `keep`, for the steps in the staging directory.
        staging_copies: Number of other processes with a copy of each part of a step.
        peer_network: The network on which processes exchange parts of steps.
        peer_certificate: A PEM file with which they exchange them by TLS.
        permissions: A number, or its octal digits: "0o750".
        layout: Fields of `ArrayLayout`.
        save_dtype: `{pattern = "params/.*", dtype = "bfloat16"}`: casts at every save.
        exit_code: "none" is None, for files that have no null.
        source: Starting point of a new run, for `restore_or_init`, with `source_step`
            and `source_map`: "auto", or the name of a family of models.

    Raises:
        OptionError: An option is invalid. The message has its full name, such as
            `layout.codec`, and its value.
    """

    directory: str | None = None
    keep: tuple[PreservationPolicy, ...] = ()
    keep_dataset: tuple[PreservationPolicy, ...] = ()
    keep_items: Mapping[str, tuple[PreservationPolicy, ...]] = dataclasses.field(
        default_factory=dict
    )
    items: str | tuple[str, ...] = _formats.items.STATE
    dataset_item: str = _formats.items.DATASET
    layout: ArrayLayout = _LAYOUT
    save_dtype: tuple[Cast, ...] = ()
    max_concurrent_bytes: int = _arrays.write.DEFAULT_CONCURRENT_BYTES
    snapshot: Literal["host", "device", "auto"] = "host"
    step_format: str = "{step}"
    read_only: bool = False
    peer_timeout_secs: float = _distributed.operation.TIMEOUT_SECS
    read_once: bool = False
    staging: str | None = None
    keep_staging: tuple[PreservationPolicy, ...] = _run.tiers.staging.KEEP
    staging_copies: int = 0
    peer_network: str | None = None
    peer_certificate: str | None = None
    permissions: int | None = None
    every_steps: int | None = None
    every_secs: float | None = None
    overhead: float | None = None
    mtbf_secs: float | None = None
    temporary: bool = False
    on_steps: tuple[int, ...] = ()
    on_preemption: bool = True
    grace_secs: float | None = None
    exit_code: int | None = _training.callback.REQUEUE_EXIT_CODE
    save_first: bool = False
    save_last: bool = True
    step_is: Literal["completed", "index"] = "completed"
    check_step: bool = True
    preflight: Literal["warn"] | bool = True
    statistics: bool = False
    source: str | None = None
    source_step: int | None = None
    source_map: str | None = None

    def __post_init__(self) -> None:
        for name, parse in _PARSERS.items():
            object.__setattr__(self, name, parse(name, getattr(self, name)))
        if self.temporary and self.every_secs is None and self.overhead is None:
            raise errors.OptionError(
                "temporary applies to the saves of every_secs: set every_secs, too"
            )

    @classmethod
    def from_mapping(cls, mapping: Any) -> Self:
        """Creates a config from a dict, or a ConfigDict of ml_collections.

        A FrozenConfigDict cannot hold tables in lists: use policy objects.

        Raises:
            OptionError: An option is unknown or invalid.
        """
        return cls(
            **_parsing.table(
                "",
                mapping,
                _parsing.names(cls),
                answer=functools.partial(
                    _util.guessed_names.answer, CheckpointConfig.__name__
                ),
            )
        )

    @classmethod
    def from_file(cls, path: PathLike, *, group: str | None = None) -> Self:
        """Reads a TOML, YAML or JSON file, chosen by its suffix.

        Args:
            path: `.toml`, `.yaml`, `.yml` or `.json`.
            group: The table of the file with the options, if the file has others; for
                nested tables, `train.checkpoint`.

        Raises:
            OptionError: The file cannot be read, or is not a valid config.
        """
        content = _parsing.read(Path(path))
        for name in group.split(".") if group else ():
            if not isinstance(content, Mapping) or name not in content:
                raise errors.OptionError(f"{path} has no table {group!r}")
            content = content[name]
        prefix = f"{path}: {group}." if group else f"{path}: "
        try:
            return cls.from_mapping(content)
        except errors.OptionError as error:
            raise errors.OptionError(f"{prefix}{error}") from None

    def to_mapping(self) -> dict[str, Any]:
        """Returns the options that differ from their defaults, for `from_mapping`.

        Raises:
            OptionError: A policy is a custom policy, which has no name in files.
        """
        return {
            field.name: _plain(field.name, value)
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) not in (field.default, {})
        }

    def checkpointer(
        self, directory: PathLike | None = None, **more: Any
    ) -> Checkpointer:
        """Creates the `Checkpointer`.

        Args:
            directory: Overrides the directory of the config.
            **more: Options of `Checkpointer` that a file cannot have, or that override
                the config. The casts of the config come after `transforms`.

        Raises:
            OptionError: The directory is missing, or an option is invalid.
        """
        directory = self.directory if directory is None else directory
        if directory is None:
            raise errors.OptionError(
                "the config has no directory: set it, or pass checkpointer(directory)"
            )
        casts = [save_cast.transform() for save_cast in self.save_dtype]
        more["transforms"] = [*more.get("transforms", ()), *casts]
        options = self._options(Checkpointer) | more
        return Checkpointer(**{**options, "directory": directory})

    def callback(self, checkpointer: Checkpointer, **more: Any) -> CheckpointCallback:
        """Creates the `CheckpointCallback` for the training loop.

        Args:
            checkpointer: The checkpointer to save with.
            **more: Options of `CheckpointCallback` that a file cannot have, such as
                `dataset`, or that override the config.
        """
        return CheckpointCallback(
            checkpointer, **(self._options(CheckpointCallback) | more)
        )

    def restore_or_init(
        self, callback: CheckpointCallback, state: PyTree, **more: Any
    ) -> tuple[PyTree, int]:
        """Calls `restore_or_init` of a callback with the source of the config.

        Args:
            callback: The callback of the training loop.
            state: Initial state of the training.
            **more: Options of `CheckpointCallback.restore_or_init` that a file cannot
                have, such as `source_transforms`, or that override the config.
        """
        options: dict[str, Any] = {
            "source": self.source,
            "source_step": self.source_step,
            "source_map": self.source_map or (),
        }
        return callback.restore_or_init(state, **(options | more))

    def _options(self, cls: type) -> dict[str, Any]:
        names = inspect.signature(cls).parameters.keys() & _PARSERS.keys()
        return {name: getattr(self, name) for name in names}


# ---- reading options -----------------------------------------------------------------

_CAST_PARSERS = _parsing.by_field(Cast)
_LAYOUT_PARSERS = _parsing.by_field(
    ArrayLayout, chunk_bytes=_parsing.bytes_, shard_axes=_parsing.axes
)


def _items(key: str, value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return _parsing.text(key, value)
    names: tuple[str, ...] = _parsing.each(_parsing.text)(key, value)
    return names


def _step_format(key: str, value: Any) -> str:
    return _steps.names.StepFormat(_parsing.text(key, value)).template


def _source_map(key: str, value: Any) -> str:
    named.check_name(key, _parsing.text(key, value))
    name: str = value
    return name


_PARSERS = _parsing.by_field(
    CheckpointConfig,
    directory=_parsing.optional(_parsing.path),
    keep=_parsing.each(_policies.parse),
    keep_dataset=_parsing.each(_policies.parse),
    keep_items=_parsing.by_name(_parsing.each(_policies.parse)),
    items=_items,
    layout=_parsing.record(ArrayLayout, _LAYOUT_PARSERS),
    save_dtype=_parsing.each(_parsing.record(Cast, _CAST_PARSERS)),
    max_concurrent_bytes=_parsing.bytes_,
    step_format=_step_format,
    staging=_parsing.optional(_parsing.path),
    keep_staging=_parsing.each(_policies.parse),
    staging_copies=_parsing.whole(0),
    peer_certificate=_parsing.optional(_parsing.path),
    permissions=_parsing.mode,
    overhead=_parsing.optional(_parsing.fraction),
    on_steps=_parsing.steps,
    exit_code=_parsing.optional(_parsing.whole(0), none="none"),
    preflight=_parsing.one_of(True, False, "warn"),
    source=_parsing.optional(_parsing.path),
    source_step=_parsing.optional(_parsing.whole(0)),
    source_map=_parsing.optional(_source_map),
)

# ---- writing options -----------------------------------------------------------------


def _plain(key: str, value: Any) -> Any:
    if value is None:
        return "none"  # only exit_code has another default
    if key == "permissions":
        return f"0o{value:o}"
    if isinstance(value, tuple):
        return [_plain(f"{key}[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {name: _plain(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, ArrayLayout | Cast):
        return {
            field.name: option
            for field in dataclasses.fields(value)
            if (option := getattr(value, field.name)) != field.default
        }
    return _policies.to_table(key, value) if hasattr(value, "preserved") else value
