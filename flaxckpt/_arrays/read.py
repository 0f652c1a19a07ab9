"""Reads arrays from storage into memory, within a byte budget.

`_arrays.read_files` maps uncompressed chunks, or reads them into place; others come
through TensorStore.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from flaxckpt import _state, _storage, _util, errors
from flaxckpt._arrays import read_files, read_plan, typed_values
from flaxckpt._arrays.read_files import Databases, Reading
from flaxckpt._arrays.read_plan import ReadJob, Span
from flaxckpt._state.leaf import Leaf, StoredLeaf
from flaxckpt._types import JSON, LeafPath
from flaxckpt._zarr import metadata
from flaxckpt._zarr.metadata import Array, Region

_CACHED_BYTES = 32 * 2**20
"""Bytes of indexes of databases that TensorStore keeps."""


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
    def __init__(self) -> None:
        self._reasons: dict[LeafPath, str] = {}
        self._too_large: _util.memory.TooLargeError | None = None

    def __len__(self) -> int:
        return len(self._reasons)

    def __contains__(self, path: LeafPath) -> bool:
        return path in self._reasons

    def add(self, path: LeafPath, error: Exception) -> None:
        """Records `error` as the reason of the leaf `path`; raises that of a store."""
        if isinstance(error, errors.StoreError):
            raise error  # the leaf itself may be intact
        if isinstance(error, MemoryError):
            error = _util.memory.TooLargeError()
        if isinstance(error, _util.memory.TooLargeError):
            self._too_large = _util.memory.TooLargeError(*error.args)  # no traceback
        self._reasons[path] = short_message(error)

    def error(
        self, root: Path | str, advice: str = "Restore another step"
    ) -> errors.DamagedCheckpointError:
        """Returns one error; its cause is a TooLargeError if memory was short."""
        count = _util.humanize.count(len(self), "leaf", "leaves")
        error = errors.DamagedCheckpointError(
            f"{count} of {root} cannot be read:\n"
            + errors.rows(f"{path}: {why}" for path, why in self._reasons.items())
            + f"\n{advice}, or save the checkpoint again.",
            leaves=self._reasons,
        )
        error.__cause__ = self._too_large
        return error


def short_message(error: Exception) -> str:
    """Returns the message of an error, without TensorStore's spec."""
    text = str(error).split(" [tensorstore_spec", maxsplit=1)[0].split(" [source")[0]
    return " ".join(text.split())[:200]


# ---- reading --------------------------------------------------------------------


def check_supported(leaves: Iterable[Leaf], root: Path | str) -> None:
    """Raises CheckpointFormatError with all leaves whose values are not read."""
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
    """Opens a stored array, read-only, after the checks that TensorStore lacks."""
    try:
        return open_checked(stored, _storage.store_requests.context())
    except (ValueError, OSError) as error:
        faults = Faults()
        faults.add(stored.info.path, error)
        raise faults.error(stored.root) from None


def open_checked(
    stored: StoredLeaf, context: ts.Context, *, verify: bool = True
) -> ts.TensorStore:
    """Opens an array that must be as recorded; raises ValueError or OSError if not."""
    assert stored.open is not None, stored
    _storage.store_requests.use_threads()
    store = _storage.paths.result(stored.open(context), stored.root)
    shape, dtype = stored.info.stored_shape, stored.info.stored_dtype
    if store.shape != shape or store.dtype.name != dtype:
        raise ValueError(
            f"recorded as {dtype}{list(shape)},"
            f" stored as {store.dtype.name}{list(store.shape)}"
        )
    if verify and stored.check is not None:
        stored.check()
    return store


