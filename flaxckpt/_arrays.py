"""Array values between memory and TensorStore, within a byte budget.

Saving takes host copies or views of this process's shards first (`to_host`, on the
caller's thread) and writes them later. Restoring reads each shard that a local
device needs exactly once.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax.sharding import Sharding, SingleDeviceSharding

from flaxckpt import _chunks, _dtypes, _layout, errors
from flaxckpt._info import ArrayLayout, Leaf, LeafInfo, StoredLeaf
from flaxckpt._types import JSON, LeafPath, Shape

DEFAULT_CONCURRENT_BYTES = 2 * 2**30
"""Bytes that may be between memory and storage at one time."""

_WEAK_LIMIT = 4096
"""Elements up to which a weakly typed array is built anew as one."""

Array: TypeAlias = "np.ndarray[Any, Any]"
Region: TypeAlias = tuple[tuple[int, int], ...]
"""Start and stop along each axis."""


# ---- saving ---------------------------------------------------------------------


class HostShard(NamedTuple):
    """A part of an array that this process writes.

    Attributes:
        region: Where it lies in the whole array.
        data: Its values, in the type that they have in memory. Never written again.
    """

    region: Region
    data: Array


class HostArray(NamedTuple):
    """An array as it was at the call of `save`, safe from whatever happens to it.

    Attributes:
        name: What the checkpoint calls it.
        shape: Of the whole array, as stored.
        dtype: Name of the type to save, which the values get while they are written.
        chunk_shape: Extent of the stored chunks.
        shards: The parts that this process writes; none for an array of size 0.
    """

    name: str
    shape: Shape
    dtype: str
    chunk_shape: Shape
    shards: tuple[HostShard, ...]


def to_host(leaves: Sequence[tuple[str, Shape, Leaf]]) -> list[HostArray]:
    """Takes the values of `leaves` as they are now.

    A jax array on the CPU is viewed, not copied: while the view lives, jax gives a
    donated array new memory instead of overwriting it. From an accelerator the
    values are copied, all transfers being started before the first is waited for.
    A numpy array is copied, because its owner may change it in place.

    Args:
        leaves: For each leaf its name on disk, its chunk shape, and the leaf.

    Raises:
        UnsupportedLeafError: A leaf is abstract, or was donated or deleted already.
    """
    faults = {}
    for _, _, leaf in leaves:
        if isinstance(leaf.source, jax.ShapeDtypeStruct):
            faults[leaf.info.path] = "an abstract leaf, which has no values"
        elif isinstance(leaf.source, jax.Array) and leaf.source.is_deleted():
            faults[leaf.info.path] = "an array that was donated or deleted"
    if faults:
        raise errors.UnsupportedLeafError(faults)
    sources = [_sources(leaf) for _, _, leaf in leaves]
    for parts in sources:
        for part in parts:
            if isinstance(part.data, jax.Array):
                part.data.copy_to_host_async()
    return [
        HostArray(
            name,
            _layout.stored_form(leaf.info)[0],
            leaf.info.dtype or "",
            chunk_shape,
            tuple(part.on_host() for part in parts if part.data.size),
        )
        for (name, chunk_shape, leaf), parts in zip(leaves, sources, strict=True)
    ]


class _Part(NamedTuple):
    """What this process writes of an array, not yet on the host.

    Attributes:
        region: Where it lies in the whole array.
        data: Values on a device or on the host.
        within: The part of `data` that counts, cut on the host; None for all.
    """

    region: Region
    data: jax.Array | Array
    within: tuple[slice, ...] | None = None

    def on_host(self) -> HostShard:
        values = np.asarray(self.data)
        return HostShard(
            self.region, values if self.within is None else values[self.within]
        )


def _sources(leaf: Leaf) -> list[_Part]:
    value = leaf.source
    if not isinstance(value, jax.Array):
        array = np.array(value)
        if leaf.info.kind == "scalar":
            array = array.astype(_dtypes.to_numpy(leaf.info.dtype or ""))
        return [_Part(_whole(array.shape), array)]
    if leaf.info.kind == "prng_key":
        value = jax.random.key_data(value)
    slices = _layout.replica_slices(leaf.info, value.shape)
    return [
        _part(shard, value.shape, slices)
        for shard in value.addressable_shards
        if slices is not None or shard.replica_id == 0
    ]


def _part(
    shard: jax.Shard, shape: Shape, slices: _chunks.ReplicaSlices | None
) -> _Part:
    region = _region(shard.index, shape)
    if slices is None:
        return _Part(region, shard.data)
    start, stop = slices.bounds[shard.replica_id]
    origin = region[slices.axis][0]
    bounds = (origin + start, origin + stop)
    region = (*region[: slices.axis], bounds, *region[slices.axis + 1 :])
    within = (*[slice(None)] * slices.axis, slice(start, stop))
    if shard.device.platform == "cpu":
        return _Part(region, shard.data, within)
    # Cut on the device, so that only this part is copied from it.
    return _Part(region, shard.data[within])


def write(
    root: Path,
    arrays: Iterable[HostArray],
    *,
    layout: ArrayLayout,
    ocdbt: bool,
    max_concurrent_bytes: int = DEFAULT_CONCURRENT_BYTES,
) -> None:
    """Writes `arrays` under `root` as zarr 3, one after another within the budget.

    Args:
        root: A directory without arrays of these names.
        arrays: What to write.
        layout: Codec and checksum.
        ocdbt: Into one database instead of a directory for each array.
        max_concurrent_bytes: Bytes handed to TensorStore and not yet written. An
            array larger than that is written alone.
    """
    context = ts.Context()
    for batch in _batches(arrays, max_concurrent_bytes):
        # One transaction makes one data file of a batch, not one of every array.
        transaction = ts.Transaction(atomic=True) if ocdbt else None
        specs = [_write_spec(root, array, layout, ocdbt) for array in batch]
        opened = [
            ts.open(spec, create=True, context=context, transaction=transaction)
            for spec in specs
        ]
        started: list[ts.Future[Any]] = []
        try:
            for array, future in zip(batch, opened, strict=True):
                started += _start_writes(array, future.result(), transaction)
            for pending in started:
                pending.result()
            if transaction is not None:
                transaction.commit_async().result()
        finally:
            # If one fails, the others must have ended before the caller cleans up.
            for pending in (*opened, *started):
                pending.exception()


def _start_writes(
    array: HostArray, store: ts.TensorStore, transaction: ts.Transaction | None
) -> Iterator[ts.Future[Any]]:
    for shard in array.shards:
        target = store[tuple(slice(*bounds) for bounds in shard.region)]
        data = _dtypes.to_stored(_dtypes.convert(shard.data, array.dtype))
        write = target.write(data, can_reference_source_data_indefinitely=True)
        # In a transaction, nothing is written before the commit.
        yield write.copy if transaction else write.commit


def _batches(arrays: Iterable[HostArray], max_bytes: int) -> Iterator[list[HostArray]]:
    batch: list[HostArray] = []
    total = 0
    for array in arrays:
        size = sum(shard.data.nbytes for shard in array.shards)
        if batch and total + size > max_bytes:
            yield batch
            batch, total = [], 0
        batch.append(array)
        total += size
    if batch:
        yield batch


def _write_spec(
    root: Path, array: HostArray, layout: ArrayLayout, ocdbt: bool
) -> dict[str, JSON]:
    return {
        "driver": "zarr3",
        "kvstore": kvstore(root, array.name, ocdbt=ocdbt),
        # Stock Orbax v1 takes a missing chunk for damage, so zeros are written too.
        "store_data_equal_to_fill_value": True,
        "metadata": {
            "shape": array.shape,
            "data_type": _dtypes.stored_name(array.dtype),
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": array.chunk_shape},
            },
            "chunk_key_encoding": {"name": "default"},
            "codecs": _codecs(array.dtype, layout),
        },
    }


def _codecs(dtype: str, layout: ArrayLayout) -> list[JSON]:
    codecs: list[JSON] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if layout.codec == "compact":
        blosc: JSON = {
            "cname": "lz4",
            "clevel": 1,
            "shuffle": "bitshuffle",
            "typesize": _dtypes.item_bits(dtype) // 8,
            "blocksize": 0,
        }
        codecs.append({"name": "blosc", "configuration": blosc})
    elif layout.codec == "zstd":
        codecs.append({"name": "zstd", "configuration": {"level": 1}})
    if layout.checksum:
        codecs.append({"name": "crc32c"})
    return codecs


def kvstore(root: Path, name: str, *, ocdbt: bool) -> dict[str, JSON]:
    """TensorStore's description of where the array `name` under `root` is kept."""
    if ocdbt:
        base: JSON = {"driver": "file", "path": f"{root}/"}
        return {"driver": "ocdbt", "base": base, "path": f"{name}/" if name else ""}
    return {"driver": "file", "path": f"{root}/{name}/" if name else f"{root}/"}


