"""Finds and reads the items and files of a checkpoint in Orbax's layout."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from flaxckpt import _storage, _zarr, datasets, errors
from flaxckpt._formats import orbax_files, orbax_json, signatures
from flaxckpt._formats.orbax_files import StepMetadata
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import JSON, LeafPath

_T = TypeVar("_T")

STATE, DATASET, METRICS = "state", "dataset", "metrics"
CHECKPOINT = "_CHECKPOINT_METADATA"
TREE = "_METADATA"
AGGREGATE = "checkpoint"
"""The tree in msgpack, of Orbax until 0.6: values, and names of zarr arrays."""

STRINGS = "_strings.json"
SHARDING = "_sharding"
ARRAYS = "array_metadatas/process_0"
DESCRIPTIONS = frozenset((TREE, SHARDING, STRINGS, ARRAYS))
"""Files of the state other than arrays."""

SEAL = "flaxckpt.digest"
"""The digest of the manifest, in an item; a checkpoint has it in the commit marker."""

METRICS_DIGESTS = f"{METRICS}/digests"
"""Digests of the metrics, which can be replaced in a committed checkpoint."""

UNDIGESTED = frozenset(
    (
        orbax_json.MANIFEST,
        _storage.transaction.MARKER,
        SEAL,
        CHECKPOINT,
        f"{METRICS}/{METRICS}",
        METRICS_DIGESTS,
    )
)
"""Files that may have no digest in the manifest, apart from arrays.

Orbax writes `_CHECKPOINT_METADATA` and the commit marker into items.
"""

PREFERRED_ITEMS = (STATE, "default", "pytree")
NOT_ITEMS = frozenset((DATASET, METRICS))


@dataclasses.dataclass(frozen=True, slots=True)
class Items:
    """The items of a checkpoint with arrays, and the item of the dataset.

    Attributes:
        state: The item of the whole state, or the top-level branches of the state that
            are items of their own. The empty string is the checkpoint itself.
        dataset: The item with the state of the dataset iterator.
    """

    state: str | tuple[str, ...] = STATE
    dataset: str = DATASET

    @property
    def trees(self) -> tuple[str, ...]:
        return (self.state,) if isinstance(self.state, str) else self.state

    def item_of(self, info: LeafInfo) -> str:
        """Returns the item of a leaf; raises ValueError if it is in none."""
        if isinstance(self.state, str):
            return self.state
        name = str(info.keys[0].name) if info.keys else ""
        if name not in self.state:
            raise ValueError(f"the leaf {info.path[:80]!r} is in no item")
        return name

    def split(self, infos: Sequence[LeafInfo]) -> dict[str, Sequence[LeafInfo]]:
        """Returns the leaves of each item; raises ValueError if a leaf is in none."""
        if isinstance(self.state, str):
            return {self.state: infos}
        parts: dict[str, list[LeafInfo]] = {item: [] for item in self.state}
        for info in infos:
            parts[self.item_of(info)].append(info)
        return dict(parts)

    def below(self, infos: Sequence[LeafInfo]) -> Sequence[LeafInfo]:
        """Returns leaves of an item with their keys in the item."""
        if isinstance(self.state, str):
            return infos
        return [dataclasses.replace(info, keys=info.keys[1:]) for info in infos]

    def param_name(self, info: LeafInfo) -> str:
        """Returns Orbax's name of a leaf in its item, the keys joined by dots."""
        keys = info.keys if isinstance(self.state, str) else info.keys[1:]
        return orbax_json.param_name(keys)

    def array_directory(self, info: LeafInfo, name: str | None = None) -> str:
        """Returns the relative directory; `name` is that of `param_name`, if known."""
        item = self.state if isinstance(self.state, str) else self.item_of(info)
        name = self.param_name(info) if name is None else name
        return f"{item}/{name}".rstrip("/") if item else name

    def tree_of_file(self, name: str) -> str | None:
        """Returns the item with a file of array data, a path in the checkpoint."""
        for item in self.trees:
            root = prefix(item)
            rest = name.removeprefix(root)
            is_other = rest in DESCRIPTIONS or name in UNDIGESTED
            if name.startswith(root) and not is_other:
                return item
        return None


