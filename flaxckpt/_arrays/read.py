"""Reads arrays from storage into memory, within a byte budget.

Each part that a local device needs is read exactly once. `_arrays.read_raw` maps
uncompressed chunks, or reads them directly into place; other chunks come through
TensorStore.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorstore as ts

from flaxckpt import _state, _storage, _util, errors
from flaxckpt._arrays import forms, read_raw, read_tasks, to_device
from flaxckpt._arrays.databases import Databases
from flaxckpt._arrays.read_tasks import Reading
from flaxckpt._state.leaf import Leaf, LeafInfo, StoredLeaf
from flaxckpt._types import JSON, LeafPath, Shape
from flaxckpt._zarr import metadata
from flaxckpt._zarr.metadata import Array, Region

_DECODED_AT_ONCE = 128 * 2**20
_CACHED_BYTES = 32 * 2**20
"""Bytes that TensorStore decodes at a time, beside the encoded bytes."""


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


# ---- unreadable leaves ----------------------------------------------------------


class Faults:
    """Unreadable leaves with reasons."""

    def __init__(self) -> None:
        self._reasons: dict[LeafPath, str] = {}
        self._too_large: _util.memory.TooLargeError | None = None

    def __len__(self) -> int:
        return len(self._reasons)

    def __contains__(self, path: LeafPath) -> bool:
        return path in self._reasons

    def add(self, path: LeafPath, error: Exception) -> None:
        """Records `error` as the reason of the leaf `path`."""
        if isinstance(error, MemoryError):
            error = _util.memory.TooLargeError()
        if isinstance(error, _util.memory.TooLargeError):
            self._too_large = _util.memory.TooLargeError(*error.args)  # no traceback
        self._reasons[path] = _short_message(error)

    def error(
        self, root: Path | str, advice: str = "Restore another step"
    ) -> errors.DamagedCheckpointError:
        """Returns an error with all faults of the checkpoint at `root`.

        Its cause is a `TooLargeError` if memory was short.
        """
        count = _util.humanize.count(len(self), "leaf", "leaves")
        error = errors.DamagedCheckpointError(
            f"{count} of {root} cannot be read:\n"
            + errors.rows(f"{path}: {why}" for path, why in self._reasons.items())
            + f"\n{advice}, or save the checkpoint again.",
            leaves=self._reasons,
        )
        error.__cause__ = self._too_large
        return error


def _short_message(error: Exception) -> str:
    """Returns the message of an error, without TensorStore's spec."""
    text = str(error).split(" [tensorstore_spec", maxsplit=1)[0].split(" [source")[0]
    return " ".join(text.split())[:200]


# ---- reading --------------------------------------------------------------------


def check_supported(leaves: Iterable[Leaf], root: Path | str) -> None:
    """Raises an error that names all leaves with values that are not read.

    Raises:
        CheckpointFormatError: There are such leaves.
    """
    faults = [(leaf.info, why) for leaf in leaves if (why := leaf.unsupported)]
    if not faults:
        return
    rows = [f"{i.path}: {i} {why.form}, which is not read" for i, why in faults]
    count = _util.humanize.count(len(rows), "leaf", "leaves")
    advice = " ".join(dict.fromkeys(why.advice for _, why in faults))
    raise errors.CheckpointFormatError(
        f"{count} of {root} cannot be read:\n{errors.rows(rows)}\n{advice}"
    )


def open_one(stored: StoredLeaf) -> ts.TensorStore:
    """Opens a stored array, read-only, after the checks that TensorStore lacks.

    Raises:
        DamagedCheckpointError: The array is missing, or differs from its record.
    """
    try:
        store = _storage.paths.result(
            _open(stored, _storage.store_requests.context()), stored.root
        )
        check_form(stored.info, store)
        if stored.check is not None:
            stored.check()
    except errors.StoreError:
        raise  # the leaf itself may be intact
    except (ValueError, OSError) as error:
        faults = Faults()
        faults.add(stored.info.path, error)
        raise faults.error(stored.root) from None
    return store


def bytes_here(job: ReadJob) -> int:
    """Returns the uncompressed bytes that this process reads for a leaf."""
    if job.found.dtype is None or _is_whole(job.wanted):
        return forms.stored_bytes(job.found)
    return _Work.of(job).nbytes


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
    faults = Faults()
    too_large: list[errors.Mismatch] = []
    databases = Databases()
    context = new_context()
    for batch in _batches(jobs, options.max_concurrent_bytes):
        blocks = _read_batch(batch, options, databases, context, faults)
        while blocks:  # release the blocks of finished arrays
            job, parts = blocks.pop()
            try:
                values[job.wanted.path] = to_device.assemble(
                    parts, job.found, job.wanted
                )
            except (ValueError, MemoryError) as error:
                faults.add(job.wanted.path, error)
            except OverflowError as error:
                too_large.append(
                    errors.Mismatch(
                        job.wanted.path, str(job.wanted), f"the number {error}"
                    )
                )
    if too_large:
        raise errors.RestoreMismatchError(str(jobs[0].stored.root), too_large)
    if faults:
        first = next(job for job in jobs if job.wanted.path in faults)
        raise faults.error(first.stored.root)
    return values