# ---- restoring ------------------------------------------------------------------


class ReadJob(NamedTuple):
    """A leaf to read, and what to make of it.

    Attributes:
        stored: The leaf in the checkpoint.
        wanted: The type, sharding and kind of value that the caller gets.
    """

    stored: StoredLeaf
    wanted: LeafInfo

    @property
    def found(self) -> LeafInfo:
        """How it is stored."""
        return self.stored.info


def open_one(stored: StoredLeaf) -> ts.TensorStore:
    """Opens one stored array, read-only.

    Raises:
        DamagedCheckpointError: It is not there, or is not what was recorded.
    """
    try:
        store = _open(stored, ts.Context()).result()
        _check_form(stored.info, store)
    except (ValueError, OSError) as error:
        raise _damaged(stored.root, {stored.info.path: _first_words(error)}) from None
    return store


def bytes_here(job: ReadJob) -> int:
    """Uncompressed bytes that this process reads for a leaf."""
    if job.found.dtype is None:
        return 0
    _, dtype = _layout.stored_form(job.found)
    elements = sum(math.prod(b - a for a, b in region) for region in _reads(job))
    return elements * _dtypes.item_bits(dtype) // 8


def read(
    jobs: Sequence[ReadJob], *, max_concurrent_bytes: int = DEFAULT_CONCURRENT_BYTES
) -> dict[LeafPath, Any]:
    """Reads leaves, each part that a local device needs exactly once.

    Returns:
        Wanted leaf path -> `jax.Array`, `numpy.ndarray` or Python number.

    Raises:
        DamagedCheckpointError: Values are missing or fail their checksum. All
            leaves at fault are named.
    """
    context = ts.Context({"file_io_concurrency": {"limit": 32}})
    opened = [_open(job.stored, context) for job in jobs]
    values: dict[LeafPath, Any] = {}
    faults: dict[LeafPath, str] = {}
    pending: collections.deque[_Pending] = collections.deque()
    in_flight = 0

    def finish() -> int:
        done = pending.popleft()
        try:
            values[done.job.wanted.path] = _assemble(done.job, done.blocks())
        except (ValueError, OSError) as error:
            faults[done.job.wanted.path] = _first_words(error)
        return done.size

    for job, future in zip(jobs, opened, strict=True):
        try:
            store = future.result()
            _check_form(job.found, store)
        except (ValueError, OSError) as error:
            faults[job.wanted.path] = _first_words(error)
            continue
        size = bytes_here(job)
        while pending and in_flight + size > max_concurrent_bytes:
            in_flight -= finish()
        pending.append(_Pending(job, _start(job, store), size))
        in_flight += size
    while pending:
        finish()
    if faults:
        raise _damaged(jobs[0].stored.root, faults)
    return values


