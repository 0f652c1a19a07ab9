"""The native format: what stock Orbax reads and writes, plus our manifest."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorstore as ts

from flaxckpt import _layout, _read, _storage, _tree, _zarr, errors
from flaxckpt._info import (
    CheckpointMetadata,
    Leaf,
    LeafInfo,
    LeafTable,
    Lineage,
    RawArray,
    Stored,
    StoredLeaf,
)
from flaxckpt._types import JSON, LeafPath
from flaxckpt.formats import _orbax_json

_log = logging.getLogger(__name__)

STATE, DATASET, METRICS = "state", "dataset", "metrics"
_CHECKPOINT = "_CHECKPOINT_METADATA"
_TREE = "_METADATA"
_COMMITTED = "commit_success.txt"
_ROOT_METADATA = "metadata/_ROOT_METADATA"
_STRINGS = "_strings.json"
_SHARDING = "_sharding"
_ARRAYS = "array_metadatas/process_0"
_RESERVED = frozenset(
    (_TREE, _SHARDING, _STRINGS, "array_metadatas", "manifest.ocdbt", "d")
)
_MAX_NAME_BYTES = 240
_SMALL_DATABASE_BYTES = 64 * 2**20
_PREFERRED_ITEMS = (STATE, "default", "pytree")
_NOT_ITEMS = frozenset((DATASET, METRICS))


# ---- writing --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Contents:
    """Everything of a checkpoint but its arrays.

    Attributes:
        step: Its number, or None.
        infos: Its leaves, in order.
        structure: Its containers.
        strings: Param name -> value of the string leaves.
        ocdbt: Whether the arrays are in one database.
        encoding: How their chunks are encoded.
        metrics: What was measured.
        custom: The user's metadata.
        dataset: File name -> content, of the iterator's state; empty if none is saved.
        created: When the save began, in seconds since 1970.
        committed: When it ended.
        versions: Package -> version that wrote it.
        lineage: What the run began from.
        transforms: What was changed on the way, as text.
    """

    step: int | None
    infos: Sequence[LeafInfo]
    structure: _tree.Node | LeafPath
    strings: Mapping[str, str]
    ocdbt: bool
    encoding: _zarr.Encoding
    metrics: Mapping[str, float]
    custom: Mapping[str, JSON]
    dataset: Mapping[str, bytes]
    created: float
    committed: float
    versions: Mapping[str, str]
    lineage: Sequence[Lineage] = ()
    transforms: Sequence[str] = ()


def files(contents: Contents) -> dict[str, bytes]:
    """The files of a checkpoint: relative path -> content.

    All but its arrays, and but those that `seal` makes when everything else is there.
    """
    made = {
        _CHECKPOINT: _checkpoint_metadata(contents),
        f"{STATE}/{_TREE}": _orbax_json.tree_metadata(
            contents.infos,
            ocdbt=contents.ocdbt,
            zarr_version=contents.encoding.version,
        ),
        f"{STATE}/{_SHARDING}": _orbax_json.shardings(contents.infos),
        f"{STATE}/{_ARRAYS}": _orbax_json.array_metadatas(contents.infos),
    }
    if contents.strings:
        made[f"{STATE}/{_STRINGS}"] = _orbax_json.strings(contents.strings)
    for name, content in contents.dataset.items():
        made[f"{DATASET}/{name}"] = content
    if contents.metrics:
        made[f"{METRICS}/{METRICS}"] = _orbax_json.dumps(dict(contents.metrics))
    return made


def seal(contents: Contents, made: Mapping[str, bytes], root: Path) -> dict[str, bytes]:
    """The manifest and its own digest: relative path -> content.

    The manifest has the digest of every file in `made` but the metrics, which may be
    written anew later, and of a small database under `root`, which is verified as a
    whole: that is faster than each of its values.
    """
    digests = {
        name: _storage.digest(text)
        for name, text in made.items()
        if not name.startswith(METRICS)
    }
    if contents.ocdbt:
        database = [root / STATE / "manifest.ocdbt", *(root / STATE / "d").glob("*")]
        database = [file for file in database if file.is_file()]  # none without arrays
        if sum(file.stat().st_size for file in database) <= _SMALL_DATABASE_BYTES:
            for file in database:
                name = file.relative_to(root).as_posix()
                digests[name] = _storage.digest(file.read_bytes())
    manifest = _manifest(contents, digests)
    digest = _orbax_json.dumps({_orbax_json.MANIFEST: _storage.digest(manifest)})
    return {_orbax_json.MANIFEST: manifest, _COMMITTED: digest}


def _checkpoint_metadata(contents: Contents) -> bytes:
    handlers = {STATE: _orbax_json.STATE_HANDLER}
    if contents.metrics:
        handlers[METRICS] = _orbax_json.JSON_HANDLER
    if contents.dataset:
        handlers[DATASET] = _orbax_json.JSON_HANDLER
    return _orbax_json.dumps(
        {
            "item_handlers": handlers,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": int(contents.created * 1e9),
            "commit_timestamp_nsecs": int(contents.committed * 1e9),
            "custom_metadata": dict(contents.custom),
        }
    )


def _manifest(contents: Contents, digests: Mapping[str, str]) -> bytes:
    origin: dict[str, JSON] = {}
    if contents.lineage:
        origin["lineage"] = [_orbax_json.lineage_row(each) for each in contents.lineage]
    if contents.transforms:
        origin["transforms"] = list(contents.transforms)
    return _orbax_json.dumps(
        {
            "format": "flaxckpt",
            "version": _orbax_json.MANIFEST_VERSION,
            "step": contents.step,
            "versions": dict(contents.versions),
            "ocdbt": contents.ocdbt,
            "encoding": _orbax_json.encoding_row(contents.encoding),
            "leaves": [_orbax_json.leaf_row(info) for info in contents.infos],
            "structure": _tree.to_json(contents.structure),
            "digests": digests,
            **origin,
        }
    )


def check_names(
    infos: Sequence[LeafInfo], names: Sequence[str], *, ocdbt: bool
) -> None:
    """Refuses leaf names that would collide on disk or that readers cannot take.

    Args:
        infos: The leaves.
        names: What each is called on disk.
        ocdbt: Whether the arrays are in one database.

    Raises:
        LeafNameError: All names at fault.
    """
    faults: dict[str, str] = {}
    seen: dict[str, LeafPath] = {}
    strings = []
    for info, name in zip(infos, names, strict=True):
        if name in seen:
            faults[info.path] = f"is called {name!r} on disk, as {seen[name]} is"
        seen[name] = info.path
        if info.kind == "string":
            strings.append(name)
        if "\0" in name:
            faults[info.path] = "contains a NUL"
        elif info.kind == "string" and "~" in name:
            faults[info.path] = "is a string leaf with a '~', which Orbax cannot read"
        elif _SURROGATES.search(name):
            faults[info.path] = "is no valid Unicode"
        elif (
            not ocdbt
            and info.chunk_shape is not None
            and (not _file_safe(name) or (not name and len(infos) > 1))
        ):
            faults[info.path] = "is no name of a directory; store='ocdbt' takes it"
    for name, outer in _nested_names(strings):
        faults[seen[name]] = f"would stand inside the string {outer!r}"
    if faults:
        raise errors.LeafNameError(
            faults, "Rename these keys; on disk, keys are joined by dots."
        )


def _nested_names(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Names that continue another one after a `/`, with that one."""
    known = set(names)
    for name in known:
        end = name.find("/")
        while end >= 0:
            if name[:end] in known:
                yield name, name[:end]
            end = name.find("/", end + 1)


