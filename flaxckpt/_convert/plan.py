"""Options of a conversion, and the state to write."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict

from flaxckpt import _arrays, _formats, _state, _storage, _util, errors
from flaxckpt._convert import writers
from flaxckpt._convert.adapter_files import AdapterFiles
from flaxckpt._convert.model_files import ModelFiles
from flaxckpt._formats.items import Items
from flaxckpt._formats.reader import Stored
from flaxckpt._state.leaf import Leaf, LeafInfo
from flaxckpt._transforms import base as _transforms
from flaxckpt._types import JSON
from flaxckpt._zarr.array_layout import ArrayLayout, check_layout
from flaxckpt.transforms import Transform

_log = logging.getLogger(__name__)

DEFAULT_CONCURRENT_BYTES = 2**30
MAX_SHARD_BYTES = 5 * 10**9

_BATCH_BYTES = 256 * 2**20
"""Bytes that are read, written and synced together."""

_LARGE = 2**30
"""Bytes below which checks in advance are not worthwhile."""

_SUFFIXES = {".safetensors": "safetensors", ".msgpack": "msgpack"}
"""Suffix of a path -> the only format with that suffix."""

_ANY_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,11}")
"""What looks like the suffix of a file; `.5` and `.2-1B` are parts of names."""

_FORMATS = ("orbax", "safetensors", "msgpack")
"""Formats to choose in `convert`."""

Progress: TypeAlias = Literal["auto"] | bool | Callable[[int, int], object]


class SharedOptions(TypedDict, total=False):
    """Options of `convert` and of exports; `ConvertOptions` has the defaults."""

    step: int | None
    overwrite: bool
    max_concurrent_bytes: int
    progress: Literal["auto"] | bool | Callable[[int, int], object]
    permissions: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Options of `convert`; `files` are those beside the arrays of `huggingface`."""

    format: Literal["orbax", "safetensors", "msgpack", "huggingface"]
    transforms: Sequence[Transform]
    layout: ArrayLayout = dataclasses.field(default_factory=ArrayLayout)
    items: str | Sequence[str] | None = None
    step: int | None = None
    overwrite: bool = False
    max_shard_bytes: int
    max_concurrent_bytes: int = DEFAULT_CONCURRENT_BYTES
    progress: Progress = "auto"
    permissions: int | None = None
    files: ModelFiles | AdapterFiles = dataclasses.field(default_factory=ModelFiles)

    def __post_init__(self) -> None:
        if self.items is not None and self.format != "orbax":
            raise errors.OptionError(
                f"only format='orbax' has items, got items={self.items!r:.80} with"
                f" format={self.format!r}: leave items out"
            )
        for name in ("max_shard_bytes", "max_concurrent_bytes"):
            _util.arguments.check_int(name, getattr(self, name), least=1)
        check_layout(self.layout)
        object.__setattr__(self, "transforms", _transforms.check(self.transforms))
        is_known = isinstance(self.progress, bool) or self.progress == "auto"
        if not is_known and not callable(self.progress):
            raise errors.OptionError(
                f"progress must be 'auto', a bool or a function, got {self.progress!r}"
            )


takes_options = _util.guessed_names.spell_out(SharedOptions, ConvertOptions)


def choose_format(final: Path, format: str | None) -> Any:
    """Returns `format`, by default from the suffix of the path, which must agree."""
    suffix = _SUFFIXES.get(final.suffix)
    if format is None:
        if suffix is None and _ANY_SUFFIX.fullmatch(final.suffix):
            raise errors.OptionError(
                f"{final} ends in {final.suffix}, which names no format: choose"
                f" {' or '.join(_SUFFIXES)} for a file, a name without a suffix for a"
                " directory of format='orbax', or pass format="
            )
        return suffix or "orbax"
    _util.arguments.check_choice("format", format, _FORMATS)
    if suffix is not None and format != suffix:
        raise errors.OptionError(
            f"{final} ends in {final.suffix}, but files of format={format!r} do not:"
            f" pass format={suffix!r}, or choose another path"
        )
    return format


def check_sources(state: writers.State) -> None:
    """Checks that all leaves can be read; opens large arrays before any work."""
    _arrays.read.check_supported(state.table.values(), state.metadata.path)
    stored = {id(s): s for leaf in state.table.values() for s in leaf.stored}
    for source in stored.values():
        if source.info.stored_bytes > _LARGE:
            _arrays.read.open_one(source)


def check_space(
    final: Path, temporary: Path, state: writers.State, options: ConvertOptions
) -> None:
    """Raises SaveFailedError if the new checkpoint would not fit on the disk.

    Skips the check for compressed chunks, whose size is unknown.
    """
    if options.format == "orbax" and options.layout.codec != "none":
        return
    needed = sum(info.stored_bytes for info in state.infos)
    if needed <= _LARGE:
        return
    directory = next(path for path in final.parents if path.is_dir())
    disk = os.statvfs(directory)
    done = sum(p.lstat().st_blocks * 512 for p in temporary.rglob("*"))
    free = disk.f_bavail * disk.f_frsize + done
    if needed > free:
        raise errors.SaveFailedError(
            f"{final} would have {needed} bytes, and {free} are free in {directory}:"
            " free space, choose another path, or drop leaves with transforms"
        )