def _damaged(root: Path, faults: dict[LeafPath, str]) -> errors.DamagedCheckpointError:
    return errors.DamagedCheckpointError(
        f"{len(faults)} leaves of {root} cannot be read:\n"
        + errors.rows(f"{path}: {reason}" for path, reason in faults.items())
        + "\nRestore another step, or save the checkpoint again."
    )


def _open(stored: StoredLeaf, context: ts.Context) -> ts.Future[ts.TensorStore]:
    assert stored.open is not None, stored
    return stored.open(context)


class _Pending(NamedTuple):
    """A leaf whose values are on their way.

    Attributes:
        job: The leaf.
        reads: What is read -> its values, to come.
        size: Bytes of all that.
    """

    job: ReadJob
    reads: dict[Region, ts.Future[Array]]
    size: int

    def blocks(self) -> dict[Region, Array]:
        """What each device needs -> its values."""
        blocks = {}
        for read, regions in _reads(self.job).items():
            values = self.reads[read].result()
            for region in regions:
                inner: list[Any] = [
                    slice(start - origin, stop - origin)
                    for (start, stop), (origin, _) in zip(region, read, strict=True)
                ]
                blocks[region] = values[(*inner, ...)]  # an array even if it is 0-d
        return blocks


def _first_words(error: Exception) -> str:
    """What TensorStore says, less the specification that it appends."""
    text = str(error).split(" [tensorstore_spec", maxsplit=1)[0].split(" [source")[0]
    return " ".join(text.split())[:200]


