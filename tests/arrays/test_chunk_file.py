"""Files of bytes with a checksum: written, linked, read, mapped."""

import gc
import io
import mmap
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import crc32c
import numpy as np
import pytest

from flaxckpt._storage import filesystem as storage_filesystem
from flaxckpt._zarr import chunk_file as zarr_chunk_file
from flaxckpt._zarr.chunk_file import Block
from tests.helpers.files import flip_bit

PAGE = mmap.PAGESIZE


def views(*parts):
    return [memoryview(part) for part in parts]


def crc(*parts):
    return crc32c.crc32c(b"".join(parts)).to_bytes(4, "little")


def stored(path, content, *, has_checksum=True):
    parts = views(content)
    if has_checksum:
        parts.append(memoryview(crc(*parts)))
    zarr_chunk_file.write(path, parts)
    return Block(path, len(content), has_checksum)


def noise(size, seed=0):
    return np.random.default_rng(seed).bytes(size)


@pytest.mark.parametrize("size", [0, 1, 4095, 2**20 + 3])
@pytest.mark.parametrize("has_checksum", [True, False])
def test_block_round_trips(tmp_path, size, has_checksum):
    content = noise(size)
    block = stored(tmp_path / "b", content, has_checksum=has_checksum)
    assert block.file_size == block.path.stat().st_size
    into = zarr_chunk_file.empty(size)
    zarr_chunk_file.read(block, [into.data], verify=True)
    assert into.tobytes() == content
    run = zarr_chunk_file.map_block(block)
    zarr_chunk_file.verify_mapped(block, run)
    assert run.tobytes() == content


def test_reads_block_into_multiple_buffers(tmp_path):
    block = stored(tmp_path / "b", b"abcdef")
    first, second = zarr_chunk_file.empty(2), zarr_chunk_file.empty(4)
    zarr_chunk_file.read(block, [first.data, second.data], verify=True)
    assert (first.tobytes(), second.tobytes()) == (b"ab", b"cdef")


def test_aligns_memory_for_jax():
    for size in (1, 63, 1000):
        assert zarr_chunk_file.empty(size).ctypes.data % zarr_chunk_file.ALIGNMENT == 0


def test_files_have_default_permissions(tmp_path):
    stored(tmp_path / "b", b"x")
    (tmp_path / "usual").write_bytes(b"x")
    assert (tmp_path / "b").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_does_not_overwrite_existing_file(tmp_path):
    stored(tmp_path / "b", b"x")
    with pytest.raises(FileExistsError):
        stored(tmp_path / "b", b"y")


@pytest.mark.parametrize("place", [0, 5000, 9999, 10_000, 10_003])
def test_detects_bit_flip(tmp_path, place):
    block = stored(tmp_path / "b", noise(10_000))
    flip_bit(block.path, place)
    with pytest.raises(ValueError, match="b has changed since it was written"):
        zarr_chunk_file.read(block, [zarr_chunk_file.empty(10_000).data], verify=True)
    with pytest.raises(ValueError, match="b has changed since it was written"):
        zarr_chunk_file.verify_mapped(block, zarr_chunk_file.map_block(block))
    zarr_chunk_file.read(block, [zarr_chunk_file.empty(10_000).data], verify=False)


@pytest.mark.parametrize("size", [0, 3, 9999, 10_001])
def test_detects_wrong_size_before_mapping(tmp_path, size):
    block = stored(tmp_path / "b", noise(10_000))
    block.path.write_bytes(noise(size))
    for use in (
        lambda: zarr_chunk_file.read(
            block, [zarr_chunk_file.empty(10_000).data], verify=False
        ),
        lambda: zarr_chunk_file.map_block(block),
        lambda: zarr_chunk_file.map_blocks([block, block]),
    ):
        with pytest.raises(ValueError, match=f"b has {size} bytes instead of 10004"):
            use()