def database(item: str) -> str:
    """Returns the file that an item's OCDBT database begins with."""
    return f"{prefix(item)}{_zarr.metadata.DATABASE}"


def has_chunk_digests(names: Iterable[str], item: str) -> bool:
    """Returns True if digests of `names` cover an item's chunks, not only its tree."""
    root = prefix(item)
    chunks = (f"{root}d/", f"{root}{_zarr.metadata.DATABASE_PART}")
    tree = f"{root}{_zarr.metadata.TREE}"
    return any(name.startswith(chunks) and name != tree for name in names)


def prefix(item: str) -> str:
    """Returns the beginning of the paths of an item's files in the checkpoint."""
    return f"{item}/" if item else ""


def inside(files: Mapping[str, _T], item: str) -> dict[str, _T]:
    """Returns the files of an item: path in the item -> value."""
    root = prefix(item)
    return {
        name.removeprefix(root): value
        for name, value in files.items()
        if name.startswith(root)
    }


def find_item(path: Path) -> Path | None:
    """Returns the directory of the tree of arrays, or of a JSON item, or None.

    In an object store, an item counts only with a commit marker. Raises
    CheckpointFormatError if all items are of other kinds.
    """

    def is_committed() -> bool:  # asked last: the parent may cost a request
        return any(map(_storage.transaction.is_committed, (path, path.parent)))

    for name in (*PREFERRED_ITEMS, ""):
        if is_tree(path / name):
            return path / name if is_committed() else None
    if not ((path / CHECKPOINT).is_file() and is_committed()):
        return None
    names = sorted(_storage.of(path).directories(path))
    for name in names:
        if is_tree(path / name) or is_native(path / name):
            return path / name
    handlers = read_item_handlers(path)
    recorded = handlers.values() if isinstance(handlers, dict) else ()
    texts = [path / name for name in names if find_json(path / name)]
    if len(texts) > 1 and not any(map(is_tree_handler, recorded)):
        return texts[0]
    _check_tree(path)
    return None


def recognises(path: Path) -> str | None:
    """Returns the evidence for a native or Orbax checkpoint, or an item; else None."""
    item = find_item(path)
    if item is None:
        return None
    if (path / orbax_json.MANIFEST).is_file():
        return f"it has the manifest {orbax_json.MANIFEST}"
    files = (item / TREE, item / orbax_json.MANIFEST, find_json(item))
    file = next((f for f in files if f and f.is_file()), item / AGGREGATE)
    return f"it has the file {file.relative_to(path)}"


OWN_HANDLER = "flaxckpt.integrations.orbax.CheckpointHandler"

_TREE_HANDLERS = (
    OWN_HANDLER,
    "StandardCheckpointHandler",
    "PyTreeCheckpointHandler",
    "PyTreeHandler",
)
"""Ends of the names of handler classes for trees of arrays."""


def is_tree_handler(name: object) -> bool:
    """Returns True for the name of a handler class for trees of arrays."""
    return str(name).endswith(_TREE_HANDLERS)


JSON_ITEM = "metadata"
_JSON_FILES = ("data.json", JSON_ITEM)
"""Files of a JSON item by Orbax's handlers, the newest first."""


def find_json(item: Path) -> Path | None:
    """Returns the file of a JSON item of Orbax; None for another directory."""
    try:
        names = set(_storage.of(item).names(item))
    except (NotADirectoryError, FileNotFoundError):
        return None
    if not names <= {*_JSON_FILES, CHECKPOINT, _storage.transaction.MARKER}:
        return None
    files = (item / name for name in _JSON_FILES if name in names)
    return next((file for file in files if file.is_file()), None)