def _check_form(found: LeafInfo, store: ts.TensorStore) -> None:
    shape, dtype = _layout.stored_form(found)
    if store.shape != shape or store.dtype.name != dtype:
        raise ValueError(
            f"recorded as {dtype}{list(shape)},"
            f" stored as {store.dtype.name}{list(store.shape)}"
        )


def _start(job: ReadJob, store: ts.TensorStore) -> dict[Region, ts.Future[Array]]:
    wanted, found = job.wanted.dtype or "", job.found.dtype or ""
    if (
        wanted != found
        and _dtypes.kind(wanted) == _dtypes.kind(found) == "float"
        and _dtypes.stored_name(wanted) == wanted
        and _dtypes.stored_name(found) == found
    ):
        # Integers are cast in memory, where one that does not fit is noticed.
        store = ts.cast(store, wanted)
    return {
        region: store[tuple(slice(*bounds) for bounds in region)].read()
        for region in _reads(job)
    }


def _reads(job: ReadJob) -> dict[Region, list[Region]]:
    """What to read of a leaf -> the regions that devices need of it.

    Each region is read by itself if no chunk reaches into two of them. Otherwise that
    chunk would be read once for each, so what encloses them all is read instead.
    """
    shape, _ = _layout.stored_form(job.found)
    if job.wanted.sharding is None or job.wanted.kind != "array":
        return {_whole(shape): [_whole(shape)]}
    indices = job.wanted.sharding.addressable_devices_indices_map(shape).values()
    regions = list(dict.fromkeys(_region(index or (), shape) for index in indices))
    chunk = job.found.chunk_shape
    if len(regions) == 1 or (
        chunk and all(_fits_chunks(r, chunk, shape) for r in regions)
    ):
        return {region: [region] for region in regions}
    box = tuple(
        (min(start for start, _ in bounds), max(stop for _, stop in bounds))
        for bounds in zip(*regions, strict=True)
    )
    return {box: regions}


def _fits_chunks(region: Region, chunk: Shape, shape: Shape) -> bool:
    return all(
        start % part == 0 and (stop % part == 0 or stop == size)
        for (start, stop), part, size in zip(region, chunk, shape, strict=True)
    )