def make_state(
    stored: Stored, step: int | None, options: ConvertOptions
) -> writers.State:
    """Returns the state to write as `step`: transformed leaves, and other contents."""
    table = _state.boxes.with_boxes(stored.table, stored.structure)
    table = _transforms.apply(options.transforms, table)
    structure = _state.containers.build(stored.structure, stored.table, table)
    keys = {place.path: place.keys for place in _state.tree.leaf_places(structure)}
    for path, leaf in table.items():
        info = dataclasses.replace(leaf.info, keys=keys[path])
        info = _arrays.layout.with_chunk_shape(info, options.layout)
        table[path] = Leaf(info, leaf.sources, leaf.fn)
    strings = {
        path: leaf.text for path, leaf in table.items() if leaf.info.kind == "string"
    }
    metadata, dataset = stored.metadata, {}
    if metadata.has_dataset and options.format == "orbax":
        source_dir = _storage.paths.from_text(metadata.path)
        dataset = _formats.native.read_dataset(
            source_dir, stored.digests, stored.items.dataset
        )
    items, json = Items(), dict[str, JSON]()
    if options.format == "orbax":
        infos = tuple([leaf.info for leaf in table.values()])
        in_state = (*stored.items.trees, _formats.items.METRICS)
        json = {k: v for k, v in metadata.json.items() if k not in in_state}
        items = _choose_items(stored, infos, json, options.items)
        json = {k: v for k, v in json.items() if k not in (*items.trees, items.dataset)}
    transforms = *metadata.transforms, *_transforms.describe(options.transforms)
    return writers.State(
        table=table,
        structure=structure,
        strings=strings,
        metadata=dataclasses.replace(metadata, transforms=transforms),
        step=step,
        dataset=dataset,
        json=json,
        items=items,
        layout=options.layout,
        max_shard_bytes=options.max_shard_bytes,
        batch_bytes=min(_BATCH_BYTES, max(1, options.max_concurrent_bytes // 2)),
        files=options.files.make([leaf.info for leaf in table.values()]),
        arrays_name=options.files.arrays_name,
    )


def _choose_items(
    stored: Stored,
    infos: Sequence[LeafInfo],
    json: Mapping[str, JSON],
    items: str | Sequence[str] | None,
) -> Items:
    """Returns the items of the new checkpoint.

    By default they are those of the source with leaves, or a single item if the leaves
    cannot be in these items, as after a transform.
    """
    names = _formats.native_names
    dataset = stored.items.dataset
    if names.find_fault(dataset) is not None:
        dataset = _formats.items.DATASET
    if items is not None:
        layout = names.make_items(items, dataset)
        names.check_items(layout, json.keys() & set(layout.trees))
        return layout
    state = stored.items.state or _formats.items.STATE
    if not isinstance(state, str):
        branches = {str(info.keys[0].name) for info in infos if info.keys}
        branches -= stored.metadata.json.keys()
        state = tuple([item for item in state if item in branches])
    layout = Items(state, dataset)
    try:
        names.check_items(layout, ())
        names.check_branches(layout, infos)
    except (errors.OptionError, errors.LeafNameError) as error:
        _log.info("the new checkpoint has one item with all leaves: %s", error)
        return Items(dataset=dataset)
    return layout


def describe_work(
    stored: Stored,
    state: writers.State,
    target: writers.Target,
    options: ConvertOptions,
    files: Sequence[_storage.Stamp],
) -> dict[str, JSON]:
    """Describes the work in JSON: durable pieces of equal work can be kept."""
    rows: list[JSON] = [
        [
            _formats.native_manifest.leaf_row(leaf.info),
            [
                [str(source.root), source.info.path, str(source.info)]
                for source in leaf.stored
            ],
        ]
        for leaf in state.table.values()
    ]
    # Changes of other checkpoints are not detected, so their work is never equal.
    others = [
        str(root) for root in source_roots(state) if str(root) != stored.metadata.path
    ]
    identity = None if stored.stamp is None else stored.stamp.identity
    content = _formats.orbax_json.dumps([rows, _state.treedef.to_json(state.structure)])
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
        "programs": _programs_digest(state),
        "layout": dataclasses.asdict(options.layout),
        "others": [*others, os.urandom(16).hex()] if others else [],
        "bytes": [int(state.batch_bytes), int(options.max_shard_bytes)],
    }


def _programs_digest(state: writers.State) -> str:
    """Returns a digest of the programs of computed leaves; random if one is unknown."""
    program = _arrays.lazy.Programs()
    digests = []
    for leaf in state.table.values():
        if leaf.fn is None:
            continue
        sources = leaf.stored
        if len(sources) < len(leaf.sources):  # values of the caller
            return os.urandom(16).hex()
        try:
            text = program(leaf, [source.info for source in sources])
        except Exception:
            return os.urandom(16).hex()
        digests.append(_storage.files.digest(text.encode()))
    return _storage.files.digest("".join(digests).encode())


def source_roots(state: writers.State) -> list[Path]:
    stored = [source for leaf in state.table.values() for source in leaf.stored]
    return list(dict.fromkeys(source.root for source in stored))
