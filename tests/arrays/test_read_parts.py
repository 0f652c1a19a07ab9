"""Parts of plain arrays: which bytes are read, mapped and compared with checksums."""

import errno
import itertools
import math
import mmap
import random
import sys
import threading
import tracemalloc
from pathlib import Path

import jax
import numpy as np
import pytest

import flaxckpt
from flaxckpt import _util
from flaxckpt._arrays import read_files
from flaxckpt._arrays import write as arrays_write
from flaxckpt._arrays.read_files import Databases, Reading
from flaxckpt._arrays.read_plan import Span, form_of
from flaxckpt._arrays.to_host import HostArray, HostShard
from flaxckpt._formats import locate
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._zarr import checksums as zarr_checksums
from flaxckpt._zarr import chunk_file, metadata
from flaxckpt._zarr.metadata import Encoding, RawArray
from tests.helpers import faulty_store as faulty
from tests.helpers import old_stores, seams
from tests.helpers.files import flip_bit

KIB = 2**10
MIB = 2**20
LAYOUTS = [
    ((), ()),
    ((9,), (4,)),
    ((4, 6), (4, 6)),
    ((7, 6), (3, 6)),
    ((5, 6), (2, 4)),
    ((3, 4, 5), (3, 4, 5)),
    ((4, 5, 6), (2, 3, 6)),
]
"""Shapes of arrays and of their chunks."""


def numbers(shape, dtype="float32"):
    return np.arange(1, math.prod(shape) + 1, dtype=dtype).reshape(shape)


def part_of(array, region):
    return array[tuple(slice(*bounds) for bounds in region)]


def random_regions(draws, shape):
    """Regions that do not overlap: cells of a grid."""
    cuts = [sorted({0, size, *draws.choices(range(size + 1), k=2)}) for size in shape]
    cells = [*itertools.product(*map(itertools.pairwise, cuts))]
    return draws.sample(cells, draws.randint(1, min(len(cells), 5)))


def host(name, array, chunk_shape):
    """An array as a save has it on the host."""
    shards = [HostShard(metadata.whole(array.shape), array)] if array.size else []
    dtype = array.dtype.name
    return HostArray(name, array.shape, dtype, chunk_shape, tuple(shards))


def write(root, arrays, *, ocdbt=True, **options):
    """Writes arrays alone: a whole database, or directories as before version 3."""
    done = arrays_write.write(root, arrays, arrays_write.WriteOptions(**options))
    for name, content in arrays_write.make_index(done.values).files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    if not ocdbt:
        old_stores.make_files(root)
    return done


def info_of(array, chunk_shape):
    form = ("array", "numpy.ndarray", array.shape, array.dtype.name)
    return LeafInfo("w", (), *form, chunk_shape=chunk_shape)


