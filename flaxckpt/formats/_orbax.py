"""The native format: what stock Orbax reads and writes, plus our manifest."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxckpt import (
    _links,
    _marked,
    _marks,
    _remote,
    _storage,
    _structure,
    _tree,
    _unfinished,
    _write,
    _zarr,
    datasets,
    errors,
)
from flaxckpt._info import (
    LeafInfo,
    Lineage,
    Stored,
)
from flaxckpt._types import JSON, LeafPath
from flaxckpt.formats import _orbax_arrays, _orbax_disk, _orbax_foreign, _orbax_json

_log = logging.getLogger(__name__)

COMMITTED = _marked.MARKER
_ROOT_METADATA = "metadata/_ROOT_METADATA"
STATE, DATASET, METRICS = _orbax_disk.STATE, _orbax_disk.DATASET, _orbax_disk.METRICS
UNDIGESTED = frozenset(
    (
        _orbax_json.MANIFEST,
        COMMITTED,
        f"{METRICS}/{METRICS}",
        _orbax_disk.METRICS_DIGESTS,
    )
)
"""Files of a checkpoint that are no arrays, and whose digests are not in it."""

_SHARDING = "_sharding"
_ARRAYS = "array_metadatas/process_0"
_RESERVED = frozenset(
    (
        _orbax_disk.TREE,
        _SHARDING,
        _orbax_disk.STRINGS,
        "array_metadatas",
        "manifest.ocdbt",
        "d",
    )
)
_DATABASE = re.compile(
    rf"{STATE}/(?:manifest\.ocdbt|(?:{re.escape(_write.DATABASE_OF)}\d+/)?d/.+)",
    re.DOTALL,
)
"""A file of the database, or of one that a single process has written."""

_MAX_NAME_BYTES = 240
_SMALL_DATABASE_BYTES = 64 * 2**20


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
        _orbax_disk.CHECKPOINT: _checkpoint_metadata(contents),
        f"{STATE}/{_orbax_disk.TREE}": _orbax_json.tree_metadata(
            contents.infos,
            ocdbt=contents.ocdbt,
            zarr_version=contents.encoding.version,
        ),
        f"{STATE}/{_SHARDING}": _orbax_json.shardings(contents.infos),
        f"{STATE}/{_ARRAYS}": _orbax_json.array_metadatas(contents.infos),
    }
    if contents.strings:
        made[f"{STATE}/{_orbax_disk.STRINGS}"] = _orbax_json.strings(contents.strings)
    for name, content in contents.dataset.items():
        made[f"{DATASET}/{name}"] = content
    if contents.metrics:
        text = _orbax_json.dumps(dict(contents.metrics))
        made[f"{METRICS}/{METRICS}"] = text
        made[_orbax_disk.METRICS_DIGESTS] = _digests_of_metrics(text)
    return made


def seal(
    contents: Contents,
    made: Mapping[str, bytes],
    root: Path,
    others: Mapping[str, str] | None = None,
) -> dict[str, bytes]:
    """The manifest and its own digest: relative path -> content.

    The manifest has the digest of every file in `made` but the metrics, which may be
    written anew later, and of a small database under `root`, which is verified as a
    whole: that is faster than each of its values. Of zarr 2, whose chunks have no
    checksums, it has the digests of all files. `others` are the digests of files that
    other processes have written.
    """
    digests = {
        name: _storage.digest(text)
        for name, text in made.items()
        if not name.startswith(METRICS)
    }
    digests |= {**(others or {}), **_digests_of_arrays(contents, root)}
    manifest = _manifest(contents, digests)
    return {_orbax_json.MANIFEST: manifest, COMMITTED: seal_of(manifest)}


def _digests_of_arrays(contents: Contents, root: Path) -> dict[str, str]:
    """Path of a file of arrays -> its digest, where each chunk's own are not enough."""
    is_bare = contents.encoding.version == 2
    if contents.ocdbt:
        state = root / STATE
        found = [state / "manifest.ocdbt", *state.glob("d/*")]
        found += state.glob(f"{_write.DATABASE_OF}*/d/*")
    elif is_bare:
        names = {_orbax_json.param_name(info.keys) for info in contents.infos}
        found = [file for name in names for file in (root / STATE / name).glob("*")]
    else:
        return {}
    found = [file for file in found if file.is_file()]  # none without arrays
    size = sum(file.stat().st_size for file in found)
    if not is_bare and size > _SMALL_DATABASE_BYTES:
        return {}
    return {
        file.relative_to(root).as_posix(): digest
        for file in found
        if (digest := _storage.digest_file(file, max_bytes=sys.maxsize))
    }


def _digests_of_metrics(*texts: bytes) -> bytes:
    digests = [_storage.digest(text) for text in texts]
    return _orbax_json.dumps({METRICS: digests})


def are_digests_of_metrics(text: bytes, file: Path) -> bool:
    """Whether the content of `metrics/digests` is such as is written there.

    Raises:
        DamagedCheckpointError: It is no JSON.
    """
    found = _orbax_json.loads(text, file).get(METRICS)
    return isinstance(found, list) and text == _orbax_json.dumps({METRICS: found})


