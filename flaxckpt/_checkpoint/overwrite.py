"""Checks before overwriting: recognises the files that belong to a checkpoint."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Literal

from flaxckpt import _formats, _state, _steps, _storage, _zarr, errors
from flaxckpt._checkpoint import inventory
from flaxckpt._formats import recognise, safetensors, shards
from flaxckpt._formats.native_manifest import Manifest

_log = logging.getLogger(__name__)

# ---- files of a checkpoint -------------------------------------------------------


_FILES = frozenset(
    (_formats.orbax_json.MANIFEST, _formats.items.CHECKPOINT, "commit_success.txt")
)
_CONTROL = rf"{_formats.items.CHECKPOINT}|commit_success\.txt|orbax\.checkpoint"
"""Orbax files that may be in a checkpoint and in each item."""

_TREE_FILE = re.compile(
    rf"{_CONTROL}|{_formats.orbax_json.MANIFEST}|{_formats.items.SEAL}|"
    rf"{_formats.items.TREE}|{_formats.items.SHARDING}|{_formats.items.AGGREGATE}"
    rf"|{re.escape(_formats.items.STRINGS)}|array_metadatas/process_[\w-]+"
)
"""Paths in an item of arrays, except paths of arrays."""

_DATABASE_FILE = re.compile(
    r"(?:ocdbt\.process_[^/]+/)?"
    r"(?:manifest\.(?:ocdbt|[0-9a-f]+)|(?:d|ocdbt_data|ocdbt_meta)/[0-9a-f]{16,}"
    r"|d/(?:tree|\d+\.small\.\d+|\d+\.\d+/[^/]+))"
)
"""Paths in an item of arrays in a database."""

_JSON_FILE = re.compile(
    rf"{_CONTROL}|{_formats.items.JSON_ITEM}|data\.json|{_formats.items.METRICS}"
)
_METRICS_FILE = re.compile(rf"{_CONTROL}|{_formats.items.METRICS}|digests")
_DATASET_FILE = re.compile(
    rf"{_CONTROL}|metadata|process_\d+-of-\d+(?:\.\w+)?|process_0\.json"
    r"|shard_state_\d+\.json"
)
_DESCRIPTOR_FILE = re.compile(rf"{_CONTROL}|\w+\.pbtxt")
_RUN_METADATA_FILE = re.compile(rf"{_CONTROL}|metadata|_ROOT_METADATA")
_OTHER_DIRECTORIES = {
    _formats.items.METRICS: _METRICS_FILE,
    _formats.items.DATASET: _DATASET_FILE,
    "descriptor": _DESCRIPTOR_FILE,
    "metadata": _RUN_METADATA_FILE,
}
"""Directory name -> its files, independent of the handlers in the metadata."""

_ARRAY_METADATA = frozenset(_zarr.metadata.METADATA_FILES.values())
_CHUNK = re.compile(r"c|(?:c[./])?\d+(?:[./]\d+)*")
"""Path of a chunk in the directory of an array."""

_JSON_HANDLERS = frozenset(("JsonCheckpointHandler", "JsonHandler", "MetricsHandler"))
"""Orbax handler classes that write JSON."""

_NFS_FILE = re.compile(r"\.nfs[0-9a-f]{16,}")
"""NFS client's name for a file that is deleted but still open."""

_SYSTEM_FILE = re.compile(
    r"\.DS_Store|Thumbs\.db|desktop\.ini|\._.*|\.ipynb_checkpoints", re.DOTALL
)
"""Files and empty directories that programs create anywhere and users do not need."""

_KNOWN_DIRECTORIES = frozenset(
    (_formats.items.STATE, "array_metadatas", *_OTHER_DIRECTORIES)
)
"""Directories of checkpoints, sometimes empty."""


_CONVERTED = frozenset((".safetensors", ".msgpack"))
_FILE_SUFFIXES = _CONVERTED | frozenset(
    (
        *(".npz", ".npy", ".pkl", ".pickle", ".pt", ".pth", ".bin", ".h5", ".hdf5"),
        *(".keras", ".onnx", ".gguf", ".json", ".zip", ".tar", ".gz"),
    )
)
"""Suffixes of file names."""


def check_name(final: Path, maker: Literal["save", "convert", "a run"]) -> None:
    """Raises OptionError if a path has a file suffix that `maker` does not write."""
    suffix = final.suffix.lower()
    if suffix not in _FILE_SUFFIXES:
        return
    if suffix in _CONVERTED and maker == "save":
        advice = (
            f"save to a name without {suffix}, then convert the checkpoint:"
            f" flaxckpt.convert(checkpoint, {str(final)!r}, format={suffix[1:]!r})"
        )
    else:
        advice = f"choose another path, without {suffix}"
    output = "a directory"
    if maker == "convert":
        output = "directories, and files that end in .safetensors or .msgpack"
    raise errors.OptionError(
        f"{final} has the name of a file, but {maker} writes {output}: {advice}"
    )


