"""Reads arrays from storage into memory, within a byte budget.

Each part that a local device needs is read exactly once. Raw chunks (see
`_arrays.zarr.metadata`) are mapped, or read directly into place; other chunks come
through TensorStore.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorstore as ts

from flaxckpt import _state, _storage, _util, errors
from flaxckpt._arrays import faults as read_faults
from flaxckpt._arrays import layout, read_raw, shards, to_device
from flaxckpt._arrays.read_raw import Reading
from flaxckpt._arrays.zarr import metadata
from flaxckpt._arrays.zarr.metadata import Array, Region
from flaxckpt._state.leaf import LeafInfo, StoredLeaf
from flaxckpt._types import JSON, LeafPath

_DECODED_AT_ONCE = 128 * 2**20
"""Bytes that TensorStore decodes at a time, beside the encoded bytes."""

_DATABASE_VALUE_BYTES = 2**20
"""Maximal size of arrays in a database that are read as its values."""


class ReadJob(NamedTuple):
    """A leaf to read, with the form to return.

    Attributes:
        stored: The leaf in the checkpoint.
        wanted: The type, sharding and kind of the returned value.
    """

    stored: StoredLeaf
    wanted: LeafInfo

    @property
    def found(self) -> LeafInfo:
        """Stored form of the leaf."""
        return self.stored.info


class ReadOptions(NamedTuple):
    """Options of a read.

    Attributes:
        memory_map: True to map local files if possible without a copy.
        verify: True to compare raw chunks with their checksums. TensorStore always
            verifies its chunks.
        max_concurrent_bytes: Bytes read, and not yet returned as arrays, at a time. A
            larger leaf is read alone.
        report: Called with the number of uncompressed bytes after each read.
    """

    memory_map: bool
    verify: bool
    max_concurrent_bytes: int
    report: Callable[[int], object] = _util.progress.ignore


def open_one(stored: StoredLeaf) -> ts.TensorStore:
    """Opens a stored array, read-only.

    Raises:
        DamagedCheckpointError: The array is missing, or differs from its record.
    """
    try:
        store = _storage.paths.result(
            _open(stored, _storage.client.context()), stored.root
        )
        _check_form(stored.info, store)
    except errors.StoreError:
        raise  # the leaf itself may be intact
    except (ValueError, OSError) as error:
        faults = read_faults.Faults()
        faults.add(stored.info.path, error)
        raise faults.error(stored.root) from None
    return store


def bytes_here(job: ReadJob) -> int:
    """Returns the uncompressed bytes that this process reads for a leaf."""
    if job.found.dtype is None or job.wanted.sharding is None:
        return layout.stored_bytes(job.found)
    return shards.nbytes(
        shards.to_read(job.found, job.wanted), layout.stored_form(job.found)[1]
    )


def read(jobs: Sequence[ReadJob], options: ReadOptions) -> dict[LeafPath, Any]:
    """Reads leaves, each part that a local device needs exactly once.

    Returns:
        Wanted leaf path -> `jax.Array`, `numpy.ndarray` or Python number.

    Raises:
        DamagedCheckpointError: Values are missing or fail their checksum. All
            leaves at fault are named.
        RestoreMismatchError: Numbers are too large for the wanted types.
    """
    values: dict[LeafPath, Any] = {}
    faults = read_faults.Faults()
    too_large: list[errors.Mismatch] = []
    context = _storage.client.context({"file_io_concurrency": {"limit": 32}})
    databases = read_raw.Databases(context)
    for batch in _batches(jobs, options.max_concurrent_bytes):
        blocks = _read_batch(batch, options, databases, faults)
        while blocks:  # release the blocks of finished arrays
            job, parts = blocks.pop()
            try:
                values[job.wanted.path] = to_device.assemble(
                    parts, job.found, job.wanted
                )
            except (ValueError, MemoryError) as error:
                faults.add(job.wanted.path, error)
            except OverflowError as error:
                found = f"the number {error}"
                wanted = job.wanted
                too_large.append(errors.Mismatch(wanted.path, str(wanted), found))
    if too_large:
        raise errors.RestoreMismatchError(str(jobs[0].stored.root), too_large)
    if faults:
        first = next(job for job in jobs if job.wanted.path in faults)
        raise faults.error(first.stored.root)
    return values


def _read_batch(
    batch: Sequence[_Work],
    options: ReadOptions,
    databases: read_raw.Databases,
    faults: read_faults.Faults,
) -> list[tuple[ReadJob, dict[Region, Array]]]:
    """Reads the parts of each leaf that local devices need.

    Arrays are made only afterwards: threads that read, and threads of jax that make
    arrays, slow each other down.
    """
    reading = [_begin(work, options, databases) for work in batch]
    rest = [
        _reporting(work, begun, options.report)
        for work, begun in zip(batch, reading, strict=True)
    ]
    read_raw.run(reading)
    blocks = []
    for work, begun, unreported in zip(batch, reading, rest, strict=True):
        try:
            arrays = begun.result()
            options.report(unreported)
            for array in arrays.values():
                _state.dtypes.check_bools(array)
            blocks.append((work.job, shards.cut(work.reads, arrays)))
        except errors.StoreError:
            raise  # the leaf itself may be intact
        except (ValueError, OSError, MemoryError) as error:
            faults.add(work.job.wanted.path, error)
    return blocks


def _reporting(work: _Work, begun: Reading, report: Callable[[int], object]) -> int:
    """Makes tasks report their bytes; returns the bytes left to report."""
    size = shards.nbytes(work.reads, layout.stored_form(work.job.found)[1])
    raw = work.job.stored.raw
    if raw is None or raw.ocdbt or not begun.tasks:
        return size  # TensorStore reads behind its tasks
    share = size // len(begun.tasks)
    begun.tasks = tuple(
        [functools.partial(_reported, task, share, report) for task in begun.tasks]
    )
    return size - share * len(begun.tasks)


def _reported(
    task: Callable[[], None], size: int, report: Callable[[int], object]
) -> None:
    task()
    report(size)


# ---- batches ---------------------------------------------------------------


class _Work(NamedTuple):
    """A leaf to read.

    Attributes:
        job: The leaf.
        reads: Region to read -> regions in it that devices need.
    """

    job: ReadJob
    reads: Mapping[Region, list[Region]]


def _batches(jobs: Sequence[ReadJob], max_bytes: int) -> Iterator[list[_Work]]:
    """Yields batches of raw arrays, and then of arrays to decode."""
    for is_raw in (True, False):
        at_once = max_bytes if is_raw else min(max_bytes, _DECODED_AT_ONCE)
        sized = (
            (work, shards.nbytes(work.reads, layout.stored_form(job.found)[1]))
            for job in jobs
            if (job.stored.raw is not None) == is_raw
            for work in [_Work(job, shards.to_read(job.found, job.wanted))]
        )
        yield from _util.memory.batches(sized, at_once)


# ---- reading --------------------------------------------------------------------


def _begin(work: _Work, options: ReadOptions, databases: read_raw.Databases) -> Reading:
    stored, regions = work.job.stored, tuple(work.reads)
    try:
        if stored.raw is None:
            check = stored.check if options.verify else None
            return _from_store(work.job, regions, databases.context, check)
        if not stored.raw.ocdbt:
            _storage.of(stored.raw.root).check_root(stored.raw.root, stored.root)
            return read_raw.from_files(
                stored.raw,
                stored.info,
                regions,
                memory_map=options.memory_map,
                verify=options.verify,
            )
        databases.begin(stored.raw, stored.root, verify=options.verify)
        if layout.stored_bytes(stored.info) > _DATABASE_VALUE_BYTES:
            return _from_store(work.job, regions, databases.context)
        return read_raw.from_database(
            stored.raw, stored.info, regions, databases, verify=options.verify
        )
    except errors.StoreError:
        raise  # the leaf itself may be intact
    except (ValueError, OSError) as error:
        return read_raw.failed(error)
    except MemoryError:
        return read_raw.failed(_util.memory.TooLargeError())


def _from_store(
    job: ReadJob,
    regions: Sequence[Region],
    context: ts.Context,
    check: Callable[[], None] | None = None,
) -> Reading:
    opened = _open(job.stored, context)
    started: dict[Region, tuple[ts.Future[Any], Array]] = {}

    def start() -> None:
        store = _storage.paths.result(opened, job.stored.root)
        _check_form(job.found, store)
        if _is_cast_by_tensorstore(job):
            store = ts.cast(store, job.wanted.dtype or "")
        dtype = store.dtype.numpy_dtype
        _util.memory.check(shards.nbytes(regions, layout.stored_form(job.found)[1]))
        for region in regions:
            # Into memory that jax uses without a copy, unlike TensorStore's own.
            target = read_raw.empty(metadata.extent(region), dtype)
            source = store[tuple(slice(*b) for b in region)]
            moved = ts.array(target).write(source[ts.d[:].translate_to[0]])
            started[region] = moved.commit, target

    def arrays() -> Mapping[Region, Array]:
        for moved, target in started.values():
            _storage.paths.result(moved, job.stored.root, target.nbytes)
        return {region: target for region, (_, target) in started.items()}

    return Reading([start] if check is None else [check, start], arrays)


def _is_cast_by_tensorstore(job: ReadJob) -> bool:
    """Returns True for floats but not numbers: casts in memory detect overflow."""
    if job.wanted.is_python_number or job.found.is_python_number:
        return False
    wanted, found = job.wanted.dtype or "", job.found.dtype or ""
    return (
        wanted != found
        and _state.dtypes.kind(wanted) == _state.dtypes.kind(found) == "float"
        and _state.dtypes.stored_name(wanted) == wanted
        and _state.dtypes.stored_name(found) == found
    )


def _open(stored: StoredLeaf, context: ts.Context) -> ts.Future[ts.TensorStore]:
    assert stored.open is not None, stored
    _storage.client.use_threads()
    return stored.open(context)


def _check_form(found: LeafInfo, store: ts.TensorStore) -> None:
    shape, dtype = layout.stored_form(found)
    if store.shape != shape or store.dtype.name != dtype:
        raise ValueError(
            f"recorded as {dtype}{list(shape)},"
            f" stored as {store.dtype.name}{list(store.shape)}"
        )


def open_zarr(
    context: ts.Context,
    *,
    root: Path,
    name: str,
    version: int,
    ocdbt: bool,
    strict: bool,
) -> ts.Future[ts.TensorStore]:
    """Opens the zarr array `name` under `root`, read-only.

    Args:
        context: Shared by all arrays of a read.
        root: The directory or the database with the arrays.
        name: Name of the array.
        version: Version of the zarr format, 2 or 3.
        ocdbt: True if `root` is a database.
        strict: True if a missing chunk is an error instead of zeros.
    """
    spec: dict[str, JSON] = {
        "driver": "zarr3" if version == 3 else "zarr",
        "kvstore": metadata.kvstore(root, name, ocdbt=ocdbt),
        "fill_missing_data_reads": not strict,
    }
    return ts.open(spec, read=True, open=True, context=context)