def new_context() -> ts.Context:
    """Returns a context for arrays that are read together."""
    return _storage.store_requests.context(
        {
            "file_io_concurrency": {"limit": 32},
            # Or TensorStore unpacks the index of a database again for each array.
            "cache_pool": {"total_bytes_limit": _CACHED_BYTES},
        }
    )


def _read_batch(
    batch: Sequence[_Work],
    options: ReadOptions,
    databases: Databases,
    context: ts.Context,
    faults: Faults,
) -> list[tuple[ReadJob, dict[Region, Array]]]:
    """Reads the parts of each leaf that local devices need.

    Arrays are made only afterwards: threads that read, and threads of jax that make
    arrays, slow each other down.
    """
    # Large leaves first, so that the last requests are short.
    batch = sorted(batch, key=lambda work: -work.nbytes)
    readings = [_begin(work, options, databases, context) for work in batch]
    unreported = [
        _report_tasks(work, reading, options.report)
        for work, reading in zip(batch, readings, strict=True)
    ]
    in_store = any(_storage.of(w.job.stored.root).costs_requests for w in batch)
    read_tasks.run([*databases.readings(), *readings], in_store=in_store)
    blocks = []
    for work, reading, size in zip(batch, readings, unreported, strict=True):
        try:
            arrays = reading.result()
            options.report(size)
            for array in arrays.values():
                _state.numpy_dtypes.check_bools(array)
            parts = {
                region: arrays[read]
                if region == read
                else arrays[read][metadata.within(region, read)]
                for read, regions in work.reads.items()
                for region in regions
            }
            blocks.append((work.job, parts))
        except errors.StoreError:
            raise  # the leaf itself may be intact
        except (ValueError, OSError, MemoryError) as error:
            faults.add(work.job.wanted.path, error)
    return blocks


def _report_tasks(
    work: _Work, reading: Reading, report: Callable[[int], object]
) -> int:
    """Makes tasks report their bytes; returns the bytes left to report."""
    if work.job.stored.raw is None or not reading.tasks:
        return work.nbytes  # TensorStore reads behind its tasks
    share = work.nbytes // len(reading.tasks)

    def run(task: Callable[[], None]) -> None:
        task()
        report(share)

    reading.tasks = tuple([functools.partial(run, task) for task in reading.tasks])
    return work.nbytes - share * len(reading.tasks)


# ---- batches ---------------------------------------------------------------