def seal_of(manifest: bytes) -> bytes:
    """The content of `commit_success.txt`."""
    return _orbax_json.dumps({_orbax_json.MANIFEST: _storage.digest(manifest)})


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
    origin: dict[str, JSON] = {}  # and what else is not always there
    if contents.lineage:
        origin["lineage"] = [_orbax_json.lineage_row(each) for each in contents.lineage]
    if contents.transforms:
        origin["transforms"] = list(contents.transforms)
    if contents.metrics:
        origin["metrics"] = True
    return _orbax_json.dumps(
        {
            "format": "flaxckpt",
            "version": _orbax_json.MANIFEST_VERSION,
            "step": contents.step,
            "versions": dict(contents.versions),
            "ocdbt": contents.ocdbt,
            "encoding": _orbax_json.encoding_row(contents.encoding),
            "leaves": [_orbax_json.leaf_row(info) for info in contents.infos],
            "structure": _structure.to_json(contents.structure),
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
    item = _orbax_disk.item(path)
    if item is None:
        return None
    if (path / _orbax_json.MANIFEST).is_file():
        return f"it has the manifest {_orbax_json.MANIFEST}"
    file = item / _orbax_disk.TREE
    if not file.is_file():
        file = item / _orbax_disk.AGGREGATE
    return f"it has the file {file.relative_to(path)}"


def is_whole(path: Path) -> bool:
    """Whether `path` itself is a checkpoint, and not just something around one."""
    names = (_orbax_json.MANIFEST, _orbax_disk.CHECKPOINT, _orbax_disk.TREE)
    return _orbax_disk.item(path) is not None and any(
        (path / name).is_file() for name in names
    )


def read(path: Path, *, step: int | None, resolve: _structure.Resolve) -> Stored:
    """Reads everything but arrays.

    Raises:
        DamagedCheckpointError: A file is missing, not what it should be, or does not
            have the digest that was written down for it.
    """
    if _storage.lexists(path / _orbax_json.MANIFEST):
        return _read_own(path, step, resolve)
    if _orbax_json.MANIFEST in _committed(path):
        raise errors.DamagedCheckpointError(
            f"{path / _orbax_json.MANIFEST} is missing, as {COMMITTED} tells; restore"
            " another step"
        )
    return _orbax_foreign.read(path, step)


read_metrics = _orbax_disk.read_metrics
metrics_in = _orbax_disk.metrics_in
numbers_in = _orbax_disk.numbers_in
read_created = _orbax_disk.read_created
has_let_go_dataset = _orbax_disk.has_let_go_dataset


def file_to_lock(path: Path) -> Path:
    """A file of the checkpoint `path` that is always there and never replaced."""
    names = (_orbax_json.MANIFEST, _orbax_disk.CHECKPOINT)
    return next((path / name for name in names if (path / name).is_file()), path)


def write_metrics(path: Path, metrics: Mapping[str, JSON]) -> None:
    """Writes the metrics of the committed checkpoint `path` anew, in one step.

    Raises:
        ValueError: They would be written behind a link out of the checkpoint.
    """
    _links.check_file(path / METRICS / METRICS, path)
    _write_metrics(path, metrics)
    _marks.mark_measured(path)


def _write_metrics(path: Path, metrics: Mapping[str, JSON]) -> None:
    content = _orbax_json.dumps(dict(metrics))
    if (path / METRICS).is_dir():
        _replace_metrics(path, content)
        return
    if _remote.is_remote(path):  # the second is not asked for while it is not there
        _storage.replace(path / METRICS / METRICS, content)
        digests = _digests_of_metrics(content)
        _storage.replace(path / _orbax_disk.METRICS_DIGESTS, digests)
        return
    # Made beside it: Orbax takes a directory without its file for damage.
    with _unfinished.made(path) as made:
        _storage.write(made / METRICS, content)
        file = made / Path(_orbax_disk.METRICS_DIGESTS).name
        _storage.write(file, _digests_of_metrics(content))
        _storage.sync_directory(made)
        try:
            made.rename(path / METRICS)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # Somebody else was first, who knew nothing of these.
            _replace_metrics(path, content)
    _storage.sync_directory(path)


def _replace_metrics(path: Path, content: bytes) -> None:
    right = [content]
    with contextlib.suppress(errors.DamagedCheckpointError):
        right.append(_orbax_disk.read_file(path / METRICS / METRICS, path))
    # Both are right until the new ones are there, whenever that is cut off.
    _storage.replace(path / _orbax_disk.METRICS_DIGESTS, _digests_of_metrics(*right))
    _storage.replace(path / METRICS / METRICS, content)
    _storage.replace(path / _orbax_disk.METRICS_DIGESTS, _digests_of_metrics(content))


def read_dataset(path: Path, digests: Mapping[str, str]) -> dict[str, bytes]:
    """The files of the dataset iterator saved in `path`; empty if there are none.

    So they are if they were let go.

    Orbax lets its users name the item, so any that has grain's files is taken.
    """
    if _orbax_disk.has_let_go_dataset(path):
        return {}
    for name in digests:
        if name.startswith(f"{DATASET}/") and not (path / name).is_file():
            _orbax_disk.read_file(path / name, path)  # raises
    items = [path / DATASET, *(path / name for name in _storage.directories(path))]
    item = next((i for i in items if any(i.glob("process_*-of-*.json"))), None)
    if item is None:
        return {}
    files = {}
    for file in sorted(item.iterdir()):
        if file.is_file():
            files[file.name] = _orbax_disk.read_file(
                file, path, max_bytes=datasets.MAX_STATE_BYTES
            )
            _orbax_disk.check_digest(
                file, files[file.name], digests.get(f"{DATASET}/{file.name}")
            )
    return files


def read_run_metadata(root: Path) -> dict[str, JSON]:
    """The user's metadata of a whole run, where Orbax keeps it."""
    path = root / _ROOT_METADATA
    if not path.is_file():
        return {}
    custom = _orbax_disk.json_file(path, root).get("custom_metadata")
    return custom if isinstance(custom, dict) else {}


def write_run_metadata(root: Path, custom: Mapping[str, JSON]) -> None:
    """Writes the user's metadata of a whole run, in one step.

    Raises:
        ValueError: It would be written behind a link out of the run.
    """
    path = root / _ROOT_METADATA
    _links.check_file(path, root)
    _storage.make_directory(path.parent)
    _storage.replace(
        path,
        _orbax_json.dumps({"internal_metadata": {}, "custom_metadata": dict(custom)}),
    )


def _read_own(path: Path, step: int | None, resolve: _structure.Resolve) -> Stored:
    stamp = _storage.stamp(path / _orbax_json.MANIFEST)
    raw = _orbax_disk.read_file(path / _orbax_json.MANIFEST, path)
    if _storage.lexists(path / COMMITTED):
        recorded = _committed(path).get(_orbax_json.MANIFEST, "")
        _orbax_disk.check_digest(path / _orbax_json.MANIFEST, raw, recorded)
    manifest = _orbax_json.loads(raw, path / _orbax_json.MANIFEST)
    version = manifest.get("version")
    if version != _orbax_json.MANIFEST_VERSION:
        raise errors.CheckpointFormatError(
            f"{path} has manifest version {repr(version)[:20]}, this flaxckpt reads"
            f" {_orbax_json.MANIFEST_VERSION}; use the flaxckpt that wrote it"
            f" ({repr(manifest.get('versions'))[:200]}) or a newer one"
        )
    unknown: set[str] = set()
    try:
        structure = _structure.from_json(manifest["structure"], resolve, unknown)
        keys = _orbax_json.key_paths(structure)
        infos = [_orbax_json.leaf_info(row, keys) for row in manifest["leaves"]]
        digests = _orbax_json.digests(manifest["digests"])
        ocdbt = bool(manifest["ocdbt"])
        encoding = _orbax_json.encoding(manifest)
        lineage = _orbax_json.lineage(manifest)
        transforms = _orbax_json.texts(manifest.get("transforms", []))
        recorded = _orbax_json.step(manifest)
        _orbax_json.check_leaves(infos, keys, structure)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise errors.DamagedCheckpointError(
            f"{path / _orbax_json.MANIFEST} is not a manifest:"
            f" {errors.printable(str(error)[:200])}"
        ) from None
    strings = _orbax_disk.read_strings(path / STATE, path, infos, digests)
    arrays = _orbax_arrays.Arrays(
        path / STATE,
        3 if encoding is None else encoding.version,
        ocdbt,
        encoding=encoding,
        digests={
            name.removeprefix(f"{STATE}/"): digest
            for name, digest in digests.items()
            if name.startswith(f"{STATE}/") and (not ocdbt or _is_of_database(name))
        },
    )
    described = dataclasses.replace(
        _orbax_disk.checkpoint_info(path, "flaxckpt", step, infos, digests),
        lineage=lineage,
        transforms=transforms,
    )
    return Stored(
        described,
        _orbax_arrays.table(path, infos, arrays, strings),
        structure,
        frozenset(unknown),
        digests,
        stamp,
        recorded,
    )


def _committed(path: Path) -> Mapping[str, Any]:
    """What was committed: our manifest -> its digest; empty if we did not write it."""
    try:
        return _orbax_disk.json_file(path / COMMITTED, path)
    except errors.DamagedCheckpointError:
        return {}  # Orbax writes a sentence there, where it writes it


def is_of_arrays(name: str) -> bool:
    """Whether the file `name` of a checkpoint has nothing but values of arrays."""
    root, _, rest = name.partition("/")
    described = (_orbax_disk.TREE, _SHARDING, _orbax_disk.STRINGS, _ARRAYS)
    return root == STATE and rest not in described


def _is_of_database(name: str) -> bool:
    return _DATABASE.fullmatch(name) is not None