def file_safe(infos: Sequence[LeafInfo], names: Sequence[str]) -> bool:
    """Whether each array can be a directory of its own; `names` are those on disk."""
    return all(
        # Without a name, an array lies where the directories of others do.
        _file_safe(name) and (name or len(infos) == 1)
        for info, name in zip(infos, names, strict=True)
        if info.chunk_shape is not None
    )


_SURROGATES = re.compile(r"[\ud800-\udfff]")
_UNSAFE_CHARACTERS = re.compile(r"[/\\\n\0]")


def _file_safe(name: str) -> bool:
    return (
        len(name.encode(errors="surrogatepass")) <= _MAX_NAME_BYTES
        and name not in _RESERVED
        and name not in (".", "..")
        and not _UNSAFE_CHARACTERS.search(name)
    )


# ---- reading --------------------------------------------------------------------


def recognises(path: Path) -> str | None:
    """Why `path` is a checkpoint of ours or Orbax's, or one item of it."""
    item = _item(path)
    if item is None:
        return None
    if (path / _orbax_json.MANIFEST).is_file():
        return f"it has the manifest {_orbax_json.MANIFEST}"
    return f"it has the file {(item / _TREE).relative_to(path)}"


def is_whole(path: Path) -> bool:
    """Whether `path` itself is a checkpoint, and not just something around one."""
    names = (_orbax_json.MANIFEST, _CHECKPOINT, _TREE)
    return _item(path) is not None and any((path / name).is_file() for name in names)