class _Work(NamedTuple):
    """A leaf to read.

    Attributes:
        job: The leaf.
        reads: Region to read -> regions in it that devices need.
        nbytes: Uncompressed size of the regions to read, in bytes.
    """

    job: ReadJob
    reads: Mapping[Region, list[Region]]
    nbytes: int

    @classmethod
    def of(cls, job: ReadJob) -> _Work:
        """Returns the work of this process for a leaf."""
        # `read_raw` shares the chunks.
        once = job.stored.raw is None
        reads = _regions_to_read(job.found, job.wanted, once=once)
        elements = sum(math.prod(metadata.extent(region)) for region in reads)
        bits = _state.dtypes.item_bits(forms.stored_form(job.found)[1])
        return cls(job, reads, elements * bits // 8)


def _batches(jobs: Sequence[ReadJob], max_bytes: int) -> Iterator[list[_Work]]:
    """Yields batches of raw arrays, and then of arrays to decode."""
    for is_raw in (True, False):
        at_once = max_bytes if is_raw else min(max_bytes, _DECODED_AT_ONCE)
        works = (_Work.of(job) for job in jobs if _is_raw(job.stored) == is_raw)
        sized = ((work, work.nbytes) for work in works)
        yield from _util.memory.batches(sized, at_once)


def _is_raw(stored: StoredLeaf) -> bool:
    """Returns True for values that need no decoding."""
    return stored.raw is not None or stored.span is not None


def _regions_to_read(
    found: LeafInfo, wanted: LeafInfo, *, once: bool
) -> dict[Region, list[Region]]:
    """Returns the regions to read -> the regions needed by devices.

    Args:
        found: The stored leaf.
        wanted: The leaf with the requested sharding.
        once: True to read the enclosing region if a chunk overlaps two regions, because
            it would be read twice.
    """
    shape, _ = forms.stored_form(found)
    if _is_whole(wanted):
        whole = metadata.whole(shape)
        return {whole: [whole]}
    sharding = wanted.sharding
    assert sharding is not None, wanted
    indices = sharding.addressable_devices_indices_map(shape).values()
    if not indices:
        return {}  # other processes have all parts
    regions = list(
        dict.fromkeys(metadata.region_of(index or (), shape) for index in indices)
    )
    chunk = found.chunk_shape
    if (
        not once
        or len(regions) == 1
        or (chunk and all(_fits_chunks(r, chunk, shape) for r in regions))
    ):
        return {region: [region] for region in regions}
    return {metadata.enclosing(regions): regions}


def _is_whole(wanted: LeafInfo) -> bool:
    """Returns True if this process needs a whole leaf in one piece."""
    sharding = wanted.sharding
    return (
        sharding is None
        or wanted.kind != "array"
        or (len(sharding.device_set) == 1 and sharding.is_fully_addressable)
    )


def _fits_chunks(region: Region, chunk: Shape, shape: Shape) -> bool:
    return all(
        start % part == 0 and (stop % part == 0 or stop == size)
        for (start, stop), part, size in zip(region, chunk, shape, strict=True)
    )


def _begin(
    work: _Work, options: ReadOptions, databases: Databases, context: ts.Context
) -> Reading:
    stored, regions = work.job.stored, tuple(work.reads)
    try:
        if stored.span is not None:
            return read_raw.from_span(
                stored.span,
                regions,
                dtype=_dtype_to_read(work.job),
                memory_map=options.memory_map,
            )
        if stored.raw is None:
            return _from_store(work, context, verify=options.verify)
        database = None
        if stored.raw.ocdbt:
            check = stored.raw.check_database if options.verify else None
            database = databases.open(
                stored.raw.root, stored.root, check=check, sizes=stored.raw.sizes
            )
            if read_raw.is_small(stored.raw, stored.info, database):
                return read_raw.from_database(
                    stored.raw, stored.info, regions, database, verify=options.verify
                )
        else:
            _storage.of(stored.raw.root).check_root(stored.raw.root, stored.root)
        return read_raw.from_files(
            stored.raw,
            stored.info,
            regions,
            database,
            dtype=_dtype_to_read(work.job),
            memory_map=options.memory_map,
            verify=options.verify,
        )
    except errors.StoreError:
        raise  # the leaf itself may be intact
    except (ValueError, OSError) as error:
        return read_tasks.failed_reading(error)
    except MemoryError:
        return read_tasks.failed_reading(_util.memory.TooLargeError())


def _from_store(work: _Work, context: ts.Context, *, verify: bool) -> Reading:
    """Reads a leaf through TensorStore.

    Args:
        work: The leaf.
        context: Of all arrays that are read together.
        verify: Whether to make the checks of the leaf.
    """
    job = work.job
    started: dict[Region, tuple[ts.Future[Any], Array]] = {}
    opened: list[ts.Future[ts.TensorStore]] = []  # alive while it is read

    def start() -> None:
        opened.append(_open(job.stored, context))
        store = _storage.paths.result(opened[0], job.stored.root)
        check_form(job.found, store)
        if verify and job.stored.check is not None:
            job.stored.check()
        if store.dtype.name != _dtype_to_read(job):
            store = ts.cast(store, _dtype_to_read(job))
        dtype = store.dtype.numpy_dtype
        _util.memory.check(work.nbytes)
        for region in work.reads:
            # Into memory that jax uses without a copy, unlike TensorStore's own.
            target = read_raw.empty(metadata.extent(region), dtype)
            source = store[tuple(slice(*b) for b in region)]
            moved = ts.array(target).write(source[ts.d[:].translate_to[0]])
            started[region] = moved.commit, target

    def arrays() -> Mapping[Region, Array]:
        for moved, target in started.values():
            _storage.paths.result(moved, job.stored.root, target.nbytes)
        opened.clear()
        return {region: target for region, (_, target) in started.items()}

    return Reading([start], arrays)


def _dtype_to_read(job: ReadJob) -> str:
    """Returns the type that values are cast to while they are read.

    Floats are cast then, but not numbers: casts in memory detect overflow.
    """
    stored = forms.stored_form(job.found)[1]
    is_number = job.wanted.is_python_number or job.found.is_python_number
    if is_number or job.wanted.kind == "prng_key":
        return stored
    wanted, found = job.wanted.dtype or "", job.found.dtype or ""
    is_cast = (
        _state.dtypes.kind(wanted) == _state.dtypes.kind(found) == "float"
        and _state.dtypes.stored_name(wanted) == wanted
        and stored == found
    )
    return wanted if is_cast else stored


def _open(stored: StoredLeaf, context: ts.Context) -> ts.Future[ts.TensorStore]:
    assert stored.open is not None, stored
    _storage.store_requests.use_threads()
    return stored.open(context)


def check_form(found: LeafInfo, store: ts.TensorStore) -> None:
    """Compares an opened array with the record of its leaf.

    Raises:
        ValueError: The array has another shape or element type.
    """
    shape, dtype = forms.stored_form(found)
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