def json_advice(file: Path) -> str:
    name = errors.printable(str(file))
    return f"read it with json.loads(pathlib.Path({name!r}).read_text())"


def read_step_metadata(path: Path) -> StepMetadata:
    return StepMetadata.from_json(read_json(path / CHECKPOINT, path))


def read_item_handlers(path: Path) -> Mapping[str, Any] | str | None:
    """Returns the recorded Orbax handlers, item -> class; a class for a single item."""
    try:
        return read_step_metadata(path).handlers
    except (errors.DamagedCheckpointError, OSError):
        return None


def _check_tree(path: Path) -> None:
    """Raises CheckpointFormatError for an Orbax checkpoint without a tree of arrays."""
    if _storage.of(path).exists(path / orbax_json.MANIFEST):
        return
    try:
        handlers = read_step_metadata(path).handlers
    except errors.DamagedCheckpointError:
        return
    if isinstance(handlers, str):  # a checkpoint of a single item
        handlers = {"": handlers}
    if not isinstance(handlers, dict) or not handlers:  # as before Orbax 0.11
        names = [n for n in _storage.of(path).directories(path) if find_json(path / n)]
        handlers = dict.fromkeys(names, "JsonCheckpointHandler")
    handlers = {n: kind for n, kind in handlers.items() if n not in NOT_ITEMS}
    if not handlers or any(map(is_tree_handler, handlers.values())):
        return
    texts = [file for name in sorted(handlers) if (file := find_json(path / str(name)))]
    rows = [
        f"{name or '.'}: {str(kind).rpartition('.')[2]}"
        for name, kind in sorted(handlers.items())
    ]
    raise errors.CheckpointFormatError(
        f"{path} holds no tree of arrays; other handlers of Orbax wrote its items:\n"
        f"{errors.rows(rows)}\n"
        + (
            f"A JSON item is a file: {json_advice(texts[0])}"
            if texts
            else "Read it with the Orbax that wrote it."
        )
    )


def is_tree(path: Path) -> bool:
    return (path / TREE).is_file() or bool(signatures.read_first_keys(path / AGGREGATE))


def is_native(path: Path) -> bool:
    """Returns True if `path` has our manifest, or the seal of a lost manifest."""
    return any((path / name).is_file() for name in (orbax_json.MANIFEST, SEAL))


def find_dataset(path: Path, name: str = DATASET) -> Path | None:
    """Returns the item of `path` with an iterator's files, `name` first, or None."""
    if not path.is_dir():
        return None
    names = sorted(_storage.of(path).directories(path))
    for item in sorted(names, key=lambda n: n != name):
        if is_dataset(path / item):
            return path / item
    return None


def is_dataset(path: Path) -> bool:
    """Returns True if `path` holds the files of a dataset iterator, but no tree."""
    names = (file.name for file in path.glob("process_*.json"))
    return any(map(datasets.is_state_name, names)) and not is_tree(path)


def read_file(
    path: Path, checkpoint: Path, *, max_bytes: int = orbax_json.MAX_BYTES
) -> bytes:
    """Returns the content of a required file, which must be inside the checkpoint."""
    storage = _storage.of(path)
    try:
        storage.check_file(path, checkpoint)
        return storage.read(path, max_bytes=max_bytes)
    except ValueError as error:
        raise errors.DamagedCheckpointError(str(error)) from None
    except (FileNotFoundError, NotADirectoryError):
        raise errors.DamagedCheckpointError(
            f"{path} is missing; restore another step"
        ) from None


def read_json(path: Path, checkpoint: Path) -> dict[str, Any]:
    return orbax_json.loads(read_file(path, checkpoint), path)


def read_json_item(item: Path, checkpoint: Path, digests: Mapping[str, str]) -> JSON:
    """Returns the content of a JSON item; raises an error if its digest differs."""
    file = find_json(item) or item / JSON_ITEM
    content = read_file(file, checkpoint)
    check_digest(file, digests.get(f"{item.name}/{file.name}"), content)
    return orbax_json.parse(content, file)


