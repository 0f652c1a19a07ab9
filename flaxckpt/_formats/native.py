"""Reads the native format: Orbax's own layout, plus our manifest."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxckpt import _state, _steps, _storage, _zarr, datasets, errors
from flaxckpt._formats import (
    composite,
    items,
    native_arrays,
    native_manifest,
    native_metadata,
    orbax_json,
)
from flaxckpt._formats.reader import Stored, check_current
from flaxckpt._state.leaf import LeafInfo, LeafTable
from flaxckpt._storage.transaction import MARKER
from flaxckpt._types import LeafPath

_DATABASE = re.compile(
    rf"(?:manifest\.ocdbt|(?:{re.escape(_zarr.metadata.DATABASE_PART)}\d+/)?d/.+)",
    re.DOTALL,
)
"""A file in an item of the database, or of the database of a single process."""


def read(path: Path, *, step: int | None, resolve: _state.treedef.Resolve) -> Stored:
    """Reads everything but arrays, and checks the digests of the files."""
    file = path / orbax_json.MANIFEST
    if _storage.of(path).exists(file):
        outcome: Stored | errors.DamagedCheckpointError
        names = (orbax_json.MANIFEST, MARKER, items.CHECKPOINT)
        with _storage.paths.read_ahead([path / name for name in names]):
            stamp = _storage.stamp(file)
            try:
                outcome = _read_native(path, step, resolve, stamp)
            except errors.DamagedCheckpointError as error:
                outcome = error
        # All files are of one save: not all have digests in the manifest.
        check_current(path, stamp)
        if isinstance(outcome, errors.DamagedCheckpointError):
            raise outcome
        return outcome
    _check_written_by_others(path)
    return composite.read(
        path, step, functools.partial(read, step=None, resolve=resolve)
    )


def _check_written_by_others(path: Path) -> None:
    """Raises an error if the manifest is missing: the commit marker names it."""
    file = path / orbax_json.MANIFEST
    seal, recorded = _read_seal(path, _storage.of(path).names(path))
    if recorded and orbax_json.MANIFEST in recorded:
        # None: the file was missing, and is there if the step was being replaced.
        check_current(path, _storage.Stamp(file, None))
        raise errors.DamagedCheckpointError(
            f"{file} is missing, although {seal.name} names it; restore another step"
        )


def _read_seal(
    path: Path, names: Collection[str]
) -> tuple[Path, Mapping[str, Any] | None]:
    """Returns the file with the manifest's digest and its content, None without it."""
    # In an item, Orbax adds a commit marker of its own.
    for name in (items.SEAL, MARKER):
        if name in names:
            try:
                return path / name, items.read_json(path / name, path)
            except errors.DamagedCheckpointError:
                return path / name, {}  # Orbax writes a sentence, or no such file
    return path, None


def read_dataset(
    path: Path, digests: Mapping[str, str], name: str = items.DATASET
) -> dict[str, bytes]:
    """Returns the files of the dataset iterator saved in `path`; empty without any.

    Orbax lets its users name the item, so any with grain's files counts, `name` first.
    """
    if _steps.markers.is_item_deleted(path, name):
        return {}
    for file_name in digests:
        is_needed = file_name.startswith(f"{name}/")
        if is_needed and not (path / file_name).is_file():
            items.read_file(path / file_name, path)  # raises
    item = items.find_dataset(path, name)
    if item is None:
        return {}
    files = {}
    for file in sorted(item.iterdir()):
        if file.is_file():
            content = items.read_file(file, path, max_bytes=datasets.MAX_STATE_BYTES)
            items.check_digest(file, digests.get(f"{item.name}/{file.name}"), content)
            files[file.name] = content
    return files


def _read_native(
    path: Path, step: int | None, resolve: _state.treedef.Resolve, stamp: _storage.Stamp
) -> Stored:
    """Reads everything but arrays, of a manifest with this stamp."""
    file = stamp.path
    names = _storage.of(path).names(path)
    content = items.read_file(file, path)
    seal, recorded = _read_seal(path, names)
    if recorded is not None:
        digest = recorded.get(orbax_json.MANIFEST, "")
        items.check_digest(file, digest, content, record=seal)
    data = orbax_json.loads(content, file)
    native_manifest.check_version(data, path)
    try:
        manifest = native_manifest.Manifest.from_json(data, resolve)
    except native_manifest.MALFORMED as error:
        raise errors.DamagedCheckpointError(
            f"{file} is not a manifest: {errors.printable(errors.one_line(error, 200))}"
        ) from None
    digests, parts = manifest.digests, manifest.parts
    deleted = _steps.markers.deleted_items(names)
    present = {item: leaves for item, leaves in parts.items() if item not in deleted}
    table, damaged = _read_items(path, present, manifest, is_alone=len(parts) == 1)
    texts = [item for item in manifest.json if item not in deleted]
    json = items.read_json_items(path, texts, digests)
    damaged |= json.damaged
    infos = [info for info in manifest.infos if info.path in table]
    structure = manifest.structure
    if len(infos) < len(manifest.infos):
        structure = _state.containers.prune(structure, table)
    metadata = dataclasses.replace(
        native_metadata.checkpoint_metadata(
            path,
            "flaxckpt",
            step,
            infos,
            digests,
            manifest.items.dataset,
            names,
            deleted,
            recorded_step=manifest.step,
        ),
        lineage=manifest.lineage,
        transforms=manifest.transforms,
        items=tuple(item for item in present if item not in damaged),
        json=json,
        damaged_items=damaged,
    )
    return Stored(
        metadata,
        {info.path: table[info.path] for info in infos},
        structure,
        manifest.unknown_types,
        manifest,
        stamp,
        manifest.step,
        manifest.items,
        left_out=dict.fromkeys(
            filter(deleted.__contains__, (*parts, *manifest.json)),
            "was deleted from this step",
        ),
        warnings=items.describe_damaged_items(path, damaged),
    )


def _read_items(
    path: Path,
    parts: Mapping[str, Sequence[LeafInfo]],
    manifest: native_manifest.Manifest,
    *,
    is_alone: bool,
) -> tuple[LeafTable, dict[str, str]]:
    """Returns the leaf table of items with arrays, and item -> reason of the damage.

    The table has the leaves of damaged items, too, as the manifest describes them.
    Damage of the only item is an error.
    """
    table: LeafTable = {}
    damaged: dict[str, str] = {}
    for item, leaves in parts.items():
        names = [manifest.items.param_name(info) for info in leaves]
        digests = items.inside(manifest.digests, item)
        strings: dict[LeafPath, str] = {}
        try:
            strings = items.read_strings(
                path / item, path, names, leaves, digests.get(items.STRINGS)
            )
            if not is_alone and not (path / item).is_dir():
                damaged[item] = "is missing; restore another step"
        except errors.DamagedCheckpointError as error:
            if is_alone:
                raise
            damaged[item] = items.describe_damage(error)
        arrays = native_arrays.Arrays(
            path / item,
            manifest.zarr_version,
            manifest.ocdbt,
            encoding=manifest.encoding,
            digests={
                name: digest
                for name, digest in digests.items()
                if not manifest.ocdbt or _DATABASE.fullmatch(name)
            },
            checksums=manifest.checksums,
            sizes=None
            if manifest.files is None
            else items.inside(manifest.files, item),
        )
        table |= native_arrays.leaf_table(path, names, leaves, arrays, strings)
    return table, damaged