def test_maps_blocks_contiguously(tmp_path):
    sizes = [PAGE, 3 * PAGE, PAGE // 2 + 1]
    assert zarr_chunk_file.can_join(sizes)
    assert not zarr_chunk_file.can_join([PAGE + 8, PAGE])
    assert not zarr_chunk_file.can_join([PAGE, PAGE + 8, PAGE])
    blocks = [stored(tmp_path / str(n), noise(size, n)) for n, size in enumerate(sizes)]
    run = zarr_chunk_file.map_blocks(blocks)
    assert run.tobytes() == b"".join(noise(size, n) for n, size in enumerate(sizes))


def test_writing_to_map_leaves_file_unchanged(tmp_path):
    block = stored(tmp_path / "b", noise(2 * PAGE))
    for run in (zarr_chunk_file.map_block(block), zarr_chunk_file.map_blocks([block])):
        run[:] = 7
        assert set(run.tolist()) == {7}
    assert block.path.read_bytes()[:-4] == noise(2 * PAGE)


def test_map_outlives_its_file(tmp_path):
    block = stored(tmp_path / "b", noise(2 * PAGE))
    run, joined = (
        zarr_chunk_file.map_block(block),
        zarr_chunk_file.map_blocks([block, block]),
    )
    block.path.unlink()
    assert run.tobytes() == noise(2 * PAGE)
    assert joined.tobytes() == noise(2 * PAGE) * 2


def maps_of(path):
    return Path("/proc/self/maps").read_text().count(str(path))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc here")
def test_releases_map_with_last_array(tmp_path):
    block = stored(tmp_path / "b", noise(2 * PAGE))
    part = zarr_chunk_file.map_block(block)[10:20]
    joined = zarr_chunk_file.map_blocks([block, block]).view(np.float32)[5:]
    assert maps_of(block.path) >= 2
    del part, joined
    gc.collect()
    assert maps_of(block.path) == 0


@pytest.mark.parametrize("has_checksum", [True, False])
def test_links_equal_file(tmp_path, has_checksum):
    content = noise(3 * 2**20 + 5)
    old = stored(tmp_path / "old", content, has_checksum=has_checksum).path
    parts = views(content[:100], content[100:])
    if has_checksum:
        parts.append(memoryview(crc(*parts)))
    assert zarr_chunk_file.link_if_equal(old, tmp_path / "new", parts)
    assert (tmp_path / "new").samefile(old)


@pytest.mark.parametrize("place", [0, 2**20, 3 * 2**20 - 1])
def test_does_not_link_different_file(tmp_path, place):
    """Not even if its checksum is the same: it may have been damaged."""
    content = bytearray(noise(3 * 2**20))
    old = stored(tmp_path / "old", bytes(content)).path
    parts = views(bytes(content))
    parts.append(memoryview(crc(*parts)))
    with old.open("r+b") as file:
        file.seek(place)
        file.write(bytes([content[place] ^ 1]))
    assert not zarr_chunk_file.link_if_equal(old, tmp_path / "new", parts)
    assert not (tmp_path / "new").exists()


def test_links_unchanged_file_by_checksum(tmp_path):
    content = noise(2**20)
    old = stored(tmp_path / "old", content).path
    parts = views(content)
    assert zarr_chunk_file.link_if_equal(
        old, tmp_path / "new", [*parts, memoryview(crc(*parts))], compare_all=False
    )
    assert (tmp_path / "new").samefile(old)
    changed = views(content[:-1] + bytes([content[-1] ^ 1]))
    assert not zarr_chunk_file.link_if_equal(
        old,
        tmp_path / "other",
        [*changed, memoryview(crc(*changed))],
        compare_all=False,
    )
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("mode", "is_linked"), [(0o640, True), (0o600, False)])
def test_link_requires_matching_mode(tmp_path, mode, is_linked):
    stored(tmp_path / "old", b"content", has_checksum=False)
    (tmp_path / "old").chmod(0o640)
    parts = views(b"content")
    made = zarr_chunk_file.link_if_equal(
        tmp_path / "old", tmp_path / "new", parts, mode=mode
    )
    assert (made, (tmp_path / "new").exists()) == (is_linked, is_linked)


class WouldBlock(io.BytesIO):
    def readinto(self, buffer):
        return None


@pytest.mark.parametrize("kind", [io.BytesIO, WouldBlock])
def test_concurrently_truncated_file_is_not_equal(kind):
    assert not zarr_chunk_file._is_equal(kind(b"abc"), views(b"ab", b"cdef"))
    assert not zarr_chunk_file._is_equal(kind(b""), views(b"a"))


def test_does_not_link_missing_or_empty_file(tmp_path):
    assert not zarr_chunk_file.link_if_equal(
        tmp_path / "old", tmp_path / "new", views(b"x")
    )
    (tmp_path / "empty").touch()
    assert not zarr_chunk_file.link_if_equal(
        tmp_path / "empty", tmp_path / "new", views(b"")
    )


def test_detects_file_system_of_path(tmp_path):
    if not Path("/proc/self/mountinfo").exists():
        assert not storage_filesystem.is_local(tmp_path)
        pytest.skip("no /proc here")
    assert storage_filesystem.kind("/proc/self") == "proc"
    assert not storage_filesystem.is_local("/proc/self")
    if Path("/dev/shm").is_dir() and os.path.ismount("/dev/shm"):
        assert storage_filesystem.is_local("/dev/shm")
    assert storage_filesystem.kind("/nowhere/at/all") == storage_filesystem.kind("/")
    assert storage_filesystem._unescaped(r"/a\040b\134c") == "/a b\\c"


@pytest.mark.parametrize("kind", ["short", "symlink", "fifo"])
def test_links_only_complete_regular_files(tmp_path, kind):
    old = tmp_path / "old"
    stored(tmp_path / "real", b"content")
    if kind == "short":
        old.write_bytes(b"cont")
    elif kind == "symlink":
        old.symlink_to(tmp_path / "real")
    else:
        os.mkfifo(old)
    assert not zarr_chunk_file.link_if_equal(
        old, tmp_path / "new", views(b"content", b"crc!")
    )
    assert not (tmp_path / "new").exists()


