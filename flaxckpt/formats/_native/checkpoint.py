"""Reads and writes the native format: Orbax's own layout, plus our manifest."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxckpt import _arrays, _state, _storage, datasets, errors
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import JSON, LeafPath
from flaxckpt.formats import _orbax
from flaxckpt.formats._native import arrays as native_arrays
from flaxckpt.formats._native import items as native_items
from flaxckpt.formats._native import manifest as native_manifest
from flaxckpt.formats._native import metrics as native_metrics
from flaxckpt.formats._native import orbax_json
from flaxckpt.formats._reader import Lineage, Stored

COMMITTED = _storage.commit_marker.MARKER
_ROOT_METADATA = "metadata/_ROOT_METADATA"
_OLD_ROOT_METADATA = "metadata/metadata"
"""File of Orbax before 0.11 that contains only the user's metadata of a run."""

STATE, DATASET, METRICS = native_items.STATE, native_items.DATASET, native_items.METRICS
UNDIGESTED = frozenset(
    (
        orbax_json.MANIFEST,
        COMMITTED,
        f"{METRICS}/{METRICS}",
        native_items.METRICS_DIGESTS,
    )
)
"""Files without digests in the manifest, apart from arrays."""

_DATABASE = re.compile(
    rf"{STATE}/(?:manifest\.ocdbt|(?:{re.escape(_arrays.zarr.ocdbt.PART)}\d+/)?d/.+)",
    re.DOTALL,
)
"""A file of the database, or of the database of a single process."""

_SMALL_DATABASE_BYTES = 64 * 2**20