def _assemble(job: ReadJob, blocks: dict[Region, Array]) -> Any:
    wanted = job.wanted
    if wanted.kind == "prng_key":
        [data] = blocks.values()
        keys = jax.random.wrap_key_data(jnp.asarray(data), impl=wanted.prng_impl)
        return (
            keys if wanted.sharding is None else jax.device_put(keys, wanted.sharding)
        )
    dtype = wanted.dtype or ""
    typed = {
        region: _as_dtype(_dtypes.from_stored(block, job.found.dtype or ""), dtype)
        if block.dtype.name != dtype
        else block
        for region, block in blocks.items()
    }
    if wanted.python_type == "jax.Array":
        return _to_devices(typed, wanted)
    [array] = typed.values()
    if wanted.python_type == "numpy.generic":
        return array[()]
    return array if wanted.python_type == "numpy.ndarray" else array.item()


def _as_dtype(array: Array, dtype_name: str) -> Array:
    if _dtypes.kind(dtype_name) in ("int", "uint") and array.size:
        low, high = _dtypes.bounds(dtype_name)
        if int(array.min()) < low or int(array.max()) > high:
            raise ValueError(f"{array} does not fit {dtype_name}")
    return _dtypes.convert(array, dtype_name)


def _to_devices(blocks: dict[Region, Array], wanted: LeafInfo) -> jax.Array:
    if wanted.sharding is None:
        [array] = blocks.values()
        return _weak(array) if wanted.weak_type else _put(array, None)
    sharding = wanted.sharding
    whole = blocks.get(_whole(wanted.shape))
    if wanted.weak_type and whole is not None:
        return _put(_weak(whole), sharding)
    placed = [
        _put(blocks[_region(index or (), wanted.shape)], _single(device, sharding))
        for device, index in sharding.addressable_devices_indices_map(
            wanted.shape
        ).items()
    ]
    whole_array: jax.Array = jax.make_array_from_single_device_arrays(
        wanted.shape, sharding, placed
    )
    return whole_array


def place(value: Any, wanted: LeafInfo) -> Any:
    """A computed leaf, where and as the caller wants it."""
    if wanted.python_type != "jax.Array":
        array = np.asarray(value)
        return array if wanted.kind == "array" else array.item()
    if wanted.sharding is not None:
        return _put(value, wanted.sharding)
    # Fresh from jit it is tied to a device, unlike what is restored.
    return _put(np.asarray(value), None) if wanted.kind == "array" else value


def _put(array: Array | jax.Array, sharding: Sharding | None) -> jax.Array:
    placed: jax.Array = jax.device_put(array, sharding)
    return placed


def _single(device: jax.Device, sharding: Sharding) -> SingleDeviceSharding:
    return SingleDeviceSharding(device, memory_kind=sharding.memory_kind)


def _weak(array: Array) -> jax.Array:
    """A jax array that promotes like a Python number, as only those can be built."""
    if array.size > _WEAK_LIMIT or array.size == 0:
        return _put(array, None)
    numbers = [jnp.asarray(number) for number in array.ravel().tolist()]
    weak = numbers[0] if array.ndim == 0 else jnp.stack(numbers).reshape(array.shape)
    return weak if weak.dtype == array.dtype else _put(array, None)


def _whole(shape: Shape) -> Region:
    return tuple((0, size) for size in shape)


def _region(index: tuple[slice, ...], shape: Shape) -> Region:
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=False)]
    return (*bounds, *((0, size) for size in shape[len(bounds) :]))


# ---- opening --------------------------------------------------------------------


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
        context: Shared by all arrays that are read together.
        root: The directory that holds the arrays, or the database of them.
        name: Which array.
        version: Of the zarr format, 2 or 3.
        ocdbt: Whether `root` is a database.
        strict: Whether a missing chunk is an error instead of zeros.
    """
    spec: dict[str, JSON] = {
        "driver": "zarr3" if version == 3 else "zarr",
        "kvstore": kvstore(root, name, ocdbt=ocdbt),
        "fill_missing_data_reads": not strict,
    }
    return ts.open(spec, read=True, open=True, context=context)
