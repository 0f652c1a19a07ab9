"""Reads and writes the native format: Orbax's own layout, plus our manifest."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flaxckpt import _arrays, _state, _storage, datasets, errors
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._storage.commit_marker import MARKER
from flaxckpt._types import JSON, LeafPath
from flaxckpt.formats import _orbax
from flaxckpt.formats._native import arrays as native_arrays
from flaxckpt.formats._native import items, orbax_json
from flaxckpt.formats._native import manifest as native_manifest
from flaxckpt.formats._native import metadata as native_metadata
from flaxckpt.formats._native.items import DATASET, METRICS, STATE
from flaxckpt.formats._reader import Lineage, Stored

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


def make_files(contents: Contents) -> dict[str, bytes]:
    """Returns the files of a checkpoint: relative path -> content.

    Without the arrays, and without the files that `seal` makes once all others exist.

    Raises:
        SaveFailedError: `read` would not accept a file.
    """
    files = {
        items.CHECKPOINT: _checkpoint_metadata(contents),
        f"{STATE}/{items.TREE}": orbax_json.tree_metadata(
            contents.infos,
            ocdbt=contents.ocdbt,
            zarr_version=contents.encoding.version,
        ),
        f"{STATE}/{items.SHARDING}": orbax_json.shardings(contents.infos),
        f"{STATE}/{items.ARRAYS}": orbax_json.array_metadatas(contents.infos),
    }
    if contents.strings:
        files[f"{STATE}/{items.STRINGS}"] = orbax_json.strings(contents.strings)
    for name, content in contents.dataset.items():
        files[f"{DATASET}/{name}"] = content
    if contents.metrics:
        metrics = orbax_json.dumps(dict(contents.metrics))
        files[f"{METRICS}/{METRICS}"] = metrics
        files[items.METRICS_DIGESTS] = native_metadata.metrics_digests(metrics)
    for name in _PARSED & files.keys():
        with _trial_parse(name):
            orbax_json.check_size(files[name])
            data = orbax_json.loads(files[name], name)
            if name.endswith(items.STRINGS):
                for leaf in contents.strings:
                    orbax_json.string_at(data, leaf)
    return files


_PARSED = frozenset(
    (
        items.CHECKPOINT,
        f"{STATE}/{items.STRINGS}",
        f"{METRICS}/{METRICS}",
    )
)
"""Files besides the manifest that readers parse."""


@contextlib.contextmanager
def _trial_parse(name: str) -> Iterator[None]:
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
            f"readers would refuse {name} with this content:"
            f" {errors.printable(errors.one_line(error))}\n"
            "Nothing is saved, and earlier checkpoints are unchanged; leave out or"
            " shorten the value at fault, or save several checkpoints."
        ) from error


def seal(
    contents: Contents,
    files: Mapping[str, bytes],
    root: Path,
    digests: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, bytes]:
    """Returns the manifest and the commit marker: relative path -> content.

    The manifest has the digests of all `files` except the metrics, which may be
    replaced later, and of a small database under `root`, which is faster to verify as
    a whole than by its values. For zarr 2, whose chunks have no checksums, it has the
    digests of all array files.

    Args:
        contents: Contents of the checkpoint.
        files: Result of `make_files`.
        root: The directory with the arrays.
        digests: Digests of files written by other processes: name -> digest.

    Raises:
        SaveFailedError: `read` would not accept the manifest.
    """
    recorded = {
        name: _storage.files.digest(content)
        for name, content in files.items()
        if not name.startswith(METRICS)
    }
    recorded |= {**digests, **_digests_of_arrays(contents, root)}
    with _trial_parse(orbax_json.MANIFEST):
        manifest = _manifest_text(contents, recorded)
        orbax_json.check_size(manifest)
        data = orbax_json.loads(manifest, orbax_json.MANIFEST)
        native_manifest.check_readable(data, contents.infos)
    return {orbax_json.MANIFEST: manifest, MARKER: commit_marker(manifest)}


def _digests_of_arrays(contents: Contents, root: Path) -> dict[str, str]:
    """Returns the digests of array files of zarr 2, or of a small database.

    Other arrays rely on the checksums of their chunks.
    """
    is_zarr2 = contents.encoding.version == 2
    state = root / STATE
    if contents.ocdbt:
        files = [state / _arrays.zarr.ocdbt.MANIFEST, *state.glob("d/*")]
        files += state.glob(f"{_arrays.zarr.ocdbt.PART}*/d/*")
    elif is_zarr2:
        names = {orbax_json.param_name(info.keys) for info in contents.infos}
        files = [file for name in names for file in (state / name).glob("*")]
    else:
        return {}
    files = [file for file in files if file.is_file()]  # empty without arrays
    size = sum(file.stat().st_size for file in files)
    if not is_zarr2 and size > _SMALL_DATABASE_BYTES:
        return {}
    return {
        file.relative_to(root).as_posix(): digest
        for file in files
        if (digest := _storage.of(file).digest_file(file, max_bytes=sys.maxsize))
    }


def commit_marker(manifest: bytes) -> bytes:
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
    optional: dict[str, JSON] = {}
    if contents.lineage:
        optional["lineage"] = [origin._asdict() for origin in contents.lineage]
    if contents.transforms:
        optional["transforms"] = list(contents.transforms)
    if contents.metrics:
        optional["metrics"] = True
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
            **optional,
        }
    )


# ---- reading --------------------------------------------------------------------


def recognises(path: Path) -> str | None:
    """Returns the evidence for a native or Orbax checkpoint, or an item; else None."""
    item = items.find_item(path)
    if item is None:
        return None
    if (path / orbax_json.MANIFEST).is_file():
        return f"it has the manifest {orbax_json.MANIFEST}"
    file = item / items.TREE
    if not file.is_file():
        file = item / items.AGGREGATE
    return f"it has the file {file.relative_to(path)}"


def read(path: Path, *, step: int | None, resolve: _state.treedef.Resolve) -> Stored:
    """Reads everything but arrays.

    Raises:
        DamagedCheckpointError: A file is missing, malformed, or differs from its
            recorded digest.
    """
    if _storage.of(path).exists(path / orbax_json.MANIFEST):
        return _read_native(path, step, resolve)
    if orbax_json.MANIFEST in _read_marker(path):
        raise errors.DamagedCheckpointError(
            f"{path / orbax_json.MANIFEST} is missing, although {MARKER} names it;"
            " restore another step"
        )
    return _orbax.read(path, step)


def read_dataset(path: Path, digests: Mapping[str, str]) -> dict[str, bytes]:
    """Returns the files of the dataset iterator saved in `path`; empty without any.

    Also empty after they were deleted on purpose. Orbax lets its users name the item,
    so any item with grain's files counts.
    """
    if native_metadata.is_dataset_deleted(path):
        return {}
    for name in digests:
        if name.startswith(f"{DATASET}/") and not (path / name).is_file():
            items.read_file(path / name, path)  # raises
    directories = [
        path / DATASET,
        *(path / name for name in _storage.of(path).directories(path)),
    ]
    files = {}
    for item in directories:
        if not any(item.glob("process_*-of-*.json")):
            continue
        for file in sorted(item.iterdir()):
            if file.is_file():
                content = items.read_file(
                    file, path, max_bytes=datasets.MAX_STATE_BYTES
                )
                items.check_digest(file, digests.get(f"{DATASET}/{file.name}"), content)
                files[file.name] = content
        break
    return files


def _read_native(
    path: Path, step: int | None, resolve: _state.treedef.Resolve
) -> Stored:
    file = path / orbax_json.MANIFEST
    stamp = _storage.stamp(file)
    content = items.read_file(file, path)
    if _storage.of(path).exists(path / MARKER):
        recorded = _read_marker(path).get(orbax_json.MANIFEST, "")
        items.check_digest(file, recorded, content)
    data = orbax_json.loads(content, file)
    version = data.get("version")
    if version != native_manifest.VERSION:
        raise errors.CheckpointFormatError(
            f"{path} has manifest version {repr(version)[:20]}; this flaxckpt reads"
            f" version {native_manifest.VERSION}: use the flaxckpt that wrote it"
            f" ({repr(data.get('versions'))[:200]}) or a newer one"
        )
    try:
        manifest = native_manifest.parse(data, resolve)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise errors.DamagedCheckpointError(
            f"{file} is not a manifest: {errors.printable(errors.one_line(error, 200))}"
        ) from None
    infos, digests = manifest.infos, manifest.digests
    strings = items.read_strings(path / STATE, path, infos, digests)
    arrays = native_arrays.Arrays(
        path / STATE,
        3 if manifest.encoding is None else manifest.encoding.version,
        manifest.ocdbt,
        encoding=manifest.encoding,
        digests={
            name.removeprefix(f"{STATE}/"): digest
            for name, digest in digests.items()
            if name.startswith(f"{STATE}/")
            and (not manifest.ocdbt or _DATABASE.fullmatch(name))
        },
    )
    metadata = dataclasses.replace(
        native_metadata.checkpoint_metadata(path, "flaxckpt", step, infos, digests),
        lineage=manifest.lineage,
        transforms=manifest.transforms,
    )
    return Stored(
        metadata,
        native_arrays.leaf_table(path, infos, arrays, strings),
        manifest.structure,
        manifest.unknown_types,
        digests,
        stamp,
        manifest.step,
    )


def _read_marker(path: Path) -> Mapping[str, Any]:
    """Returns our commit marker's content, manifest -> digest; empty for Orbax's."""
    try:
        return items.read_json(path / MARKER, path)
    except errors.DamagedCheckpointError:
        return {}  # Orbax writes a sentence, or no such file