def written(root, array, chunk_shape, segment_bytes):
    """Writes `array` to files; returns it as it is read, with its segments."""
    encoding = Encoding("none", checksum=True)
    checksums = write(
        root,
        [host("w", array, chunk_shape)],
        encoding=encoding,
        ocdbt=False,
        segment_bytes=segment_bytes,
    ).checksums["w"]
    found = metadata.chunks(metadata.whole(array.shape), chunk_shape)
    packed = [checksums[chunk.key] for chunk in found]
    sizes = zip(array.shape, chunk_shape, strict=True)
    recorded = zarr_checksums.ChunkChecksums(
        tuple(-(-size // chunk) for size, chunk in sizes),
        b"".join(one[-4:] for one in packed),
        segment_bytes,
        b"".join(one[:-4] for one in packed),
    )
    info = info_of(array, chunk_shape)
    raw = RawArray(
        root, "w", False, encoding, metadata.form_of(info), checksums=recorded
    )
    return raw, info


def saved(path, name="w"):
    """Returns an array of a checkpoint as it is read."""
    source = locate.read_stored(path, None).table[name].source
    return source.raw, source.info


def read(raw, info, regions, *, dtype=None, together=False, **options):
    """Reads regions, as parts of files or, `together`, as small values."""
    databases = Databases()
    database = databases.open(raw.root, raw.root) if raw.ocdbt else None
    options = {"memory_map": False, "verify": True, **options}
    if together:
        verify = options["verify"]
        found = raw, form_of(raw), regions, database
        reading = read_files.from_database(*found, verify=verify)
    else:
        found = raw, form_of(raw), regions, database
        reading = read_files.from_files(*found, dtype=dtype or info.dtype, **options)
    read_files.run([*databases.readings(), reading])
    return reading.result()


def check_values(found, array, regions, dtype=None):
    assert list(found) == regions
    for region, values in found.items():
        wanted = part_of(array, region).astype(dtype or array.dtype)
        assert values.dtype == wanted.dtype
        np.testing.assert_array_equal(values, wanted)


# ---- files: which bytes are read ---------------------------------------------------


@pytest.fixture
def reads(monkeypatch):
    """The reads of files of chunks: name, first byte, end."""
    found = []
    real = seams.current("disk.read_into")

    def read_into(file, views, /, *, offset, file_size):
        found.append((file.name, offset, offset + sum(v.nbytes for v in views)))
        real(file, views, offset=offset, file_size=file_size)

    seams.replace(monkeypatch, "disk.read_into", read_into)
    return found


def needed_reads(regions, array, chunk_shape, at_once, gap, *, verify):
    """The fewest reads of the bytes of `regions`, found byte by byte.

    Of a region, gaps smaller than `gap` are read, too; the checksum of a chunk follows
    its last byte.
    """
    needed = {}
    for region in regions:
        for key, bounds in metadata.chunks(region, chunk_shape):
            is_in = np.zeros((*chunk_shape, array.itemsize), bool)
            inner = (
                slice(start % size, start % size + stop - start)
                for (start, stop), size in zip(bounds, chunk_shape, strict=True)
            )
            is_in[tuple(inner)] = True
            is_in = is_in.reshape(-1)
            places = np.flatnonzero(is_in)
            for before, after in itertools.pairwise(places):
                if after - before - 1 < max(at_once, gap):
                    is_in[before:after] = True
            for place in places // at_once * at_once:
                is_in[place : place + at_once] = True
            needed[key] = needed.get(key, False) | is_in
    found = []
    for key, is_needed in needed.items():
        edges = np.flatnonzero(np.diff([0, *is_needed, 0]))
        for start, stop in edges.reshape(-1, 2).tolist():
            is_tail_read = stop == is_needed.size and (verify or not start)
            found.append((key, start, stop + 4 * is_tail_read))
    return sorted(found)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("gap", [1, 20, 1000])
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("shape", "chunk_shape"), LAYOUTS)
def test_reads_only_needed_bytes_and_each_once(
    tmp_path, monkeypatch, reads, shape, chunk_shape, verify, gap
):
    seams.replace(monkeypatch, "read_files.small_gap_bytes", gap)
    array = numbers(shape)
    raw, info = written(tmp_path, array, chunk_shape, 8)
    at_once = (
        1
        if not verify
        else 8
        if raw.checksums.segment_bytes
        else 4 * math.prod(chunk_shape)
    )
    draws = random.Random(0)
    for _ in range(10):
        regions = random_regions(draws, shape)
        wanted = needed_reads(regions, array, chunk_shape, at_once, gap, verify=verify)
        for dtype in ("float32", "float64", "int32"):
            reads.clear()
            found = read(raw, info, regions, dtype=dtype, verify=verify)
            check_values(found, array, regions, dtype)
            assert sorted(reads) == wanted


@pytest.mark.parametrize(("width", "reads_of_rows"), [(2**14, 4), (2**14 + 1, 1)])
def test_reads_across_gaps_below_64_kib(tmp_path, reads, width, reads_of_rows):
    array = numbers((4, 2**15))
    raw, info = written(tmp_path, array, array.shape, 2**20)
    regions = [((0, 4), (0, width))]
    check_values(read(raw, info, regions, verify=False), array, regions)
    assert len(reads) == reads_of_rows


def test_distinguishes_gapped_from_contiguous_reads_of_equal_size(tmp_path):
    """Of 4 parts, two with the small gap between them are as long as all of them."""
    array = np.zeros((2, 3, 48 * KIB), np.uint8)
    array[:] = np.arange(6).reshape(2, 3, 1)
    raw, info = written(tmp_path, array, array.shape, 2**20)
    regions = [((0, 2), (0, 2), (0, 16 * KIB))]
    check_values(read(raw, info, regions), array, regions)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "region",
    [
        ((8, 10), (0, 2**16)),
        ((7, 8), (1, 2**16)),
        ((7, 8), (5, 2**16 - 7)),
        ((62, 64), (0, 2**16)),
    ],
)
def test_reads_contiguous_bytes_into_place(tmp_path, reads, region, verify):
    """Without memory for the rest of the chunk."""
    array = np.zeros((64, 2**16), np.uint8)
    array[:] = np.arange(64).reshape(64, 1)
    raw, info = written(tmp_path, array, array.shape, 64 * KIB)
    tracemalloc.start()
    try:
        found = read(raw, info, [region], verify=verify)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    check_values(found, array, [region])
    assert peak < 512 * KIB  # of 4 MiB
    if not verify:
        assert sum(stop - start for _, start, stop in reads) == found[region].nbytes