def check_free(final: Path, *, overwrite: bool) -> None:
    """Raises CheckpointExistsError: saves replace only checkpoints."""
    if not _storage.of(final).exists(final):
        return
    if _storage.transaction.is_unfinished(final):
        return  # the save removes it unless another process works with it
    try:
        if overwrite or _is_empty(final):
            check_replaceable(final)
            return
    except FileNotFoundError:
        return  # another process has deleted it just now
    raise errors.CheckpointExistsError(
        f"{final} exists: choose another path, or pass overwrite=True (to a"
        " Checkpointer: on_exists='overwrite', or 'skip' to keep the step)"
    )


def check_target_free(
    final: Path, *, overwrite: bool, replaced: Collection[str] = ()
) -> None:
    """Raises an error if a conversion may not write `final`, a directory or a file.

    A conversion may replace a checkpoint of any format. `replaced` are names of files
    beside arrays that it writes as well.
    """
    there = (path for path in final.parents if _storage.of(path).is_taken(path))
    above = next(there, None)  # None in a store without objects above
    if above is not None and not above.is_dir():
        raise errors.OptionError(
            f"{final} cannot be created: {above} is a file, not a directory"
        )
    if not _storage.of(final).exists(final):
        return
    if not (overwrite or _is_empty(final)):
        raise errors.CheckpointExistsError(
            f"{final} exists: choose another path, or pass overwrite=True"
        )
    check_replaceable(final, of_any_format=True, replaced=replaced)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def check_replaceable(
    final: Path, *, of_any_format: bool = False, replaced: Collection[str] = ()
) -> None:
    """Raises an error unless `final` is empty, or a checkpoint without foreign files.

    Only flaxckpt's and Orbax's checkpoints are replaced, unless `of_any_format`.
    """
    foreign = None
    if _is_empty(final):
        return
    if final.is_dir() and not final.is_symlink():
        try:
            foreign = _find_foreign(final, of_any_format=of_any_format)
        except errors.CheckpointError:
            raise
        except OSError as error:
            raise errors.SaveFailedError(
                f"{final} is not overwritten, as its files cannot be listed: {error};"
                " check this directory, then try again"
            ) from error
        foreign = foreign and [name for name in foreign if name not in replaced]
    elif of_any_format and not final.is_symlink() and _formats.recognises(final):
        foreign = []
    if foreign is None:
        what, advice = "is not a checkpoint", "remove it yourself, or choose"
        if final.is_symlink():
            what = "is a symbolic link"
            advice = f"pass its target, {_storage.paths.real(final)}, or choose"
        elif final.is_dir() and _steps.index.StepIndex(final, _formats.identify).steps:
            what = "is a run with steps"
            advice = "save a step of it with Checkpointer, or choose"
        raise errors.CheckpointExistsError(
            f"{final} exists and {what}, so it is not overwritten: {advice} another"
            " path"
        )
    if foreign:
        raise errors.CheckpointExistsError(
            f"{final} is not overwritten: it contains files that do not belong to the"
            f" checkpoint and would be lost:\n{errors.rows(foreign)}\nMove them"
            " elsewhere, then try again, or choose another path."
        )


def find_foreign(step: Path) -> list[str]:
    """Returns the files in a step's directory that do not belong to it."""
    if step.is_symlink() or not step.is_dir():
        return []
    rows = _find_foreign(step, of_any_format=True) or []
    return [name for name in rows if not name.endswith("/")]  # empty directories


def set_aside(final: Path) -> None:
    """Renames a damaged step with foreign files, or raises CheckpointExistsError."""
    try:
        check_replaceable(final)
    except errors.CheckpointExistsError:
        if not _storage.of(final).can_rename:
            raise
    else:
        return
    names = (f"{final.name}.{part}damaged" for part in ("", *_NUMBERS))
    aside = next(
        path for name in names if not os.path.lexists(path := final.with_name(name))
    )
    _storage.rename.withdraw(final, aside)
    _log.warning(
        "%s is damaged, but contains files that do not belong to the checkpoint, so it"
        " is not replaced: it was renamed to %s",
        final,
        aside.name,
    )


_NUMBERS = tuple(f"{number}." for number in range(2, 1000))