def read(jobs: Sequence[ReadJob], options: ReadOptions) -> dict[LeafPath, Any]:
    """Reads leaves, each part that a local device needs exactly once.

    Raises DamagedCheckpointError with all leaves that are missing or fail checksums,
    and RestoreMismatchError for numbers that are too large for the wanted types.
    """
    values: dict[LeafPath, Any] = {}
    faults = Faults()
    too_large: list[errors.Mismatch] = []
    databases = Databases()
    context = functools.cache(new_context)  # few reads need one
    for batch in read_plan.batches(jobs, options.max_concurrent_bytes):
        blocks = _read_batch(batch, options, databases, context, faults)
        while blocks:  # release the blocks of finished arrays
            job, parts = blocks.pop()
            try:
                values[job.wanted.path] = typed_values.assemble(
                    parts, job.stored.info, job.wanted
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
    return _storage.store_requests.context(
        {
            "file_io_concurrency": {"limit": 32},
            # Or TensorStore unpacks the index of a database again for each array.
            "cache_pool": {"total_bytes_limit": _CACHED_BYTES},
        }
    )


def _read_batch(
    batch: Sequence[ReadJob],
    options: ReadOptions,
    databases: Databases,
    context: Callable[[], ts.Context],
    faults: Faults,
) -> list[tuple[ReadJob, dict[Region, Array]]]:
    """Reads the parts of each leaf that local devices need.

    Arrays are made only afterwards: threads of jax would slow down those that read.
    """
    # Large leaves first, so that the last requests are short.
    batch = sorted(batch, key=operator.attrgetter("nbytes"), reverse=True)
    readings = [_begin(job, options, databases, context) for job in batch]
    unreported = [
        _report_tasks(job, reading, options.report)
        for job, reading in zip(batch, readings, strict=True)
    ]
    roots = {job.stored.root for job in batch}
    in_store = any(_storage.of(root).costs_requests for root in roots)
    read_files.run([*databases.readings(), *readings], in_store=in_store)
    blocks = []
    for job, reading, size in zip(batch, readings, unreported, strict=True):
        try:
            arrays = reading.result()
            options.report(size)
            for array in arrays.values():
                _state.numpy_dtypes.check_bools(array)
            parts = {
                region: arrays[read]
                if region == read
                else arrays[read][metadata.within(region, read)]
                for read, regions in job.reads.items()
                for region in regions
            }
            blocks.append((job, parts))
        except (ValueError, OSError, MemoryError) as error:
            faults.add(job.wanted.path, error)
    return blocks


def _report_tasks(
    job: ReadJob, reading: Reading, report: Callable[[int], object]
) -> int:
    """Makes tasks report their bytes; returns the bytes left to report."""
    if job.stored.raw is None or not reading.tasks:
        return job.nbytes  # TensorStore reads behind its tasks
    share = job.nbytes // len(reading.tasks)

    def run(task: Callable[[], None]) -> None:
        task()
        report(share)

    reading.tasks = tuple([functools.partial(run, task) for task in reading.tasks])
    return job.nbytes - share * len(reading.tasks)


def _begin(
    job: ReadJob,
    options: ReadOptions,
    databases: Databases,
    context: Callable[[], ts.Context],
) -> Reading:
    stored, regions = job.stored, tuple(job.reads)
    try:
        if stored.span is not None:
            return read_files.from_span(
                stored.span,
                regions,
                dtype=job.dtype_to_read(),
                memory_map=options.memory_map,
            )
        if stored.raw is None:
            return _from_store(job, context(), verify=options.verify)
        raw, database = stored.raw, None
        form = read_plan.form_of(raw)
        if raw.ocdbt:
            check = raw.check_database if options.verify else None
            database = databases.open(
                raw.root, stored.root, check=check, sizes=raw.sizes
            )
            if read_files.is_small(raw, form, database):
                return read_files.from_database(
                    raw, form, regions, database, verify=options.verify
                )
        else:
            _storage.of(raw.root).check_root(raw.root, stored.root)
        return read_files.from_files(
            raw,
            form,
            regions,
            database,
            dtype=job.dtype_to_read(),
            memory_map=options.memory_map,
            verify=options.verify,
        )
    except errors.StoreError:
        raise  # the leaf itself may be intact
    except (ValueError, OSError) as error:
        return Reading([], dict, [error])
    except MemoryError:
        return Reading([], dict, [_util.memory.TooLargeError()])


def _from_store(job: ReadJob, context: ts.Context, *, verify: bool) -> Reading:
    """Reads a leaf through TensorStore; if `verify`, makes its checks."""
    started: dict[Region, tuple[ts.Future[Any], Array]] = {}
    opened: list[ts.TensorStore] = []  # alive while it is read

    def start() -> None:
        store = open_checked(job.needed, context, verify=verify)
        if store.dtype.name != job.dtype_to_read():
            store = ts.cast(store, job.dtype_to_read())
        opened.append(store)
        dtype = store.dtype.numpy_dtype
        _util.memory.check(job.nbytes)
        for region in job.reads:
            # Into memory that jax uses without a copy, unlike TensorStore's own.
            target = read_files.empty(metadata.extent(region), dtype)
            source = store[tuple(slice(*b) for b in region)]
            moved = ts.array(target).write(source[ts.d[:].translate_to[0]])
            started[region] = moved.commit, target

    def arrays() -> Mapping[Region, Array]:
        for moved, target in started.values():
            _storage.paths.result(moved, job.stored.root, target.nbytes)
        opened.clear()
        return {region: target for region, (_, target) in started.items()}

    return Reading([start], arrays)


def open_zarr(
    context: ts.Context,
    *,
    root: Path,
    name: str,
    version: int,
    ocdbt: bool,
    strict: bool,
) -> ts.Future[ts.TensorStore]:
    """Opens a zarr array to read; missing chunks are errors if `strict`, else zeros."""
    spec: dict[str, JSON] = {
        "driver": "zarr3" if version == 3 else "zarr",
        "kvstore": metadata.kvstore(root, name, ocdbt=ocdbt),
        "fill_missing_data_reads": not strict,
    }
    return ts.open(spec, read=True, open=True, context=context)


# ---- arrays of TensorStore -------------------------------------------------------


def open_span(span: Span, context: ts.Context) -> ts.Future[ts.TensorStore]:
    """Opens an array in a byte range, read-only."""

    def read(domain: ts.IndexDomain, target: Array, _: Any) -> None:
        read_files.read_into(target, span, domain.origin)

    return completed_future(
        ts.virtual_chunked(
            read,
            dtype=ts.dtype(span.dtype),
            shape=span.shape,
            chunk_layout=ts.ChunkLayout(
                read_chunk_shape=read_plan.part_shape(span.shape, span.itemsize)
            ),
            context=context,
        )
    )


def open_number(number: complex, context: ts.Context) -> ts.Future[ts.TensorStore]:
    return completed_future(ts.array(np.asarray(number), context=context))


def completed_future(store: ts.TensorStore) -> ts.Future[ts.TensorStore]:
    promise: ts.Promise[ts.TensorStore]
    future: ts.Future[ts.TensorStore]
    promise, future = ts.Promise.new()
    promise.set_result(store)
    return future