@pytest.mark.parametrize("items", [{}, {"items": ("a", "b")}])
def test_reads_only_needed_part_of_saved_chunk(tmp_path, reads, items):
    """A process that has an eighth reads an eighth, and the ends of two segments."""
    state = {"a": {"w": numbers((4096, KIB))}, "b": {"n": 1}}  # 16 MiB, a chunk
    flaxckpt.save(tmp_path / "c", state, **items)
    old_stores.make_directories(tmp_path / "c", items.get("items", ("state",)))
    raw, info = saved(tmp_path / "c", "a/w")
    for start in (0, 512, 500, 4096 - 512):
        regions = [((start, start + 512), (0, KIB))]
        reads.clear()
        check_values(read(raw, info, regions), state["a"]["w"], regions)
        tail = 4 * (start + 512 == 4096)
        nbytes = sum(stop - first for _, first, stop in reads)
        assert nbytes == 2 * MIB + 64 * KIB * (start == 500) + tail


@pytest.mark.parametrize("rows", [(0, 64), (100, 200), (1000, 3560), (4000, 4096)])
def test_requests_only_needed_bytes_from_stores(tmp_path, rows):
    state = {"w": numbers((4096, KIB))}  # 16 MiB; a request of a store is of 8
    path = faulty.new_path("segments")
    flaxckpt.save(tmp_path, state)
    old_stores.make_directories(tmp_path)
    for file in (file for file in tmp_path.rglob("*") if file.is_file()):
        (path / "c" / file.relative_to(tmp_path)).write_bytes(file.read_bytes())
    raw, info = saved(path / "c")
    regions = [(rows, (0, KIB))]
    chunk = path / "c/state/w/c.0.0"
    content = chunk.read_bytes()
    sizes = []
    with faulty.faulty(path) as kv:
        real = kv.read

        def read_key(key, byte_range=None):
            future = real(key, byte_range=byte_range)
            if key.endswith("c.0.0"):
                sizes.append(len(future.result().value))
            return future

        kv.read = read_key
        found = read(raw, info, regions, memory_map=True)
    check_values(found, state["w"], regions)
    assert sum(sizes) <= found[regions[0]].nbytes + 2 * 64 * KIB
    place = rows[0] * 4 * KIB + 5
    for damaged, is_found in (
        (content[:place] + b"?" + content[place + 1 :], True),
        (b"?" + content[1:], rows[0] == 0),
        (content[: rows[1] * 4 * KIB - 7], True),
        (content + b"?", rows[1] == 4096),
    ):
        chunk.write_bytes(damaged)
        if is_found:
            with pytest.raises(ValueError, match=r"has changed|bytes instead of"):
                read(raw, info, regions)
        else:
            check_values(read(raw, info, regions), state["w"], regions)


# ---- files: checksums --------------------------------------------------------------


