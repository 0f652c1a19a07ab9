"""Parts of chunks: read and verified without the rest of the chunk."""

import itertools
import json
import math
import mmap
from typing import NamedTuple

import crc32c
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import _storage, errors
from flaxckpt._arrays import read_files
from flaxckpt._arrays.read_plan import form_of
from flaxckpt._arrays.to_host import HostArray, HostShard
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._zarr import checksums as zarr_checksums
from flaxckpt._zarr import metadata as zarr_metadata
from flaxckpt._zarr.metadata import Encoding, RawArray
from tests.helpers import chunks, old_stores, orbax_readers, seams
from tests.helpers import faulty_store as faulty
from tests.helpers.files import flip_bit
from tests.helpers.strategies import assert_same

MIB = 2**20
SEGMENT = 2**16
ENCODING = Encoding("none", checksum=True)


# ---- running checksums -------------------------------------------------------------


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 50))
def test_running_checksums_match_crc32c_of_prefixes(parts, segment_bytes):
    whole = b"".join(parts)
    ends = range(segment_bytes, len(whole) + segment_bytes, segment_bytes)
    found = zarr_checksums.running_checksums(map(memoryview, parts), segment_bytes)
    assert found == ([crc32c.crc32c(whole[:end]) for end in ends] or [0])


def test_checkpoint_checksums_stay_small():
    chunk = 64 * MIB
    of_100_gb = zarr_checksums.choose_bytes([(1600, chunk)])
    assert of_100_gb == MIB
    assert zarr_checksums.checksums_bytes(1600, chunk, MIB) < 0.5e6
    for count in (16_000, 160_000, 10**7):
        size = zarr_checksums.choose_bytes([(count, chunk)])
        assert zarr_checksums.checksums_bytes(count, chunk, size) <= MIB / 2
        assert zarr_checksums.checksums_bytes(count, chunk, size // 2) > MIB / 2


# ---- regions and damage ------------------------------------------------------------


@st.composite
def cases(draw):
    """A shape, a chunk shape, and regions that do not overlap: cells of a grid."""
    rank = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(rank))
    chunk_shape = tuple(draw(st.integers(1, size)) for size in shape)
    cuts = [
        sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        for size in shape
    ]
    cells = [*itertools.product(*map(itertools.pairwise, cuts))]
    regions = draw(st.lists(st.sampled_from(cells), min_size=1, unique=True))
    return shape, chunk_shape, regions


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    cases(),
    st.sampled_from([1, 3, 8, 1000]),
    st.sampled_from(["map", "read", "cast"]),
    st.data(),
)
def test_detects_damage_only_in_needed_segments(
    tmp_path_factory, case, rows_of_segments, way, data
):
    shape, chunk_shape, regions = case
    root = tmp_path_factory.mktemp("segments")
    # Maps are of whole pages, so their elements are pages.
    page = mmap.PAGESIZE // 4 if way == "map" else 1
    shape, chunk_shape = (*shape, page), (*chunk_shape, page)
    regions = [(*region, (0, page)) for region in regions]
    segment_bytes = 4 * page * rows_of_segments
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    raw, info = written(root, array, chunk_shape, segment_bytes)

    # By brute force: which bytes of which chunk are needed?
    needed = {}
    for region in regions:
        for key, bounds in zarr_metadata.chunks(region, chunk_shape):
            mask = needed.setdefault(key, np.zeros(chunk_shape, bool))
            inner = (
                slice(a % size, a % size + b - a)
                for (a, b), size in zip(bounds, chunk_shape, strict=True)
            )
            mask[tuple(inner)] = True
    segments = {
        key: set((np.flatnonzero(mask) * 4 // segment_bytes).tolist())
        for key, mask in needed.items()
    }
    every = zarr_metadata.chunks(zarr_metadata.whole(shape), chunk_shape)
    damaged = data.draw(st.sampled_from([chunk.key for chunk in every]))
    place = data.draw(st.integers(0, math.prod(chunk_shape) * 4 - 1))
    is_needed = place // segment_bytes in segments.get(damaged, ())

    asked = {}
    dtype = "float64" if way == "cast" else "float32"
    with pytest.MonkeyPatch.context() as patch:
        seams.replace(patch, "chunk_file.mapped_from", 0)
        seams.replace(patch, "read_files.small_gap_bytes", 1)
        real = seams.current("chunk_file.read")

        def read(block, into, *, verify, start=0):
            stop = start + sum(view.nbytes for view in into)
            numbers = range(start // segment_bytes, -(-stop // segment_bytes))
            asked.setdefault(block.path.name, []).extend(numbers)
            real(block, into, verify=verify, start=start)

        seams.replace(patch, "chunk_file.read", read)

        def found():
            reading = read_files.from_files(
                *(raw, form_of(raw, info), regions),
                dtype=dtype,
                memory_map=way == "map",
                verify=True,
            )
            read_files.run([reading])
            return reading.result()

        for region, values in found().items():
            assert values.dtype == dtype
            wanted = array[tuple(slice(*b) for b in region)]
            np.testing.assert_array_equal(values, wanted)
        if way != "map":  # nothing is read that is not needed, and nothing twice
            assert {key: sorted(read) for key, read in asked.items()} == {
                key: sorted(numbers) for key, numbers in segments.items()
            }
        flip_bit(root / "w" / damaged, place, bit=1 << place % 8)
        if is_needed:
            with pytest.raises(ValueError, match="has changed since it was written"):
                found()
        else:
            found()


@pytest.mark.parametrize("checksum", [True, False])
def test_reads_only_needed_bytes_without_verification(tmp_path, checksum):
    array = np.arange(2**21, dtype=np.float32).reshape(64, 2**15)
    encoding = Encoding("none", checksum)
    raw, info = written(tmp_path, array, array.shape, 2**16, encoding)
    for region in (((3, 5), (0, 2**15)), ((3, 5), (100, 200)), ((0, 64), (7, 8))):
        with counting() as count:
            reading = read_files.from_files(
                *(raw, form_of(raw, info), [region]),
                dtype="float32",
                memory_map=False,
                verify=not checksum,  # nothing to verify without checksums
            )
            read_files.run([reading])
        values = reading.result()[region]
        wanted = array[tuple(slice(*b) for b in region)]
        np.testing.assert_array_equal(values, wanted)
        assert count["bytes"] == wanted.nbytes


def written(root, array, chunk_shape, segment_bytes, encoding=ENCODING):
    """Writes `array`; returns it as it is read, with its segments."""
    whole = zarr_metadata.whole(array.shape)
    host = HostArray(
        "w", array.shape, array.dtype.name, chunk_shape, (HostShard(whole, array),)
    )
    checksums = chunks.write(
        root, [host], encoding=encoding, ocdbt=False, segment_bytes=segment_bytes
    ).checksums
    keys = [chunk.key for chunk in zarr_metadata.chunks(whole, chunk_shape)]
    packed = [checksums.get("w", {}).get(key, b"") for key in keys]
    sizes = zip(array.shape, chunk_shape, strict=True)
    grid = tuple(-(-size // chunk) for size, chunk in sizes)
    recorded = zarr_checksums.ChunkChecksums(
        grid,
        b"".join(one[-4:] for one in packed),
        segment_bytes,
        b"".join(one[:-4] for one in packed),
    )
    checksums = recorded if encoding.checksum else None
    raw = RawArray(root, "w", False, encoding, checksums=checksums)
    info = LeafInfo(
        *("w", (), "array", "numpy.ndarray", array.shape, array.dtype.name),
        chunk_shape=chunk_shape,
    )
    return raw, info


class counting:  # noqa: N801
    """Counts the bytes that are read of array files in the block."""

    def __enter__(self):
        self._patch = pytest.MonkeyPatch.context()
        patch = self._patch.__enter__()
        count = {"bytes": 0}
        local = type(_storage.of(flaxckpt.__file__))
        real = local.read_into

        def read_into(self, file, views, /, **options):
            count["bytes"] += sum(view.nbytes for view in views)
            real(self, file, views, **options)

        patch.setattr(local, "read_into", read_into)
        return count

    def __exit__(self, *error):
        self._patch.__exit__(*error)


# ---- what a user sees ---------------------------------------------------------------


class Moments(NamedTuple):
    mu: jax.Array
    nu: jax.Array


class Model(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(ramp(1024, 1024, seed=3))


def ramp(*shape, seed=0, dtype=jnp.float32):
    size = math.prod(shape)
    return (jnp.arange(size, dtype=jnp.float32) + seed).reshape(shape).astype(dtype)


def states():
    return {
        "dict": {"w": ramp(1024, 1024), "b": ramp(7)},
        "named": Moments(ramp(1024, 1024, seed=1), ramp(2048, 1024, dtype="bfloat16")),
        "nnx": nnx.state(Model()),
    }


def mesh(*sizes, names=("x", "y")):
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return Mesh(devices, names[: len(sizes)])


def placed(state, sharding):
    """The abstract state, with the leaves of two axes on `sharding`."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding if x.ndim == 2 else None
        ),
        state,
    )


@pytest.mark.parametrize("kind", ["dict", "named", "nnx"])
@pytest.mark.parametrize("memory_map", [True, False])
def test_restores_on_any_mesh_and_names_damaged_leaf(tmp_path, kind, memory_map):
    state = states()[kind]
    flaxckpt.save(tmp_path / "c", state)
    for spec in (P("x"), P(None, "x"), P("y", "x")):
        wanted = placed(state, NamedSharding(mesh(2, 4), spec))
        found = flaxckpt.load(tmp_path / "c", wanted, memory_map=memory_map)
        jax.tree.map(np.testing.assert_array_equal, state, found)
    leaf = {"dict": "w", "named": "mu", "nnx": "kernel"}[kind]
    [file] = (tmp_path / "c/state/d/0.0").glob(f"{leaf}*")
    flip_bit(file, 3 * MIB + 17)
    with pytest.raises(errors.DamagedCheckpointError, match="changed since") as caught:
        flaxckpt.load(tmp_path / "c", wanted, memory_map=memory_map)
    assert f"{leaf}: c.0.0 has changed" in str(caught.value)


def manifest(path):
    return json.loads((path / "flaxckpt.json").read_text())


def test_manifest_contains_checksums_of_large_chunks(tmp_path):
    state = {"w": ramp(1024, 1024), "b": ramp(7), "n": 3}
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):  # the second links the first's chunks
            ckpt.save(step, state).wait()
    files = [tmp_path / str(step) / "state/d/0.0/w" for step in (1, 2)]
    assert files[0].samefile(files[1])
    content = np.asarray(state["w"]).tobytes()
    wanted = [crc32c.crc32c(content[: n * SEGMENT]) for n in range(1, 64)]
    for step in (1, 2):
        found = manifest(tmp_path / str(step))["segments"]
        assert found["bytes"] == SEGMENT
        assert list(found["crc32c"]) == ["w"]
        stored = flaxckpt._formats.locate.read_stored(tmp_path / str(step), None)
        recorded = stored.table["w"].sources[0].raw.checksums
        assert recorded.of_segments(0, 4 * MIB) == tuple(wanted)
    assert "segments" not in manifest(saved(tmp_path / "small", {"b": ramp(7)}))
    for name, layout in (
        ("zstd", flaxckpt.ArrayLayout(codec="zstd")),
        ("plain", flaxckpt.ArrayLayout(checksum=False)),
        ("zarr2", flaxckpt.ArrayLayout(zarr_version=2)),
    ):
        path = tmp_path / name
        flaxckpt.save(path, state, layout=layout)
        assert "segments" not in manifest(path)
        assert_same(state, flaxckpt.load(path))


def saved(path, state):
    flaxckpt.save(path, state)
    return path


@pytest.mark.parametrize("items", [{}, {"items": ("a", "b")}])
def test_reads_only_needed_part_of_chunk(tmp_path, items):
    """A process that has an eighth reads an eighth, and the ends of two segments."""
    state = {"a": {"w": ramp(4096, 1024)}, "b": {"n": 1}}  # 16 MiB, a chunk
    flaxckpt.save(tmp_path / "c", state, **items)
    old_stores.make_directories(tmp_path / "c", items.get("items", ("state",)))
    table = flaxckpt._formats.locate.read_stored(tmp_path / "c", None).table
    raw = table["a/w"].sources[0].raw
    for start in (0, 512, 500, 4096 - 512):
        region = (start, start + 512), (0, 1024)
        with counting() as count:
            reading = read_files.from_files(
                *(raw, form_of(raw, table["a/w"].info), [region]),
                dtype="float32",
                memory_map=False,
                verify=True,
            )
            read_files.run([reading])
        values = reading.result()[region]
        np.testing.assert_array_equal(values, state["a"]["w"][start : start + 512])
        tail = 4 * (start + 512 == 4096)
        assert count["bytes"] == 2 * MIB + SEGMENT * (start == 500) + tail


def test_reads_whole_chunks_without_segment_checksums(tmp_path):
    path = saved(tmp_path / "c", {"w": ramp(1024, 1024)})
    without = {name: row for name, row in manifest(path).items() if name != "segments"}
    old_stores.rewrite_manifest(path, without)
    wanted = placed({"w": ramp(1024, 1024)}, NamedSharding(mesh(8), P("x")))
    with counting() as count:
        found = flaxckpt.load(path, wanted, memory_map=False)
    assert_same(np.asarray(found["w"]), np.asarray(ramp(1024, 1024)))
    assert count["bytes"] == 4 * MIB + 4  # once, although eight need a part


@pytest.mark.parametrize(
    "segments",
    [
        7,
        {"bytes": 3 * MIB, "crc32c": {}},
        {"bytes": 1, "crc32c": {}},
        {"bytes": True, "crc32c": {}},
        {"bytes": MIB, "crc32c": []},
        {"bytes": MIB, "crc32c": {"w": "AAAA"}},
        {"bytes": MIB, "crc32c": {"w": "*"}},
        {"bytes": MIB, "crc32c": {"w": 7}},
        {"bytes": MIB},
    ],
)
def test_malformed_checksums_count_as_damage(tmp_path, segments):
    path = saved(tmp_path / "c", {"w": ramp(1024, 1024)})
    old_stores.rewrite_manifest(path, manifest(path) | {"segments": segments})
    with pytest.raises(errors.DamagedCheckpointError, match="is not a manifest"):
        flaxckpt.load(path)


def test_stock_orbax_reads_chunks_with_segments(tmp_path):
    state = {"w": ramp(1024, 1024), "b": ramp(7)}
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state).wait()
    assert "segments" in manifest(tmp_path / "1")
    found = orbax_readers._v0_standard(tmp_path, 1, None)
    np.testing.assert_array_equal(found["w"], state["w"])
    assert flaxckpt.verify(tmp_path / "1").ok


@pytest.mark.parametrize("rows", [(0, 64), (100, 200), (1000, 3560), (4000, 4096)])
def test_requests_only_needed_bytes_from_stores(tmp_path, rows):
    state = {"w": ramp(4096, 1024)}  # 16 MiB; a request of a store is of 8
    path = faulty.new_path("segments")
    flaxckpt.save(tmp_path, state)
    old_stores.make_directories(tmp_path)
    for file in (file for file in tmp_path.rglob("*") if file.is_file()):
        (path / "c" / file.relative_to(tmp_path)).write_bytes(file.read_bytes())
    leaf = flaxckpt._formats.locate.read_stored(path / "c", None).table["w"]
    region = rows, (0, 1024)
    chunk = path / "c/state/w/c.0.0"
    content = chunk.read_bytes()

    def found():
        reading = read_files.from_files(
            *(leaf.sources[0].raw, form_of(leaf.sources[0].raw, leaf.info), [region]),
            dtype="float32",
            memory_map=True,
            verify=True,
        )
        read_files.run([reading])
        return reading.result()[region]

    sizes = []
    with faulty.faulty(path) as kv:
        real = kv.read

        def read(key, byte_range=None):
            future = real(key, byte_range=byte_range)
            if key.endswith("c.0.0"):
                sizes.append(len(future.result().value))
            return future

        kv.read = read
        values = found()
    np.testing.assert_array_equal(values, state["w"][slice(*rows)])
    assert sum(sizes) <= values.nbytes + 2 * SEGMENT
    place = rows[0] * 4096 + 5
    for damaged, is_found in (
        (content[:place] + b"?" + content[place + 1 :], True),
        (b"?" + content[1:], rows[0] == 0),
        (content[: rows[1] * 4096 - 7], True),
        (content + b"?", rows[1] == 4096),
    ):
        chunk.write_bytes(damaged)
        if is_found:
            with pytest.raises(ValueError, match=r"has changed|bytes instead of"):
                found()
        else:
            np.testing.assert_array_equal(found(), values)