def _find_foreign(directory: Path, *, of_any_format: bool) -> list[str] | None:
    """Returns the files in a directory that do not belong to the checkpoint, if any.

    An empty directory, or one with foreign files only, is listed without its files.
    """
    is_orbax = _is_orbax(directory)
    if not is_orbax and not of_any_format:
        return None
    files = {
        entry.path: entry.is_link
        for entry in sorted(_storage.of(directory).walk(directory, strict=True))
        if entry.is_link or not entry.is_directory
    }
    if is_orbax and _formats.orbax_json.MANIFEST in files:
        expected = _flaxckpt_files(directory, files)
    elif is_orbax:
        expected = _orbax_files(directory, files)
    elif recognise.t5x(directory):
        expected = _array_files(files) | {_formats.items.AGGREGATE}
    else:
        expected = _safetensors_files(
            directory, [name for name in files if "/" not in name]
        )
        if not expected:
            return None
    expected = {
        name
        for name, is_link in files.items()
        if not is_link and (name in expected or _is_disposable(name))
    }
    return [*_foreign_rows(files, expected), *_empty_directories(directory)]


def _empty_directories(directory: Path) -> list[str]:
    """Returns the empty foreign directories directly in a checkpoint."""
    if _storage.of(directory).costs_requests:  # and has no empty directories
        return []
    handlers = _formats.items.read_item_handlers(directory)
    items = handlers if isinstance(handlers, dict) else {}
    return sorted(
        f"{child.name}/"
        for child in directory.iterdir()
        if _is_empty(child)
        and child.name not in (*_KNOWN_DIRECTORIES, *items)
        and not _is_disposable(child.name)
    )


def _foreign_rows(files: Iterable[str], expected: Collection[str]) -> list[str]:
    """Returns files not in `expected`; a directory without any as a single row."""
    shared = {name[:i] for name in expected for i in _slashes(name)}
    rows: dict[str, None] = {}
    for name in files:
        if name not in expected:
            ends = [i for i in _slashes(name) if name[:i] not in shared]
            rows[name[: ends[0]] if ends else name] = None
    return list(rows)


def _slashes(name: str) -> Iterator[int]:
    return (match.start() for match in re.finditer("/", name))


def _is_orbax(directory: Path) -> bool:
    """Returns True for a flaxckpt or Orbax checkpoint, even if damaged."""
    names = (
        _steps.markers.DAMAGED,
        _formats.orbax_json.MANIFEST,
        _formats.items.CHECKPOINT,
    )
    if any(_storage.of(directory).exists(directory / name) for name in names):
        return True
    try:
        return _formats.items.is_whole(directory)
    except errors.CheckpointFormatError:  # several items, or none of arrays
        return True


def _flaxckpt_files(directory: Path, files: Collection[str]) -> set[str]:
    listed, kinds = None, {_formats.items.STATE: "tree"}
    if (manifest := _read_manifest(directory)) is not None:
        listed = inventory.make(manifest)
        kinds = dict.fromkeys((manifest.items.dataset, *manifest.json), "json")
        kinds |= dict.fromkeys(manifest.items.trees, "tree")
    elif isinstance(handlers := _formats.items.read_item_handlers(directory), dict):
        kinds |= {name: _handler_kind(str(kind)) for name, kind in handlers.items()}

    def tree_files(item: str, inside: Collection[str]) -> set[str]:
        if listed is None:
            return _tree_files(inside, is_damaged=True)
        files = {name for name in inside if _TREE_FILE.fullmatch(name)}
        if item in listed.unlisted:
            files |= {name for name in inside if _DATABASE_FILE.fullmatch(name)}
        return files

    expected = set(files) & _FILES
    if listed is not None:
        expected |= listed.files.keys() & set(files)
    if _formats.items.TREE in files:  # the checkpoint is an item
        expected |= tree_files("", files)
    for name, inside in _by_directory(files).items():
        if kinds.get(name) == "tree":
            inner = tree_files(name, inside)
        elif name == _formats.items.METRICS:
            inner = {file for file in inside if _METRICS_FILE.fullmatch(file)}
        elif name == _formats.items.DATASET or kinds.get(name) == "json":
            inner = {file for file in inside if _DATASET_FILE.fullmatch(file)}
        else:
            continue
        expected |= {f"{name}/{file}" for file in inner}
    return expected


def _read_manifest(directory: Path) -> Manifest | None:
    """Returns a manifest; None if it is damaged, or does not describe the arrays."""
    try:
        data = _formats.items.read_json(
            directory / _formats.orbax_json.MANIFEST, directory
        )
        manifest = _formats.native_manifest.Manifest.from_json(
            data, _state.treedef.resolve_nothing
        )
    except (errors.DamagedCheckpointError, *_formats.native_manifest.MALFORMED):
        return None
    is_described = manifest.ocdbt or manifest.encoding is not None
    return manifest if is_described else None