def test_checkpoint_checksums_stay_small():
    chunk = 64 * MIB
    of_100_gb = zarr_checksums.choose_bytes([(1600, chunk)])
    assert of_100_gb == MIB
    assert zarr_checksums.checksums_bytes(1600, chunk, MIB) < 0.5e6
    for count in (16_000, 160_000, 10**7):
        size = zarr_checksums.choose_bytes([(count, chunk)])
        assert zarr_checksums.checksums_bytes(count, chunk, size) <= MIB / 2
        assert zarr_checksums.checksums_bytes(count, chunk, size // 2) > MIB / 2


def test_reports_smallest_verifiable_part():
    cases = ((3, False), (3, True), (0, True))
    blocks = [chunk_file.Block(Path("b"), size, checksum) for size, checksum in cases]
    assert [block.verified_at_once for block in blocks] == [1, 3, 1]


def test_verifies_part_of_leaf_in_database_by_segments(tmp_path):
    array = numbers((2048, KIB))
    flaxckpt.save(tmp_path / "c", {"w": array})
    with (tmp_path / "c/state/d/0.0/w").open("r+b") as file:
        file.seek(6 * MIB)
        file.write(b"damage")
    raw, info = saved(tmp_path / "c")
    regions = [((0, 8), (0, KIB))]
    check_values(read(raw, info, regions), array, regions)
    with pytest.raises(ValueError, match="written: the CRC-32C of bytes"):
        read(raw, info, [((1530, 1540), (0, KIB))])
    assert flaxckpt.verify(tmp_path / "c").places == {"w": "state/d/0.0/w -> w"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", ["map", "read", "cast"])
@pytest.mark.parametrize(("shape", "chunk_shape"), LAYOUTS)
def test_detects_damage_only_in_needed_segments(
    tmp_path, monkeypatch, shape, chunk_shape, way
):
    page = 1024 if way == "map" else 1  # maps are of pages
    array, chunk_shape = numbers((*shape, page)), (*chunk_shape, page)
    raw, info = written(tmp_path, array, chunk_shape, 8 * page)
    seams.replace(monkeypatch, "chunk_file.mapped_from", 0)
    seams.replace(monkeypatch, "read_files.small_gap_bytes", 1)
    options = {
        "dtype": "float64" if way == "cast" else "float32",
        "memory_map": way == "map",
    }
    draws = random.Random(1)
    for _ in range(1 if way == "map" else 3):
        regions = [(*r, (0, page)) for r in random_regions(draws, shape)]
        at_once = (
            8 * page if raw.checksums.segment_bytes else 4 * math.prod(chunk_shape)
        )
        needed = needed_reads(regions, array, chunk_shape, at_once, 1, verify=True)
        check_values(
            read(raw, info, regions, **options), array, regions, options["dtype"]
        )
        for file in (tmp_path / "w").glob("c*"):
            for place in range(0, file.stat().st_size - 4, 8 * page):
                flip_bit(file, place)
                if any(
                    key == file.name and start <= place < stop
                    for key, start, stop in needed
                ):
                    with pytest.raises(ValueError, match="has changed since"):
                        read(raw, info, regions, **options)
                else:
                    read(raw, info, regions, **options)
                flip_bit(file, place)


@pytest.mark.parametrize("memory_map", [True, False])
def test_changed_metadata_raises_error_unless_verify_is_off(tmp_path, memory_map):
    array = numbers((4, 6))
    raw, info = written(tmp_path, array, (2, 6), 8)
    file = tmp_path / "w" / metadata.METADATA
    whole = file.read_text()
    regions = [((1, 3), (0, 6))]
    for old, new, text in (
        ("float32", "int32", r"float32\[4, 6\], but zarr\.json says int32"),
        ("[4,6]", "[4,9]", r"float32\[4, 6\], but zarr\.json says float32\[4, 9\]"),
        ("[2,6]", "[1,6]", r"zarr\.json has changed since .*, in 'chunk_grid'$"),
        ("fill_", "full_", r"in 'fill_value', 'full_value'$"),
        ("{", '{"x":null,', r"in 'x'$"),
        ("{", "[", r"zarr\.json has changed since it was written$"),
    ):
        file.write_text(whole.replace(old, new, 1))
        found = read(raw, info, regions, memory_map=memory_map, verify=False)
        check_values(found, array, regions)
        with pytest.raises(ValueError, match=text):
            read(raw, info, regions, memory_map=memory_map)


# ---- files: what is mapped ---------------------------------------------------------


def is_mapped(array, file):
    """Whether the memory of `array` is that of a file, or of one below a directory."""
    is_on_jax = isinstance(array, jax.Array)
    address = array.unsafe_buffer_pointer() if is_on_jax else array.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, stop = line.split()[0].partition("-")
        if int(start, 16) <= address < int(stop, 16):
            return str(file) in line
    return False


@pytest.mark.parametrize(
    ("shape", "chunk_shape", "region", "wanted"),
    [
        ((8, KIB), (4, KIB), ((0, 8), (0, KIB)), True),
        ((8, KIB), (4, KIB), ((3, 7), (5, 700)), True),
        ((4 * KIB,), (KIB,), ((0, 4 * KIB),), True),
        ((4, 2, KIB), (2, 2, KIB), ((0, 4), (0, 2), (0, KIB)), True),
        ((8, KIB), (4, 512), ((1, 3), (512, KIB)), True),
        ((8, KIB), (4, 512), ((4, 8), (0, KIB)), False),  # side by side
        ((4, 2, KIB), (2, 1, KIB), ((0, 4), (0, 2), (0, KIB)), False),
        ((8, 100), (4, 100), ((4, 8), (0, 100)), True),
        ((8, 100), (4, 100), ((0, 8), (0, 100)), False),  # not of pages
    ],
)
def test_maps_chunks_forming_contiguous_pages(
    tmp_path, monkeypatch, shape, chunk_shape, region, wanted
):
    seams.replace(monkeypatch, "chunk_file.mapped_from", 0)
    array = numbers(shape)
    raw, info = written(tmp_path, array, chunk_shape, 2**20)
    for options in ({}, {"memory_map": True}, {"memory_map": True, "dtype": "int32"}):
        for verify in (True, False):
            found = read(raw, info, [region], verify=verify, **options)
            check_values(found, array, [region], options.get("dtype"))
            is_wanted = wanted and options == {"memory_map": True}
            assert is_mapped(found[region], tmp_path) == is_wanted


@pytest.mark.parametrize(("size", "wanted"), [(2**14, True), (2**14 - 1, False)])
def test_maps_chunks_from_64_kib(tmp_path, size, wanted):
    array = numbers((size,))
    raw, info = written(tmp_path, array, array.shape, 2**20)
    region = ((0, size),)
    found = read(raw, info, [region], memory_map=True)
    check_values(found, array, [region])
    assert is_mapped(found[region], tmp_path) == wanted


def test_maps_regions_without_common_chunk_separately(tmp_path):
    array = numbers((4, 2**14))
    raw, info = written(tmp_path, array, (2, 2**13), 2**20)
    regions = [((0, 2), (0, 2**13)), ((2, 4), (2**13, 2**14)), ((2, 4), (0, 2**13))]
    found = read(raw, info, regions, memory_map=True)
    check_values(found, array, regions)
    assert all(is_mapped(found[region], tmp_path) for region in regions)


@pytest.mark.parametrize("memory_map", [True, False])
def test_empty_region_reads_no_bytes(tmp_path, monkeypatch, reads, memory_map):
    for mapping in ("map_block", "map_blocks"):
        seams.replace(monkeypatch, f"chunk_file.{mapping}", None)
    array = numbers((4, 2**14))
    raw, info = written(tmp_path, array, (2, 2**14), 2**20)
    regions = [((2, 2), (0, 2**14))]
    check_values(read(raw, info, regions, memory_map=memory_map), array, regions)
    assert not reads


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.ENODEV, errno.EIO])
def test_falls_back_to_reading_unmappable_files(tmp_path, monkeypatch, code):
    """But not after an error of the disk."""

    def refuse(*_):
        raise OSError(code, "refused")

    seams.replace(monkeypatch, "chunk_file.map_block", refuse)
    seams.replace(monkeypatch, "chunk_file.map_blocks", refuse)
    array = numbers((4, 2**14))
    raw, info = written(tmp_path, array, array.shape, 2**20)
    regions = [((1, 3), (0, 2**14))]
    if code == errno.EIO:
        with pytest.raises(OSError, match="refused"):
            read(raw, info, regions, memory_map=True)
    else:
        check_values(read(raw, info, regions, memory_map=True), array, regions)


