"""Options of a conversion, and the state to write."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from flaxckpt import _arrays, _state, _storage, errors
from flaxckpt._arrays.zarr.array_layout import ArrayLayout, checked_layout
from flaxckpt._convert import writers
from flaxckpt._state.leaf import Leaf, StoredLeaf
from flaxckpt._types import JSON
from flaxckpt.formats import _native
from flaxckpt.formats._reader import Stored
from flaxckpt.transforms import Transform
from flaxckpt.transforms import _base as _transforms

DEFAULT_CONCURRENT_BYTES = 2**30

_BATCH_BYTES = 256 * 2**20
"""Bytes that are read, written and synced together."""

_LARGE = 2**30
"""Bytes below which checks in advance are not worthwhile."""

_SUFFIXES = {".safetensors": "safetensors", ".msgpack": "msgpack"}
"""Suffix of a path -> the only format with that suffix."""

Progress: TypeAlias = Literal["auto"] | bool | Callable[[int, int], object]


@dataclasses.dataclass(frozen=True, slots=True)
class ConvertOptions:
    """How to convert.

    Attributes:
        format: Format of the new checkpoint.
        transforms: Changes to apply.
        layout: Chunks and encoding of the arrays of an Orbax checkpoint.
        overwrite: Whether to replace an existing checkpoint.
        max_shard_bytes: Upper bound on the arrays in one file of safetensors.
        max_concurrent_bytes: Bytes of arrays in memory at one time.
        progress: Whether to show a progress bar, `auto` after some seconds on a
            terminal; or a function called with the bytes done and the total bytes.
    """

    format: Literal["orbax", "safetensors", "msgpack"] = "orbax"
    transforms: Sequence[Transform] = ()
    layout: ArrayLayout = dataclasses.field(default_factory=ArrayLayout)
    overwrite: bool = False
    max_shard_bytes: int = 5 * 10**9
    max_concurrent_bytes: int = DEFAULT_CONCURRENT_BYTES
    progress: Progress = "auto"

    def __post_init__(self) -> None:
        if self.format not in tuple(writers.MAKERS):
            raise errors.OptionError(
                f"format must be one of {tuple(writers.MAKERS)}, got {self.format!r}"
            )
        for name in ("max_shard_bytes", "max_concurrent_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise errors.OptionError(f"{name} must be an int, got {value!r}")
            if value <= 0:
                raise errors.OptionError(f"{name} must be positive, got {value}")
        checked_layout(self.layout)
        _transforms.checked(self.transforms)
        is_known = isinstance(self.progress, bool) or self.progress == "auto"
        if not is_known and not callable(self.progress):
            raise errors.OptionError(
                f"progress must be 'auto', a bool or a function, got {self.progress!r}"
            )


def format_of(final: Path, format: str | None) -> Any:
    """Returns `format`, by default from the suffix of the path.

    Raises:
        OptionError: The path has the suffix of another format.
    """
    suffix = _SUFFIXES.get(final.suffix)
    if format is None:
        return suffix or "orbax"
    if suffix is not None and format in tuple(writers.MAKERS) and format != suffix:
        raise errors.OptionError(
            f"{final} ends in {final.suffix}, which is not a file of format={format!r}:"
            f" pass format={suffix!r}, or choose another path"
        )
    return format


def check_sources(state: writers.State) -> None:
    """Opens large arrays before any work, to check their metadata.

    Raises:
        DamagedCheckpointError: An array contradicts its metadata.
    """
    stored = {id(s): s for leaf in state.table.values() for s in _stored(leaf)}
    for source in stored.values():
        if _arrays.layout.stored_bytes(source.info) > _LARGE:
            _arrays.read.open_one(source)


def check_space(
    final: Path, temporary: Path, state: writers.State, options: ConvertOptions
) -> None:
    """Raises an error if the new checkpoint would not fit on the disk.

    Skips the check for compressed chunks, whose size is unknown.

    Raises:
        SaveFailedError: The disk has too little free space.
    """
    if options.format == "orbax" and options.layout.codec != "none":
        return
    wanted = sum(_arrays.layout.stored_bytes(info) for info in state.infos)
    if wanted <= _LARGE:
        return
    directory = next(path for path in final.parents if path.is_dir())
    found = os.statvfs(directory)
    done = sum(p.lstat().st_blocks * 512 for p in temporary.rglob("*"))
    free = found.f_bavail * found.f_frsize + done
    if wanted > free:
        raise errors.SaveFailedError(
            f"{final} would have {wanted} bytes, and {free} are free in {directory}:"
            " free space, choose another place, or drop leaves with transforms"
        )


def state(stored: Stored, step: int | None, options: ConvertOptions) -> writers.State:
    """What is to be made of a checkpoint.

    Args:
        stored: The source checkpoint.
        step: Step of the new checkpoint.
        options: Options of the conversion.
    """
    table = _transforms.apply(options.transforms, stored.table)
    structure = _state.containers.of(stored.structure, stored.table, table)
    keys = dict(_state.tree.key_paths(structure))
    for path, leaf in table.items():
        info = dataclasses.replace(leaf.info, keys=keys[path])
        info = _arrays.layout.with_chunk_shape(info, options.layout)
        table[path] = Leaf(info, leaf.sources, leaf.fn)
    found = _storage.paths.from_text(stored.metadata.path)
    has_dataset = stored.metadata.has_dataset and options.format == "orbax"
    return writers.State(
        table,
        structure,
        {
            path: _text(leaf)
            for path, leaf in table.items()
            if leaf.info.kind == "string"
        },
        dataclasses.replace(
            stored.metadata,
            transforms=(
                *stored.metadata.transforms,
                *_transforms.describe(options.transforms),
            ),
        ),
        step,
        _native.checkpoint.read_dataset(found, stored.digests) if has_dataset else {},
        options.layout,
        options.max_shard_bytes,
        min(_BATCH_BYTES, max(1, options.max_concurrent_bytes // 2)),
    )


def _text(leaf: Leaf) -> str:
    source = leaf.source
    return str(source.value if isinstance(source, StoredLeaf) else source)


def work(
    stored: Stored,
    state: writers.State,
    target: writers.Target,
    options: ConvertOptions,
    files: Sequence[_storage.Stamp],
) -> dict[str, JSON]:
    """Describes the work in JSON: durable pieces of equal work can be kept."""
    rows: list[JSON] = [
        [
            _native.manifest.leaf_row(leaf.info),
            [
                [str(source.root), source.info.path, str(source.info)]
                for source in _stored(leaf)
            ],
        ]
        for leaf in state.table.values()
    ]
    # Changes of other checkpoints are not detected, so their work is never equal.
    others = [str(root) for root in roots(state) if str(root) != stored.metadata.path]
    identity = None if stored.stamp is None else stored.stamp.identity
    content = _native.orbax_json.dumps([rows, _state.treedef.to_json(state.structure)])
    return {
        "version": 1,
        "source": stored.metadata.path,
        "stamp": list(identity or ()),
        "source files": _storage.files.digest(
            repr(files).encode(errors="surrogatepass")
        ),
        "format": options.format,
        "files": list(target.files),
        "leaves": _storage.files.digest(content),
        "layout": dataclasses.asdict(options.layout),
        "others": [*others, os.urandom(16).hex()] if others else [],
        "bytes": [int(state.batch_bytes), int(options.max_shard_bytes)],
    }


def roots(state: writers.State) -> list[Path]:
    """Returns the checkpoints with the sources of the leaves."""
    stored = [source for leaf in state.table.values() for source in _stored(leaf)]
    return list(dict.fromkeys(source.root for source in stored))


def _stored(leaf: Leaf) -> list[StoredLeaf]:
    return [source for source in leaf.sources if isinstance(source, StoredLeaf)]