# ---- writing --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Contents of a checkpoint except the arrays.

    Attributes:
        infos: The leaves, in order.
        structure: The containers.
        ocdbt: Whether the arrays are in an OCDBT database.
        encoding: Encoding of the chunks.
        step: Step number, or None.
        strings: Param name -> value of the string leaves.
        metrics: Metrics of the step.
        custom: The user's metadata.
        dataset: File name -> content of the dataset iterator's state; empty if not
            saved.
        created: Time of the start of the save, in seconds since 1970.
        lineage: Checkpoints that the run started from.
        transforms: The transforms applied to the state, as text.
    """

    infos: Sequence[LeafInfo]
    structure: _state.tree.Node | LeafPath
    ocdbt: bool
    encoding: _arrays.zarr.metadata.Encoding
    step: int | None = None
    strings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    custom: Mapping[str, JSON] = dataclasses.field(default_factory=dict)
    dataset: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    created: float = 0.0
    lineage: Sequence[Lineage] = ()
    transforms: Sequence[str] = ()


def files(contents: Contents) -> dict[str, bytes]:
    """Returns the files of a checkpoint: relative path -> content.

    Without the arrays, and without the files that `seal` makes once all others exist.

    Raises:
        SaveFailedError: `read` would not accept a file.
    """
    made = {
        native_items.CHECKPOINT: _checkpoint_metadata(contents),
        f"{STATE}/{native_items.TREE}": orbax_json.tree_metadata(
            contents.infos,
            ocdbt=contents.ocdbt,
            zarr_version=contents.encoding.version,
        ),
        f"{STATE}/{native_items.SHARDING}": orbax_json.shardings(contents.infos),
        f"{STATE}/{native_items.ARRAYS}": orbax_json.array_metadatas(contents.infos),
    }
    if contents.strings:
        made[f"{STATE}/{native_items.STRINGS}"] = orbax_json.strings(contents.strings)
    for name, content in contents.dataset.items():
        made[f"{DATASET}/{name}"] = content
    if contents.metrics:
        text = orbax_json.dumps(dict(contents.metrics))
        made[f"{METRICS}/{METRICS}"] = text
        made[native_items.METRICS_DIGESTS] = native_metrics.digests_of(text)
    for name in _PARSED & made.keys():
        with _readable(name):
            orbax_json.check_size(made[name])
            found = orbax_json.loads(made[name], name)
        if name.endswith(native_items.STRINGS):
            with _readable(name):
                for leaf in contents.strings:
                    orbax_json.string_at(found, leaf)
    return made


_PARSED = frozenset(
    (
        native_items.CHECKPOINT,
        f"{STATE}/{native_items.STRINGS}",
        f"{METRICS}/{METRICS}",
    )
)
"""Files besides the manifest that readers parse."""


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    """Context of a trial parse of the file `name`, before the commit.

    Raises:
        SaveFailedError: The parse failed; explains why readers cannot read the file.
    """
    try:
        yield
    except (
        *(ValueError, TypeError, KeyError, AttributeError, RecursionError),
        errors.DamagedCheckpointError,
    ) as error:
        raise errors.SaveFailedError(
            f"no reader would take {name} as it is to be written:"
            f" {errors.printable(str(error)[:300])}\n"
            "Nothing is saved, and earlier checkpoints are untouched; leave out or"
            " shorten what it is about, or save it in several checkpoints."
        ) from error


def seal(
    contents: Contents,
    made: Mapping[str, bytes],
    root: Path,
    others: Mapping[str, str] | None = None,
) -> dict[str, bytes]:
    """Returns the manifest and the commit marker: relative path -> content.

    The manifest has the digests of all files in `made` except the metrics, which may
    be replaced later, and of a small database under `root`, which is faster to verify
    as a whole than by its values. For zarr 2, whose chunks have no checksums, it has
    the digests of all array files. `others` are digests of files of other processes.

    Raises:
        SaveFailedError: `read` would not accept the manifest.
    """
    digests = {
        name: _storage.files.digest(text)
        for name, text in made.items()
        if not name.startswith(METRICS)
    }
    digests |= {**(others or {}), **_digests_of_arrays(contents, root)}
    with _readable(orbax_json.MANIFEST):
        manifest = _manifest_text(contents, digests)
        orbax_json.check_size(manifest)
        data = orbax_json.loads(manifest, orbax_json.MANIFEST)
        native_manifest.check_readable(data, contents.infos)
    return {orbax_json.MANIFEST: manifest, COMMITTED: seal_of(manifest)}


def _digests_of_arrays(contents: Contents, root: Path) -> dict[str, str]:
    """Returns the digests of array files of zarr 2, or of a small database.

    Other arrays rely on the checksums of their chunks.
    """
    is_bare = contents.encoding.version == 2
    if contents.ocdbt:
        state = root / STATE
        found = [state / _arrays.zarr.ocdbt.MANIFEST, *state.glob("d/*")]
        found += state.glob(f"{_arrays.zarr.ocdbt.PART}*/d/*")
    elif is_bare:
        names = {orbax_json.param_name(info.keys) for info in contents.infos}
        found = [file for name in names for file in (root / STATE / name).glob("*")]
    else:
        return {}
    found = [file for file in found if file.is_file()]  # empty without arrays
    size = sum(file.stat().st_size for file in found)
    if not is_bare and size > _SMALL_DATABASE_BYTES:
        return {}
    return {
        file.relative_to(root).as_posix(): digest
        for file in found
        if (digest := _storage.of(file).digest_file(file, max_bytes=sys.maxsize))
    }


def seal_of(manifest: bytes) -> bytes:
    """Returns the content of `commit_success.txt`."""
    return orbax_json.dumps({orbax_json.MANIFEST: _storage.files.digest(manifest)})


def _checkpoint_metadata(contents: Contents) -> bytes:
    handlers = {STATE: orbax_json.STATE_HANDLER}
    if contents.metrics:
        handlers[METRICS] = orbax_json.JSON_HANDLER
    if contents.dataset:
        handlers[DATASET] = orbax_json.JSON_HANDLER
    return orbax_json.dumps(
        {
            "item_handlers": handlers,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": int(contents.created * 1e9),
            "commit_timestamp_nsecs": time.time_ns(),
            "custom_metadata": dict(contents.custom),
        }
    )


def _manifest_text(contents: Contents, digests: Mapping[str, str]) -> bytes:
    origin: dict[str, JSON] = {}  # and other optional fields
    if contents.lineage:
        origin["lineage"] = [
            native_manifest.lineage_row(each) for each in contents.lineage
        ]
    if contents.transforms:
        origin["transforms"] = list(contents.transforms)
    if contents.metrics:
        origin["metrics"] = True
    return orbax_json.dumps(
        {
            "format": "flaxckpt",
            "version": native_manifest.VERSION,
            "step": contents.step,
            "versions": native_manifest.versions(),
            "ocdbt": contents.ocdbt,
            "encoding": native_manifest.encoding_row(contents.encoding),
            "leaves": [native_manifest.leaf_row(info) for info in contents.infos],
            "structure": _state.treedef.to_json(contents.structure),
            "digests": digests,
            **origin,
        }
    )


# ---- reading --------------------------------------------------------------------


def recognises(path: Path) -> str | None:
    """Returns the evidence for a native or Orbax checkpoint, or an item; else None."""
    item = native_items.item(path)
    if item is None:
        return None
    if (path / orbax_json.MANIFEST).is_file():
        return f"it has the manifest {orbax_json.MANIFEST}"
    file = item / native_items.TREE
    if not file.is_file():
        file = item / native_items.AGGREGATE
    return f"it has the file {file.relative_to(path)}"


def is_whole(path: Path) -> bool:
    """Returns True if `path` itself is a checkpoint, not just a parent directory."""
    names = (orbax_json.MANIFEST, native_items.CHECKPOINT, native_items.TREE)
    return native_items.item(path) is not None and any(
        (path / name).is_file() for name in names
    )


def read(path: Path, *, step: int | None, resolve: _state.treedef.Resolve) -> Stored:
    """Reads everything but arrays.

    Raises:
        DamagedCheckpointError: A file is missing, malformed, or differs from its
            recorded digest.
    """
    if _storage.of(path).exists(path / orbax_json.MANIFEST):
        return _read_own(path, step, resolve)
    if orbax_json.MANIFEST in _committed(path):
        raise errors.DamagedCheckpointError(
            f"{path / orbax_json.MANIFEST} is missing, as {COMMITTED} tells; restore"
            " another step"
        )
    return _orbax.read(path, step)


read_metrics = native_items.read_metrics
metrics_in = native_items.metrics_in
numbers_in = native_items.numbers_in
with_metrics = native_items.with_metrics
read_created = native_items.read_created
is_json_item = native_items.is_json_item
json_advice = native_items.json_advice
has_let_go_dataset = native_items.has_let_go_dataset
write_metrics = native_metrics.write
are_digests_of_metrics = native_metrics.are_digests


def file_to_lock(path: Path) -> Path:
    """Returns a file to lock for the checkpoint `path`: never missing or replaced."""
    names = (orbax_json.MANIFEST, native_items.CHECKPOINT)
    return next((path / name for name in names if (path / name).is_file()), path)


def read_dataset(path: Path, digests: Mapping[str, str]) -> dict[str, bytes]:
    """Returns the files of the dataset iterator saved in `path`; empty without any.

    Also empty after they were deleted on purpose. Orbax lets its users name the item,
    so any item with grain's files counts.
    """
    if native_items.has_let_go_dataset(path):
        return {}
    for name in digests:
        if name.startswith(f"{DATASET}/") and not (path / name).is_file():
            native_items.read_file(path / name, path)  # raises
    items = [
        path / DATASET,
        *(path / name for name in _storage.of(path).directories(path)),
    ]
    item = next((i for i in items if any(i.glob("process_*-of-*.json"))), None)
    if item is None:
        return {}
    files = {}
    for file in sorted(item.iterdir()):
        if file.is_file():
            files[file.name] = native_items.read_file(
                file, path, max_bytes=datasets.MAX_STATE_BYTES
            )
            recorded = digests.get(f"{DATASET}/{file.name}")
            native_items.check_digest(file, recorded, files[file.name])
    return files


def read_run_metadata(root: Path) -> dict[str, JSON]:
    """Returns the user's metadata of a whole run, from Orbax's file."""
    if (path := root / _ROOT_METADATA).is_file():
        return native_items.custom_in(native_items.json_file(path, root))
    if (path := root / _OLD_ROOT_METADATA).is_file():
        return native_items.json_file(path, root)
    return {}


def write_run_metadata(root: Path, custom: Mapping[str, JSON]) -> None:
    """Writes the user's metadata of a whole run atomically.

    Raises:
        ValueError: The path of the file leads out of the run through a symlink.
    """
    path = root / _ROOT_METADATA
    _storage.of(path).check_file(path, root)
    _storage.of(path.parent).make_directory(path.parent)
    _storage.of(path).replace(
        path,
        orbax_json.dumps({"internal_metadata": {}, "custom_metadata": dict(custom)}),
    )


def _read_own(path: Path, step: int | None, resolve: _state.treedef.Resolve) -> Stored:
    stamp = _storage.stamp(path / orbax_json.MANIFEST)
    raw = native_items.read_file(path / orbax_json.MANIFEST, path)
    if _storage.of(path).exists(path / COMMITTED):
        recorded = _committed(path).get(orbax_json.MANIFEST, "")
        native_items.check_digest(path / orbax_json.MANIFEST, recorded, raw)
    manifest = orbax_json.loads(raw, path / orbax_json.MANIFEST)
    version = manifest.get("version")
    if version != native_manifest.VERSION:
        raise errors.CheckpointFormatError(
            f"{path} has manifest version {repr(version)[:20]}, this flaxckpt reads"
            f" {native_manifest.VERSION}; use the flaxckpt that wrote it"
            f" ({repr(manifest.get('versions'))[:200]}) or a newer one"
        )
    try:
        said = native_manifest.parse(manifest, resolve)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise errors.DamagedCheckpointError(
            f"{path / orbax_json.MANIFEST} is not a manifest:"
            f" {errors.printable(str(error)[:200])}"
        ) from None
    strings = native_items.read_strings(path / STATE, path, said.infos, said.digests)
    arrays = native_arrays.Arrays(
        path / STATE,
        3 if said.encoding is None else said.encoding.version,
        said.ocdbt,
        encoding=said.encoding,
        digests={
            name.removeprefix(f"{STATE}/"): digest
            for name, digest in said.digests.items()
            if name.startswith(f"{STATE}/")
            and (not said.ocdbt or _DATABASE.fullmatch(name))
        },
    )
    described = dataclasses.replace(
        native_items.checkpoint_info(path, "flaxckpt", step, said.infos, said.digests),
        lineage=said.lineage,
        transforms=said.transforms,
    )
    return Stored(
        described,
        native_arrays.table(path, said.infos, arrays, strings),
        said.structure,
        said.unknown_types,
        said.digests,
        stamp,
        said.step,
    )


def _committed(path: Path) -> Mapping[str, Any]:
    """Returns our commit marker's content, manifest -> digest; empty for Orbax's."""
    try:
        return native_items.json_file(path / COMMITTED, path)
    except errors.DamagedCheckpointError:
        return {}  # Orbax writes a sentence, or no such file


def is_of_arrays(name: str) -> bool:
    """Returns True if the file `name` of a checkpoint contains only array data."""
    root, _, rest = name.partition("/")
    return root == STATE and rest not in native_items.DESCRIPTIONS