def test_map_range_returns_none_for_unreadable_ranges(tmp_path):
    (tmp_path / "b").write_bytes(b"1" * mmap.PAGESIZE)
    with (tmp_path / "b").open("rb") as file:
        descriptor = file.fileno()
        if sys.platform == "linux":
            assert chunk_file.map_range(descriptor, 8 * mmap.PAGESIZE, 9) is None
            found = chunk_file.map_range(descriptor, 0, 9)
            assert found.tobytes() == b"1" * 9, "the error before is not of this map"
    assert chunk_file.map_range(descriptor, 0, 9) is None, "it is closed"


# ---- byte ranges of a file ---------------------------------------------------------


def span_of(path, array):
    path.write_bytes(bytes(64) + array.tobytes())
    return Span(path, 64, array.shape, array.dtype.name, is_replaced_only=True)


def read_span(span, regions, dtype, *, memory_map):
    reading = read_files.from_span(span, regions, dtype=dtype, memory_map=memory_map)
    read_files.run([reading])
    return reading


@pytest.mark.parametrize("memory_map", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_maps_byte_range_regions_on_request(tmp_path, dtype, memory_map):
    array = numbers((4, 2**13))
    span = span_of(tmp_path / "file", array)
    regions = [((0, 2), (0, 2**13)), ((3, 4), (5, 100))]
    reading = read_span(span, regions, dtype, memory_map=memory_map)
    check_values(reading.result(), array, regions, dtype)
    for values in reading.result().values():
        is_wanted = memory_map and dtype == "float32"
        assert is_mapped(values, span.file) == is_wanted


@pytest.mark.parametrize(("dtype", "parts"), [("float32", 1), ("float16", 4)])
def test_casts_values_one_mib_at_a_time(tmp_path, dtype, parts):
    array = np.ones((2**20,), np.float32)
    span = span_of(tmp_path / "file", array)
    regions = [((0, 2**20),)]
    reading = read_span(span, regions, dtype, memory_map=False)
    check_values(reading.result(), array, regions, dtype)
    assert len(reading.tasks) == parts


def test_rejects_byte_range_larger_than_memory(tmp_path):
    half = _util.memory.free_bytes() // 2  # so many elements fit, but not their bytes
    with pytest.raises(_util.memory.TooLargeError):
        read_files.from_span(
            Span(tmp_path / "file", 0, (half,), "float64"),
            [((0, half),)],
            dtype="float64",
            memory_map=False,
        )


# ---- databases ---------------------------------------------------------------------


def database_of(path, array, chunk_shape, *, checksum=True):
    encoding = Encoding("none", checksum)
    write(path, [host("w", array, chunk_shape)], encoding=encoding, ocdbt=True)
    info = info_of(array, chunk_shape)
    return RawArray(path, "w", True, encoding, metadata.form_of(info)), info


def change(path, key, changed):
    """Changes a value of a database with a good index: `changed(old)` is the new."""
    store = old_stores.open_database(path)
    store[key] = changed(store[key])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", ["together", "memory_map", "read"])
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("shape", "chunk_shape"), LAYOUTS)
def test_reads_regions_from_database_values(
    tmp_path, monkeypatch, shape, chunk_shape, verify, checksum, way
):
    seams.replace(monkeypatch, "chunk_file.mapped_from", 0)
    array = numbers(shape)
    raw, info = database_of(tmp_path, array, chunk_shape, checksum=checksum)
    draws = random.Random(2)
    for _ in range(3):
        regions = random_regions(draws, shape)
        options = {} if way == "read" else {way: True}
        check_values(read(raw, info, regions, verify=verify, **options), array, regions)