def test_map_keeps_no_file_open(tmp_path):
    if zarr_chunk_file._map_function() is None:
        pytest.skip("maps with Python's own function only")
    block = stored(tmp_path / "b", noise(2 * PAGE))
    before = len(list(Path("/proc/self/fd").iterdir()))
    maps = [zarr_chunk_file.map_block(block) for _ in range(50)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert len(maps) == 50


CUT_SHORT = """
import os, sys
from pathlib import Path
from flaxckpt._zarr import chunk_file

block = chunk_file.Block(Path(sys.argv[1]), int(sys.argv[2]), True)
run = chunk_file.map_block(block)
os.truncate(block.path, block.size // 2)
try:
    chunk_file.verify_mapped(block, run)
except OSError as error:
    print(error)
"""


def test_unreadable_map_raises_error_instead_of_signal(tmp_path):
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    if sys.platform != "linux" or release < (5, 14):
        pytest.skip("only Linux, from 5.14 on, says what cannot be read of a map")
    block = stored(tmp_path / "b", noise(2**20))
    done = subprocess.run(
        [sys.executable, "-c", CUT_SHORT, block.path, str(block.size)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done
    assert "cannot be read" in done.stdout


# ---- segments ---------------------------------------------------------------------


def in_segments(path, content, size):
    """A block whose segments of `size` bytes have checksums."""
    block = stored(path, content)
    ends = range(size, len(content), size)
    sums = tuple(crc32c.crc32c(content[:end]) for end in ends)
    return block._replace(segment_bytes=size, checksums=sums)


def read_part(block, start, stop):
    into = zarr_chunk_file.empty(stop - start)
    zarr_chunk_file.read(block, [into.data], verify=True, start=start)
    return into.tobytes()


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 100), (100, 300), (200, 350), (0, 350)]
)
def test_reads_and_verifies_segments_independently(tmp_path, start, stop):
    content = noise(350)
    block = in_segments(tmp_path / "b", content, 100)
    assert block.verified_at_once == 100
    assert read_part(block, start, stop) == content[start:stop]
    run = zarr_chunk_file.map_block(block)
    zarr_chunk_file.verify_mapped(block, run, start, stop)
    for place in range(0, 350, 50):
        flip_bit(block.path, place)
        if not start <= place < stop:
            assert read_part(block, start, stop) == content[start:stop]
        else:
            first = place // 100 * 100
            where = f" in bytes {first} to {min(first + 100, 350)}"
            told = f"was written{where if stop - start < 350 else ''}: its CRC-32C is"
            with pytest.raises(ValueError, match=told):
                read_part(block, start, stop)
            run = zarr_chunk_file.map_block(block)
            with pytest.raises(ValueError, match=told):
                zarr_chunk_file.verify_mapped(block, run, start, stop)
        flip_bit(block.path, place)


def test_reports_smallest_verifiable_part(tmp_path):
    plain = stored(tmp_path / "a", b"abc", has_checksum=False)
    whole = stored(tmp_path / "b", b"abc")
    nothing = stored(tmp_path / "c", b"")
    sizes = [block.verified_at_once for block in (plain, whole, nothing)]
    assert sizes == [1, 3, 1]


# ---- ranges -----------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, PAGE - 1, PAGE, PAGE + 7])
def test_maps_range_of_file(tmp_path, offset):
    content = noise(3 * PAGE)
    (tmp_path / "b").write_bytes(content)
    with (tmp_path / "b").open("rb") as file:
        if zarr_chunk_file._map_function() is None:
            assert zarr_chunk_file.map_range(file.fileno(), offset, 100) is None
            pytest.skip("maps with Python's own function only")
        found = zarr_chunk_file.map_range(file.fileno(), offset, PAGE)
    assert found.tobytes() == content[offset : offset + PAGE]
    found[:] = 0
    assert (tmp_path / "b").read_bytes() == content


def test_map_range_returns_none_for_unreadable_ranges(tmp_path):
    (tmp_path / "b").write_bytes(b"1" * PAGE)
    with (tmp_path / "b").open("rb") as file:
        descriptor = file.fileno()
        if sys.platform == "linux":
            assert zarr_chunk_file.map_range(descriptor, 8 * PAGE, PAGE) is None
            found = zarr_chunk_file.map_range(descriptor, 0, PAGE)
            assert found.tobytes() == b"1" * PAGE, "the error before is not of this map"
    assert zarr_chunk_file.map_range(descriptor, 0, PAGE) is None, "it is closed"


def test_map_function_exists_only_on_linux():
    is_linux = sys.platform == "linux"
    zarr_chunk_file._map_function.cache_clear()  # the function itself runs here
    assert (zarr_chunk_file._map_function() is not None) == is_linux