def _orbax_files(directory: Path, files: Collection[str]) -> set[str]:
    """Returns the files of an Orbax checkpoint, or of ours without the manifest.

    All files in the item of an unknown handler belong to the checkpoint.
    """
    handlers = _formats.items.read_item_handlers(directory)
    is_damaged = _steps.markers.DAMAGED in files
    expected: set[str] = set()
    # The checkpoint may consist of a single item.
    if not isinstance(handlers, dict) or _formats.items.TREE in files:
        expected |= _tree_files(files, is_damaged=False)
        if isinstance(handlers, str) and _handler_kind(handlers) == "json":
            expected |= _json_files(files)
    expected |= {name for name in files if re.fullmatch(_CONTROL, name)}
    for name, inside in _by_directory(files).items():
        inner: set[str] = set()
        handler = handlers.get(name) if isinstance(handlers, dict) else None
        kind = _handler_kind(handler) if isinstance(handler, str) else None
        if kind == "unknown":
            inner = set(inside)
        elif kind == "json":
            inner = _json_files(inside)
        elif (
            kind == "tree"
            or _formats.items.TREE in inside
            or (not handlers and _is_item(directory / name))
        ):
            inner = _tree_files(inside, is_damaged=is_damaged)
        if not handlers and _formats.items.find_json(directory / name):
            inner |= _json_files(inside)
        if pattern := _OTHER_DIRECTORIES.get(name):
            inner |= {file for file in inside if pattern.fullmatch(file)}
        expected |= {f"{name}/{file}" for file in inner}
    return expected


def _handler_kind(handler: str) -> Literal["tree", "json", "unknown"]:
    """Returns the kind of files written by an Orbax or user handler class."""
    module, _, name = handler.rpartition(".")
    if handler == _formats.items.OWN_HANDLER:
        return "tree"
    if not module.startswith("orbax."):
        return "unknown"
    if _formats.items.is_tree_handler(name):
        return "tree"
    return "json" if name in _JSON_HANDLERS else "unknown"


def _is_item(directory: Path) -> bool:
    """Returns True if a directory not named by metadata is an Orbax item."""
    names = ("manifest.ocdbt", *_ARRAY_METADATA)
    return (
        _formats.items.is_tree(directory)
        or any((directory / name).is_file() for name in names)
        or any(True for name in _ARRAY_METADATA for _ in directory.glob(f"*/{name}"))
    )


def _by_directory(files: Iterable[str]) -> dict[str, list[str]]:
    """Returns the name of each directory -> relative paths of its files."""
    directories: dict[str, list[str]] = {}
    for file in files:
        name, is_inside, rest = file.partition("/")
        if is_inside:
            directories.setdefault(name, []).append(rest)
    return directories


def _tree_files(files: Collection[str], *, is_damaged: bool) -> set[str]:
    """Returns the files of an item with arrays or metadata of arrays."""
    metadata = {
        name
        for name in files
        if _TREE_FILE.fullmatch(name) or _DATABASE_FILE.fullmatch(name)
    }
    return metadata | _array_files(files, is_damaged=is_damaged)


def _json_files(files: Collection[str]) -> set[str]:
    """Returns the JSON files of an item; a single file counts under any name."""
    others = [name for name in files if not re.fullmatch(_CONTROL, name)]
    if len(others) == 1 and "/" not in others[0]:
        return set(files)
    return {name for name in files if _JSON_FILE.fullmatch(name)}


def _array_files(files: Collection[str], *, is_damaged: bool = False) -> set[str]:
    """Returns the metadata and chunk files; some may be missing if `is_damaged`."""
    metadata = {f for f in files if f.rpartition("/")[2] in _ARRAY_METADATA}
    arrays = {file.rpartition("/")[0] for file in metadata}

    def is_chunk(name: str) -> bool:
        if "" in arrays and _CHUNK.fullmatch(name):
            return True
        for number, i in enumerate(_slashes(name)):
            is_array = name[:i] in arrays or (is_damaged and not number)
            if is_array and _CHUNK.fullmatch(name, i + 1):
                return True
        return False

    return metadata | {file for file in files if is_chunk(file)}


def _is_disposable(name: str) -> bool:
    """Returns True for markers, and for files of other processes and file browsers."""
    directory, _, file = name.rpartition("/")
    return (
        _steps.markers.is_marker(file)
        or _storage.files.is_temporary(file)
        or _NFS_FILE.fullmatch(file) is not None
        or _SYSTEM_FILE.fullmatch(file) is not None
        or _storage.temporary.TEMPORARY in directory
    )


def _safetensors_files(directory: Path, names: Iterable[str]) -> set[str]:
    """Returns the files of the only safetensors checkpoint in a directory, or none."""
    names = list(names)
    suffix = safetensors.header.INDEX_SUFFIX
    indices = [name for name in names if name.endswith(suffix)]
    if len(indices) > 1:
        return set()
    if indices:
        return {indices[0], *shards.names(directory / indices[0])}
    files = [name for name in names if name.endswith(safetensors.header.SUFFIX)]
    return set(files) if len(files) == 1 else set()