FAULTS = {
    "w/c.1": (lambda old: bytes(4) + old[4:], "has changed since it was written"),
    "w/zarr.json": (lambda old: old.replace(b"float32", b"int32"), "zarr.json says"),
}


@pytest.mark.parametrize("key", FAULTS)
def test_verifies_database_values_unless_digests_cover_them(tmp_path, key):
    changed, told = FAULTS[key]
    raw, info = database_of(tmp_path, numbers((4,)), (2,))
    regions = [((0, 4),)]
    change(tmp_path, key, changed)
    with pytest.raises(ValueError, match=told):
        read(raw, info, regions, together=True)
    [values] = read(raw, info, regions, verify=False, together=True).values()
    assert values.tolist() == [1, 2, 0 if key == "w/c.1" else 3, 4]
    digested = raw._replace(has_digests=True)
    [same] = read(digested, info, regions, together=True).values()
    assert same.tolist() == values.tolist()


@pytest.mark.parametrize("verify", [True, False])
def test_rejects_database_values_of_wrong_size(tmp_path, verify):
    raw, info = database_of(tmp_path, numbers((4,)), (2,))
    for size in (11, 13):
        change(tmp_path, "w/c.1", lambda old, size=size: (old + b"12")[:size])
        with pytest.raises(ValueError, match=f"c.1 has {size} bytes instead of 12"):
            read(raw, info, [((0, 4),)], verify=verify, together=True)
        found = read(raw, info, [((0, 2),)], verify=verify, together=True)
        assert found[((0, 2),)].tolist() == [1, 2]


