"""Writes a directory for each array, with a file for each chunk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from flaxckpt import _storage, _util
from flaxckpt._arrays import encode, stored_chunks
from flaxckpt._arrays.stored_chunks import Chunk, Target
from flaxckpt._arrays.to_host import HostArray
from flaxckpt._arrays.written import Checksums, Previous
from flaxckpt._arrays.zarr import chunk_file
from flaxckpt._arrays.zarr import metadata as zarr_metadata
from flaxckpt._arrays.zarr.metadata import Encoding

_COPIES_IN_UPLOADS = 1 + stored_chunks.COPIES_IN_REQUESTS
"""Copies in memory of what TensorStore writes to memory first."""

_SHARED_BYTES = 16 * 2**20
"""Size in bytes from which several threads share the chunks of an array."""


def write(target: Target, arrays: Iterable[HostArray]) -> Checksums:
    """Writes a directory for each array; returns the checksums of raw chunks."""
    root, previous = target.root, target.previous
    raw: list[HostArray] = []
    encoded: list[HostArray] = []
    for array in arrays:
        (raw if stored_chunks.is_raw(array, target.encoding) else encoded).append(array)
    checksums = _write_files(target, raw)
    at_once = min(target.max_concurrent_bytes, encode.ENCODED_AT_ONCE)
    if encoded and _storage.upload.is_needed(root):
        at_once = min(at_once, target.max_concurrent_bytes // _COPIES_IN_UPLOADS)
        for batch in _util.memory.batches(encode.sized(encoded), at_once):
            with _storage.upload.memory_directory(root) as memory:
                encode.write_encoded(target._replace(root=memory.path), batch, at_once)
        return checksums
    is_shared = target.writer is not None
    encode.write_encoded(target, encoded, at_once, may_exist=is_shared)
    # Other processes may still be writing these files.
    if previous is not None and not is_shared:
        for array in encoded:
            _link_files(previous, root / array.name, array.name)
    return checksums


def chunk_files(root: Path, array: HostArray) -> Iterator[Path]:
    """Yields the chunk files of a raw array to be written by this process."""
    for chunk in stored_chunks.chunks(array):
        yield root / array.name / chunk.key


def write_parts(
    root: Path,
    arrays: Sequence[HostArray],
    *,
    encoding: Encoding,
    max_concurrent_bytes: int = stored_chunks.DEFAULT_CONCURRENT_BYTES,
) -> None:
    """Writes or overwrites parts of arrays, which may exist, in a directory each.

    Args:
        root: The directory with the arrays.
        arrays: Whole chunks of each array; other chunks stay unchanged.
        encoding: Encoding of the chunks.
        max_concurrent_bytes: Bytes passed to TensorStore and not yet written.

    Raises:
        OSError, ValueError: An array could not be written.
    """
    target = Target(root, encoding, _storage.store_requests.context())
    at_once = min(max_concurrent_bytes, encode.ENCODED_AT_ONCE)
    encode.write_encoded(target, arrays, at_once, may_exist=True)


def _write_files(target: Target, arrays: Sequence[HostArray]) -> Checksums:
    """Writes each array as a directory of chunk files, on several threads.

    Returns:
        The checksums of all chunks and of their segments.
    """
    checksums: Checksums = {}
    root, previous, encoding = target.root, target.previous, target.encoding
    file_mode = None if previous is None else previous.file_mode
    budget = _util.threads.Budget(target.max_concurrent_bytes)
    costs_requests = _storage.of(root).costs_requests

    def begin(array: HostArray) -> bool:
        """Makes the directory; returns True if the array is unchanged."""
        directory = root / array.name
        # The directory of an array without a name is its parent's.
        is_whole_item = "/" not in array.name
        directory.mkdir(exist_ok=is_whole_item or target.writer is not None)
        content = stored_chunks.metadata_text(array, encoding)
        if not target.writer:
            chunk_file.write(directory / zarr_metadata.METADATA, [memoryview(content)])
        return previous is not None and _is_unchanged(array, content, previous)

    def write_chunk(chunk: Chunk, is_unchanged: bool) -> None:
        name = chunk.array.name
        new = root / name / chunk.key
        old = None if previous is None else previous.root / name / chunk.key
        # A jax array may share memory with a numpy array that its owner has changed.
        # jax does not report this, so compare checksums.
        compare_all = not (is_unchanged and encoding.checksum)
        copies = chunk.needs_copy() + stored_chunks.COPIES_IN_REQUESTS * costs_requests
        with budget.hold(chunk.size * copies):
            parts, packed = chunk.parts_and_checksums(encoding, target.segment_bytes)
            if packed:
                checksums.setdefault(name, {})[chunk.key] = packed
            if old is None or not chunk_file.link_if_equal(
                old, new, parts, compare_all=compare_all, mode=file_mode
            ):
                chunk_file.write(new, parts)
        target.report(chunk.nbytes)

    tasks = _tasks(arrays, begin, write_chunk, in_store=costs_requests)
    # A thread of low priority must not be the first to use TensorStore, whose threads
    # would inherit the priority.
    threads, pace = (
        (stored_chunks.THREADS_OF_STORES, None)
        if costs_requests
        else (stored_chunks.THREADS, target.pace)
    )
    _util.threads.each(lambda task: task(), tasks, threads=threads, pace=pace)
    if previous is not None and not previous.is_current():
        # Files of another checkpoint may have been linked.
        raise OSError(f"{previous.root} was replaced during the save")
    return checksums


def _tasks(
    arrays: Sequence[HostArray],
    begin: Callable[[HostArray], bool],
    write_chunk: Callable[[Chunk, bool], None],
    *,
    in_store: bool,
) -> list[Callable[[], object]]:
    """Returns the tasks that write arrays, in the order to start them.

    Large arrays are shared among the threads, chunk by chunk, and come first. In a
    store they come last: a server busy with them answers small requests late.

    Args:
        arrays: The arrays.
        begin: Makes the directory of an array; returns True if it is unchanged.
        write_chunk: Writes a chunk of an array that is unchanged, or not.
        in_store: True for objects, which need no directory before them.
    """

    def write(array: HostArray) -> None:
        is_unchanged = begin(array)
        for chunk in stored_chunks.chunks(array):
            write_chunk(chunk, is_unchanged)

    tasks: list[Callable[[], object]] = []
    ordered = sorted(arrays, key=lambda array: -array.nbytes)
    for array in ordered:
        if not in_store and array.nbytes < _SHARED_BYTES:
            tasks.append(functools.partial(write, array))
            continue
        is_unchanged = False if in_store else begin(array)
        tasks += [
            functools.partial(write_chunk, chunk, is_unchanged)
            for chunk in stored_chunks.chunks(array)
        ]
    if not in_store:
        return tasks
    return [functools.partial(begin, array) for array in ordered] + tasks[::-1]


def _is_unchanged(array: HostArray, metadata: bytes, previous: Previous) -> bool:
    """Returns True if the same jax object was saved before, in the same form."""
    if not stored_chunks.has_same_source(array, previous):
        return False
    try:
        path = previous.root / array.name / zarr_metadata.METADATA
        return chunk_file.read_small(path) == metadata
    except (ValueError, OSError):
        return False


def _link_files(previous: Previous, new: Path, name: str) -> None:
    """Replaces files of an array by links to equal files of an earlier checkpoint."""
    for file in [path for path in new.iterdir() if path.is_file()]:
        link = file.with_name(file.name + ".link")
        if chunk_file.link_if_equal(
            previous.root / name / file.name,
            link,
            [memoryview(file.read_bytes())],
            mode=previous.file_mode,
        ):
            link.replace(file)