class JsonItems(dict[str, JSON]):
    """JSON items: item -> content; a damaged one raises DamagedCheckpointError."""

    def __init__(
        self,
        contents: Iterable[tuple[str, JSON]] = (),
        damaged: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(contents)
        self.damaged = dict(damaged)

    def __missing__(self, item: str) -> JSON:
        if item in self.damaged:
            raise errors.DamagedCheckpointError(
                f"the JSON item {item} {self.damaged[item]}"
            )
        raise KeyError(item)


def read_json_items(
    path: Path, names: Iterable[str], digests: Mapping[str, str]
) -> JsonItems:
    """Returns the JSON items `names` of the checkpoint `path`."""
    contents: dict[str, JSON] = {}
    damaged: dict[str, str] = {}
    for item in names:
        try:
            contents[item] = read_json_item(path / item, path, digests)
        except errors.DamagedCheckpointError as error:
            damaged[item] = describe_damage(error)
    return JsonItems(contents.items(), damaged)


def describe_damage(error: errors.DamagedCheckpointError) -> str:
    """Returns why an item cannot be read; raises `error` if it proves no damage."""
    if _storage.read_errors.is_unread(error):
        raise error
    return f"cannot be read: {errors.one_line(error)}"


def describe_damaged_items(path: Path, damaged: Mapping[str, str]) -> tuple[str, ...]:
    """Returns a warning about the damaged items of a checkpoint: item -> the reason."""
    if not damaged:
        return ()
    rows = errors.rows(f"{item} {why}" for item, why in damaged.items())
    return (f"{path} has damaged items; the others can be read:\n{rows}",)


def check_digest(
    path: Path,
    recorded: object,
    content: bytes | None = None,
    *,
    record: Path | None = None,
) -> None:
    """Compares a file, or its `content`, with its recorded digest, if there is one.

    `record` is the file with the digest, if nothing proves that it is whole.
    """
    if recorded is None:
        return
    digest: str | None = None
    if content is not None:
        digest = _storage.files.digest(content)
    else:
        with contextlib.suppress(FileNotFoundError):
            digest = _storage.of(path).digest_file(path, max_bytes=sys.maxsize)
    name = f"{path}" if record is None else f"{path}, or its digest in {record.name},"
    try:
        _storage.files.check_digest(name, digest, recorded)
    except ValueError as error:
        raise errors.DamagedCheckpointError(f"{error}; restore another step") from None


def read_strings(
    item: Path,
    checkpoint: Path,
    names: Sequence[str],
    infos: Sequence[LeafInfo],
    digest: str | None = None,
) -> dict[LeafPath, str]:
    leaves = {
        info.path: name
        for name, info in zip(names, infos, strict=True)
        if info.kind == "string"
    }
    if not leaves:
        return {}
    path = item / STRINGS
    content = read_file(path, checkpoint)
    check_digest(path, digest, content)
    data = orbax_json.loads(content, path)
    try:
        return {
            leaf_path: orbax_files.string_at(data, name)
            for leaf_path, name in leaves.items()
        }
    except KeyError as error:
        raise errors.DamagedCheckpointError(
            f"{path}: wanted the string {error}, found none; restore another step"
        ) from None


def is_whole(path: Path) -> bool:
    """Returns True if `path` itself is a checkpoint, not just a parent directory."""
    names = (orbax_json.MANIFEST, CHECKPOINT, TREE)
    return find_item(path) is not None and any(
        (path / name).is_file() for name in names
    )


def file_to_lock(path: Path) -> Path:
    """Returns a file to lock for the checkpoint `path`: never missing or replaced."""
    names = (orbax_json.MANIFEST, CHECKPOINT)
    return next((path / name for name in names if (path / name).is_file()), path)