def test_missing_database_metadata_raises_error_unless_verify_is_off(tmp_path):
    raw, info = database_of(tmp_path, numbers((4,)), (2,))
    del old_stores.open_database(tmp_path)["w/zarr.json"]
    with pytest.raises(ValueError, match=r"w/zarr\.json is missing"):
        read(raw, info, [((0, 4),)], together=True)
    [values] = read(raw, info, [((0, 4),)], verify=False, together=True).values()
    assert values.tolist() == [1, 2, 3, 4]


# ---- tasks: on threads; their first error is the reading's -------------------------


def fail(error):
    def task():
        raise error

    return task


def test_returns_values_after_all_tasks_finish():
    done = []
    readings = [
        Reading([lambda n=n: done.append(n)] * 3, lambda n=n: {(): done.count(n)})
        for n in range(4)
    ]
    read_files.run(readings)
    assert [reading.result() for reading in readings] == [{(): 3}] * 4


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("damaged"), ValueError),
        (OSError("lost"), OSError),
        (MemoryError(), _util.memory.TooLargeError),
    ],
)
def test_failed_task_fails_only_its_reading(error, kind):
    done = []
    failed = Reading([fail(error), lambda: done.append(1)], dict)
    other = Reading([lambda: done.append(2)], lambda: {(): 1})
    read_files.run([failed, other])
    assert sorted(done) == [1, 2], "the other tasks have run"
    with pytest.raises(kind, match=str(error) or None):
        failed.result()
    assert other.result() == {(): 1}


def test_raises_first_of_several_errors():
    reading = Reading([], dict, [ValueError("one"), ValueError("two")])
    with pytest.raises(ValueError, match="one"):
        reading.result()


@pytest.mark.parametrize(("in_store", "threads"), [(False, 8), (True, 32)])
def test_reads_more_objects_than_files_concurrently(in_store, threads):
    """All these tasks wait for each other, so that each needs a thread of its own."""
    together = threading.Barrier(threads)
    readings = [Reading([lambda: together.wait(60)], dict)] * threads
    read_files.run(readings, in_store=in_store)
    assert [reading.result() for reading in readings] == [{}] * threads


def test_small_gap_is_larger_for_stores_than_disks(tmp_path):
    assert read_files.small_gap(tmp_path) == 2**16
    assert read_files.small_gap(faulty.new_path("gaps")) == 2**22