def read(path: Path, *, step: int | None, resolve: _tree.Resolve) -> Stored:
    """Reads everything but arrays.

    Raises:
        DamagedCheckpointError: A file is missing, not what it should be, or does not
            have the digest that was written down for it.
    """
    if (path / _orbax_json.MANIFEST).is_file():
        return _read_own(path, step, resolve)
    return _read_foreign(path, step)


def read_metrics(path: Path) -> dict[str, float]:
    """The metrics of the checkpoint `path`; those that are no numbers are left out.

    A damaged file means no metrics: it is no reason to lose the state beside it.
    """
    try:
        content = _storage.read(
            path / METRICS / METRICS, max_bytes=_orbax_json.MAX_BYTES
        )
    except (FileNotFoundError, NotADirectoryError):
        return {}
    try:
        data = _orbax_json.loads(content, path / METRICS / METRICS)
    except errors.DamagedCheckpointError as error:
        _log.warning("the metrics of %s are lost: %s", path, error)
        return {}
    return {
        name: float(value)
        for name, value in data.items()
        if isinstance(value, int | float)
    }


def write_metrics(path: Path, metrics: Mapping[str, float]) -> None:
    """Writes the metrics of the committed checkpoint `path` anew, in one step."""
    _storage.make_directory(path / METRICS)
    _storage.replace(path / METRICS / METRICS, _orbax_json.dumps(dict(metrics)))


def read_dataset(path: Path, digests: Mapping[str, str]) -> dict[str, bytes]:
    """The files of the dataset iterator saved in `path`; empty if there are none.

    Orbax lets its users name the item, so any that has grain's files is taken.
    """
    for name in digests:
        if name.startswith(f"{DATASET}/") and not (path / name).is_file():
            _file(path / name)  # raises
    items = [path / DATASET, *(path / name for name in _storage.directories(path))]
    item = next((i for i in items if any(i.glob("process_*-of-*.json"))), None)
    if item is None:
        return {}
    files = {}
    for file in sorted(item.iterdir()):
        if file.is_file():
            files[file.name] = _file(file)
            _check_digest(file, files[file.name], digests.get(f"{DATASET}/{file.name}"))
    return files


def read_run_metadata(root: Path) -> dict[str, JSON]:
    """The user's metadata of a whole run, where Orbax keeps it."""
    path = root / _ROOT_METADATA
    if not path.is_file():
        return {}
    custom = _orbax_json.loads(_file(path), path).get("custom_metadata")
    return custom if isinstance(custom, dict) else {}


def write_run_metadata(root: Path, custom: Mapping[str, JSON]) -> None:
    """Writes the user's metadata of a whole run, in one step."""
    path = root / _ROOT_METADATA
    _storage.make_directory(path.parent)
    _storage.replace(
        path,
        _orbax_json.dumps({"internal_metadata": {}, "custom_metadata": dict(custom)}),
    )


def _item(path: Path) -> Path | None:
    """The directory that holds the arrays of the checkpoint `path`."""
    for name in _PREFERRED_ITEMS:
        if (path / name / _TREE).is_file():
            return path / name
    if (path / _TREE).is_file():
        return path
    if not (path / _CHECKPOINT).is_file():
        return None
    items = [
        name
        for name in sorted(_storage.directories(path))
        if (path / name / _TREE).is_file() and name not in _NOT_ITEMS
    ]
    if len(items) > 1:
        raise errors.CheckpointFormatError(
            f"{path} holds several items, {', '.join(items)}: "
            f"load one of them by its own path, {path / items[0]}"
        )
    return path / items[0] if items else None


def _file(path: Path) -> bytes:
    try:
        return _storage.read(path, max_bytes=_orbax_json.MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise errors.DamagedCheckpointError(
            f"{path} is missing; restore another step"
        ) from None


def _json_file(path: Path) -> dict[str, Any]:
    return _orbax_json.loads(_file(path), path)


def _read_own(path: Path, step: int | None, resolve: _tree.Resolve) -> Stored:
    stamp = _storage.stamp(path / _orbax_json.MANIFEST)
    raw = _file(path / _orbax_json.MANIFEST)
    if (path / _COMMITTED).is_file():
        recorded = _json_file(path / _COMMITTED).get(_orbax_json.MANIFEST)
        _check_digest(path / _orbax_json.MANIFEST, raw, recorded)
    manifest = _orbax_json.loads(raw, path / _orbax_json.MANIFEST)
    version = manifest.get("version")
    if version != _orbax_json.MANIFEST_VERSION:
        raise errors.CheckpointFormatError(
            f"{path} has manifest version {version!r}, this flaxckpt reads"
            f" {_orbax_json.MANIFEST_VERSION}; use the flaxckpt that wrote it"
            f" ({manifest.get('versions')}) or a newer one"
        )
    unknown: set[str] = set()
    try:
        structure = _tree.from_json(manifest["structure"], resolve, unknown)
        keys = dict(_tree.key_paths(structure))
        infos = [_orbax_json.leaf_info(row, keys) for row in manifest["leaves"]]
        digests = dict(manifest["digests"])
        ocdbt = bool(manifest["ocdbt"])
        encoding = _orbax_json.encoding(manifest)
        lineage = _orbax_json.lineage(manifest)
        transforms = _orbax_json.texts(manifest.get("transforms", []))
        if {info.path for info in infos} != set(keys):
            raise ValueError("its leaves and its structure do not agree")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise errors.DamagedCheckpointError(
            f"{path / _orbax_json.MANIFEST} is not a manifest: {str(error)[:200]}"
        ) from None
    strings = _read_strings(path / STATE, infos, digests)
    arrays = _Arrays(
        path / STATE,
        3 if encoding is None else encoding.version,
        ocdbt,
        encoding=encoding,
        digests={
            name.removeprefix(f"{STATE}/"): digest
            for name, digest in digests.items()
            if _is_of_database(name)
        },
    )
    described = dataclasses.replace(
        _checkpoint_info(path, "flaxckpt", step, infos, digests),
        lineage=lineage,
        transforms=transforms,
    )
    return Stored(
        described,
        _table(path, infos, arrays, strings),
        structure,
        frozenset(unknown),
        digests,
        stamp,
    )


def _check_digest(path: Path, content: bytes, recorded: object) -> None:
    if recorded is not None and _storage.digest(content) != recorded:
        raise errors.DamagedCheckpointError(
            f"{path} has changed since it was saved: wanted {recorded},"
            f" found {_storage.digest(content)}; restore another step"
        )


def _read_strings(
    item: Path, infos: Sequence[LeafInfo], digests: Mapping[str, str]
) -> dict[LeafPath, str]:
    wanted = [info for info in infos if info.kind == "string"]
    if not wanted:
        return {}
    path = item / _STRINGS
    raw = _file(path)
    _check_digest(path, raw, digests.get(f"{STATE}/{_STRINGS}"))
    data = _orbax_json.loads(raw, path)
    try:
        return {
            info.path: _orbax_json.string_at(data, _orbax_json.param_name(info.keys))
            for info in wanted
        }
    except KeyError as error:
        raise errors.DamagedCheckpointError(
            f"{path} lacks the string {error}; restore another step"
        ) from None


def _is_of_database(name: str) -> bool:
    return name == f"{STATE}/manifest.ocdbt" or name.startswith(f"{STATE}/d/")


@dataclasses.dataclass(frozen=True, slots=True)
class _Arrays:
    """Where the arrays of a checkpoint are.

    Attributes:
        root: The directory that holds them, or the database of them.
        version: Of the zarr format.
        ocdbt: Whether `root` is a database.
        strict: Whether a missing chunk is damage; else it is zeros.
        encoding: Of their chunks; None if only each array's metadata tells.
        digests: File of the database -> its digest, if they are recorded.
    """

    root: Path
    version: int
    ocdbt: bool
    strict: bool = True
    encoding: _zarr.Encoding | None = None
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def opener(self, name: str) -> Callable[[ts.Context], ts.Future[ts.TensorStore]]:
        return functools.partial(
            _read.open_zarr,
            root=self.root,
            name=name,
            version=self.version,
            ocdbt=self.ocdbt,
            strict=self.strict,
        )

    def raw(self, name: str, info: LeafInfo) -> RawArray | None:
        if self.encoding is None:
            return None
        if not _zarr.is_raw(self.encoding, *_layout.stored_form(info)):
            return None
        return RawArray(self.root, name, self.ocdbt, self.encoding, self.digests)


def _table(
    path: Path,
    infos: Sequence[LeafInfo],
    arrays: _Arrays,
    strings: Mapping[LeafPath, str],
) -> LeafTable:
    table = {}
    for info in infos:
        stored = StoredLeaf(path, info, value=strings.get(info.path))
        if info.dtype is not None:
            name = _orbax_json.param_name(info.keys)
            raw = arrays.raw(name, info)
            stored = StoredLeaf(path, info, arrays.opener(name), raw=raw)
        table[info.path] = Leaf(info, (stored,))
    return table


def _checkpoint_info(
    path: Path,
    format_name: str,
    step: int | None,
    infos: Sequence[LeafInfo],
    digests: Mapping[str, str],
) -> CheckpointMetadata:
    found: dict[str, Any] = {}
    if _CHECKPOINT in digests or (path / _CHECKPOINT).is_file():
        raw = _file(path / _CHECKPOINT)
        if _CHECKPOINT in digests:
            _check_digest(path / _CHECKPOINT, raw, digests[_CHECKPOINT])
            found = _orbax_json.loads(raw, path / _CHECKPOINT)
        else:
            # Orbax tolerates rubbish here, and nothing of the state depends on it.
            try:
                found = _orbax_json.loads(raw, path / _CHECKPOINT)
            except errors.DamagedCheckpointError:
                found = {}
    custom = found.get("custom_metadata")
    return CheckpointMetadata(
        str(path),
        format_name,
        step,
        {info.path: info for info in infos},
        read_metrics(path),
        _seconds(found.get("init_timestamp_nsecs")),
        _seconds(found.get("commit_timestamp_nsecs")),
        custom if isinstance(custom, dict) else {},
        (path / DATASET).is_dir(),
        sum(_layout.stored_bytes(info) for info in infos),
    )


def _seconds(nanoseconds: object) -> float | None:
    return nanoseconds / 1e9 if isinstance(nanoseconds, int | float) else None


# ---- reading what Orbax wrote ---------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _ForeignRow:
    keys: tuple[_tree.Key, ...]
    value_type: str

    @property
    def name(self) -> str:
        return _orbax_json.param_name(self.keys)

    @property
    def is_array(self) -> bool:
        return (
            self.value_type != "string"
            and _orbax_json.foreign_empty(self.value_type) is None
        )


def _read_foreign(path: Path, step: int | None) -> Stored:
    item = _item(path)
    assert item is not None, path
    stamp = _storage.stamp(item / _TREE)
    metadata = _json_file(item / _TREE)
    rows = _foreign_rows(item, metadata)
    version = 3 if metadata.get("use_zarr3") else 2
    ocdbt = metadata.get("use_ocdbt")
    if ocdbt is None:
        ocdbt = (item / "manifest.ocdbt").is_file()
    arrays = _foreign_arrays(item, rows, version=version, ocdbt=bool(ocdbt))
    impls = _foreign_prng_impls(item)
    infos = [_foreign_info(item, row, arrays, impls) for row in rows]
    kept = _Arrays(
        item,
        version,
        bool(ocdbt),
        strict=bool(metadata.get("store_array_data_equal_to_fill_value")),
    )
    return Stored(
        _checkpoint_info(path, "orbax", step, infos, {}),
        _table(path, infos, kept, _read_strings(item, infos, {})),
        _tree.plain_structure(
            (i.path, i.keys, i.python_type if i.kind == "empty" else None)
            for i in infos
        ),
        stamp=stamp,
    )


def _foreign_rows(item: Path, metadata: Mapping[str, Any]) -> list[_ForeignRow]:
    try:
        rows = [
            _ForeignRow(
                _orbax_json.foreign_keys(row), str(row["value_metadata"]["value_type"])
            )
            for row in metadata["tree_metadata"].values()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise errors.DamagedCheckpointError(
            f"{item / _TREE} does not describe a tree: {str(error)[:200]}"
        ) from None
    # A partial save leaves placeholders at the prefixes of paths saved later.
    inner = {row.keys[:n] for row in rows for n in range(len(row.keys))}
    return sorted(
        (row for row in rows if row.keys not in inner or len(rows) == 1),
        key=lambda row: [_rank(key) for key in row.keys],
    )


def _rank(key: _tree.Key) -> tuple[str, int]:
    return ("", int(key.name)) if key.kind == "index" else (str(key.name), 0)


def _foreign_arrays(
    item: Path, rows: Sequence[_ForeignRow], *, version: int, ocdbt: bool
) -> dict[str, tuple[tuple[int, ...], str, tuple[int, ...]]]:
    """Shape, dtype and chunk shape of every array, from its own zarr metadata."""
    store = ts.KvStore.open(_zarr.kvstore(item, "", ocdbt=ocdbt)).result()
    file = "zarr.json" if version == 3 else ".zarray"
    reads = {
        row.name: store.read(f"{row.name}/{file}" if row.name else file)
        for row in rows
        if row.is_array
    }
    found = {}
    faults = {}
    for name, future in reads.items():
        try:
            result = future.result()
            if result.state != "value":
                raise ValueError(f"{file} is missing")
            if len(result.value) > _orbax_json.MAX_BYTES:
                raise ValueError(f"{file} is too large")
            data = _orbax_json.loads(bytes(result.value), f"{name}/{file}")
            found[name] = _orbax_json.foreign_array(data)
        except (ValueError, KeyError, TypeError, OSError, errors.CheckpointError) as e:
            faults[name] = str(e).split(" [")[0][:200]
    if faults:
        raise errors.DamagedCheckpointError(
            f"{len(faults)} leaves of {item} cannot be read:\n"
            + errors.rows(f"{name}: {reason}" for name, reason in faults.items())
            + "\nRestore another step."
        )
    return found


def _foreign_prng_impls(item: Path) -> dict[str, str]:
    directory = item / "array_metadatas"
    if not directory.is_dir():
        return {}
    impls = {}
    for path in sorted(directory.iterdir())[:1]:
        for row in _json_file(path).get("array_metadatas", []):
            array = row.get("array_metadata", {})
            impl = (array.get("ext_metadata") or {}).get("random_key_impl")
            if isinstance(impl, str):
                impls[str(array.get("param_name"))] = impl
    return impls


def _foreign_info(
    item: Path,
    row: _ForeignRow,
    arrays: Mapping[str, tuple[tuple[int, ...], str, tuple[int, ...]]],
    impls: Mapping[str, str],
) -> LeafInfo:
    path = _tree.join(row.keys)
    if empty := _orbax_json.foreign_empty(row.value_type):
        return LeafInfo(path, row.keys, "empty", empty)
    if row.value_type == "string":
        return LeafInfo(path, row.keys, "string", "str")
    shape, dtype, chunk_shape = arrays[row.name]
    try:
        python_type = _orbax_json.foreign_python_type(row.value_type, dtype)
    except ValueError as error:
        raise errors.DamagedCheckpointError(f"{item}: {path}: {error}") from None
    impl = impls.get(row.name)
    is_scalar = python_type not in ("jax.Array", "numpy.ndarray")
    return LeafInfo(
        path,
        row.keys,
        "prng_key" if impl else "scalar" if is_scalar else "array",
        python_type,
        shape[:-1] if impl else shape,
        dtype,
        chunk_shape=chunk_shape,
        weak_type=is_scalar,
        prng_impl=impl,
    )
