"""Writes a snapshot to a temporary directory, then renames the directory."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from flaxckpt import _arrays, _formats, _steps, _storage, _util, errors
from flaxckpt._checkpoint.overwrite import check_replaceable
from flaxckpt._checkpoint.save_handle import Cancellation
from flaxckpt._distributed.operation import Operation
from flaxckpt._formats.items import Items
from flaxckpt._formats.reader import Lineage
from flaxckpt._storage.transaction import Transaction
from flaxckpt._transforms import base as _transforms
from flaxckpt._types import JSON
from flaxckpt._util.pace import Pace
from flaxckpt._zarr.array_layout import ArrayLayout
from flaxckpt.transforms import Transform


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options for writing states, shared by all saves of a run; see `Checkpointer`."""

    layout: ArrayLayout = dataclasses.field(default_factory=ArrayLayout)
    transforms: Sequence[Transform] = ()
    max_concurrent_bytes: int = _arrays.write.DEFAULT_CONCURRENT_BYTES
    snapshot: _arrays.to_host.SnapshotMemory = "host"
    items: Items = dataclasses.field(default_factory=Items)
    mode: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", _transforms.check(self.transforms))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Arguments of a save, without the state, which is freed as soon as it is copied.

    Attributes:
        started: Monotonic time of the call.
        on_planned: Called with the size of the planned save, before copying any values.
        count: Called with the size of values after they are written.
        markers: Step markers to write: file name -> content.
        pace: Whether the writing threads give way to the program.
        is_item: Whether `path` is an item of a step that another program commits: a
            directory that the program makes before the write.
        is_part: Whether `path` is this process's own, for its part of the step.
        make_room: For a part: waits until all are durable, then removes leftovers at
            `path`, or raises; None to wait and replace any step there.
        not_before: The earliest time of the save, in seconds since 1970: it is later
            than the save that it replaces, even if the clocks are apart.
    """

    path: Path
    options: SaveOptions = dataclasses.field(default_factory=SaveOptions)
    step: int | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, JSON] = dataclasses.field(default_factory=dict)
    dataset: Any = None
    json: Mapping[str, JSON] = dataclasses.field(default_factory=dict)
    on_exists: Literal["error", "skip", "overwrite"] = "error"
    temporary: bool = False
    lineage: Sequence[Lineage] = ()
    started: float = dataclasses.field(default_factory=time.monotonic)
    on_planned: Callable[..., object] | None = None
    count: _util.progress.Count = _util.progress.ignore
    operation: Operation | None = None
    markers: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    cancellation: Cancellation = dataclasses.field(default_factory=Cancellation)
    pace: Pace = dataclasses.field(default_factory=Pace)
    sampler: _arrays.sample.Sampler | None = None
    is_item: bool = False
    is_part: bool = False
    make_room: Callable[[Operation], object] | None = None
    not_before: float = 0.0

    @property
    def overwrite(self) -> bool:
        """True if the save replaces an existing checkpoint."""
        return self.on_exists == "overwrite"

    @property
    def number(self) -> int:
        assert self.step is not None
        return self.step

    def elapsed(self) -> float:
        """Returns the seconds since the call."""
        return time.monotonic() - self.started


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The values of a state at the call of `save`, which this process writes."""

    request: SaveRequest
    contents: _formats.native_contents.Contents
    arrays: tuple[_arrays.to_host.HostArray, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in memory of the values written by this process."""
        return sum([array.nbytes for array in self.arrays])

    @property
    def stored_bytes(self) -> int:
        """Uncompressed bytes of all arrays of all processes in their storage type."""
        return sum(info.stored_bytes for info in self.contents.manifest.infos)


class WrittenFiles(NamedTuple):
    """Bytes of all written files, without hard links, and arrays for the next save."""

    size: int
    arrays: _arrays.written.Previous


_locks: weakref.WeakValueDictionary[Path, threading.Lock] = (
    weakref.WeakValueDictionary()
)
"""Path -> lock that admits one writer at a time within this process.

Locks disappear when no thread uses them.
"""

_guard = _util.forks.PerProcess(threading.Lock)


def _lock(final: Path) -> threading.Lock:
    """Returns the lock that all threads share while they write `final`."""
    with _guard.get():
        return _locks.setdefault(final, threading.Lock())


# In a forked child, the threads with the locks do not exist.
os.register_at_fork(after_in_child=_locks.clear)


@contextlib.contextmanager
def store_errors(final: Path) -> Iterator[None]:
    """Converts errors of an object store before the first write to SaveFailedError."""
    try:
        yield
    except errors.StoreError as error:
        raise _store_failure(final, error, "Nothing was written") from error


def _store_failure(
    final: Path, error: errors.StoreError, left: str
) -> errors.SaveFailedError:
    """Returns the error of a save to a store; `left` describes the rest of the save."""
    text = f"{final} could not be saved: {error}"
    if isinstance(error, _storage.store_requests.ForkedError):
        return errors.SaveFailedError(text)
    return errors.SaveFailedError(
        f"{text}\n{left}; check that the store can be reached, then save again."
    )


@contextlib.contextmanager
def write_lock(final: Path) -> Iterator[None]:
    """Locks `final` for a thread at a time, and converts errors to SaveFailedError."""
    try:
        with _lock(final):
            yield
    except errors.CheckpointError as error:
        if not isinstance(error, errors.StoreError):
            raise
        left = "Nothing was saved, unless an unconfirmed commit marker was written"
        raise _store_failure(final, error, left) from error
    except _storage.rename.NotDurableError as error:
        raise errors.SaveFailedError(
            f"{final} was written, but the disk did not confirm the rename: {error}\n"
            "After a crash, the new or the previous checkpoint may be there; check the"
            " disk, then save again."
        ) from error
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        advice = "check that the directory is writable and has free space, then"
        if getattr(error, "errno", None) == errno.ENAMETOOLONG:
            advice = "use a shorter path, as a save makes files with longer names, and"
        raise errors.SaveFailedError(
            f"{final} could not be saved: {errors.one_line(error)}\n"
            "Nothing of it is kept and earlier checkpoints are untouched;"
            f" {advice} save again."
        ) from error


@contextlib.contextmanager
def begin(snapshot: Snapshot) -> Iterator[Transaction]:
    """Begins the transaction of a save; removes what is not committed at the end."""
    final, options = snapshot.request.path, snapshot.request.options
    trees = snapshot.contents.manifest.items.trees
    if snapshot.request.is_item:
        yield _storage.transaction.ItemTransaction(final)
        return
    # A run in a store has looked at its directory when it was opened.
    storage = _storage.of(final)
    if snapshot.request.step is None or not storage.costs_requests:
        storage.make_directory(final.parent, mode=options.mode)
    overwrite = snapshot.request.overwrite and snapshot.request.make_room is None
    with replacing(final, overwrite=overwrite, mode=options.mode) as transaction:
        for item in trees:
            (transaction.directory / item).mkdir(exist_ok=True)
        yield transaction


def replacing(
    final: Path,
    *,
    overwrite: bool,
    check: Callable[[Path], object] = check_replaceable,
    mode: int | None = None,
) -> contextlib.AbstractContextManager[Transaction]:
    """Begins the checkpoint `final`, which gets the pin of one that it replaces."""
    return _storage.transaction.begin(
        final,
        overwrite=overwrite,
        keep=_steps.markers.PIN.__eq__,
        check=check,
        mode=mode,
    )


WrittenArrays: TypeAlias = dict[str, _arrays.written.Written]
"""Item -> what was written to its database."""


def write_files(
    snapshot: Snapshot,
    transaction: Transaction,
    previous: _arrays.written.Previous | None,
) -> tuple[dict[str, bytes], WrittenArrays]:
    """Writes the arrays and metadata files of this process, without the manifest."""
    files: dict[str, bytes] = {}

    @_util.gc_pause.pause()
    def describe() -> None:
        files.update(_formats.native_contents.make_files(snapshot.contents))
        transaction.write(files)

    with _util.threads.beside(describe) as check:
        written = write_arrays(snapshot, transaction.directory, previous, check)
    return files, written


def write_arrays(
    snapshot: Snapshot,
    root: Path,
    previous: _arrays.written.Previous | None,
    check: Callable[[], object],
) -> WrittenArrays:
    """Writes the arrays of this process; hard-links those equal in `previous`."""
    operation, mode = snapshot.request.operation, snapshot.request.options.mode
    if mode is not None and previous is not None:
        previous = previous._replace(file_mode=_storage.modes.of_file(mode))

    def count(size: int) -> None:
        check()
        snapshot.request.cancellation.check()
        snapshot.request.count(size)

    sampler = snapshot.request.sampler
    if sampler is not None:
        sampler.choose(snapshot.arrays)
    writer = 0 if operation is None else operation.index
    options = _arrays.write.WriteOptions(
        encoding=snapshot.request.options.layout.encoding,
        max_concurrent_bytes=snapshot.request.options.max_concurrent_bytes,
        report=count,
        writer=writer,
        with_metadata=writer == 0,
        segment_bytes=snapshot.contents.segment_bytes,
        pace=snapshot.request.pace,
        total_bytes=snapshot.stored_bytes,
    )
    databases: WrittenArrays = {}
    for item in snapshot.contents.manifest.items.trees:  # a database each
        start = _formats.items.prefix(item)
        observe = None
        if sampler is not None:
            observe = functools.partial(sampler.add, prefix=start)
        databases[item] = _arrays.write.write(
            root / item,
            [
                array._replace(name=array.name[len(start) :])
                for array in snapshot.arrays
                if f"{array.name}/".startswith(start)
            ],
            options._replace(previous=previous and previous.of_item(item, start)),
            observe=observe,
        )
    return databases


def finish_checkpoint(
    snapshot: Snapshot,
    transaction: Transaction,
    files: Mapping[str, bytes],
    digests: Mapping[str, str] | None = None,
    *,
    arrays: WrittenArrays,
) -> WrittenFiles:
    """Writes the manifest and commits the checkpoint; an item only becomes durable."""
    sealed = _formats.native_contents.seal(
        snapshot.contents, files, transaction.directory, arrays, digests or {}
    )
    return commit_files(snapshot, transaction, sealed)


def commit_files(
    snapshot: Snapshot,
    transaction: Transaction,
    last: Mapping[str, bytes],
    before: Callable[[], object] = lambda: None,
) -> WrittenFiles:
    """Writes the last files and markers, and commits; an error of `before` stops it."""
    request = snapshot.request
    last = dict(last)
    marker = last.pop(_storage.transaction.MARKER, None)  # None in an item
    markers = _steps.markers.for_new_step(request.path, temporary=request.temporary)
    transaction.write({**last, **markers, **request.markers})

    def close() -> None:
        request.cancellation.close()
        before()

    size, stamp = transaction.commit(marker, close)
    return WrittenFiles(size, linkable_arrays(snapshot, stamp))


def linkable_arrays(
    snapshot: Snapshot, stamp: _storage.Stamp | None
) -> _arrays.written.Previous:
    """Returns the arrays that the next save may hard-link; none without a stamp."""
    sources = {
        array.name: (array.source, array.dtype)
        for array in snapshot.arrays
        if array.source is not None and stamp is not None
    }
    return _arrays.written.Previous(snapshot.request.path, sources, stamp)


def metadata_files(
    contents: _formats.native_contents.Contents, path: Path
) -> dict[str, bytes]:
    """Returns the files of the checkpoint `path` without arrays, for size checks."""
    files = _formats.native_contents.make_files(contents)
    return files | _formats.native_contents.seal(contents, files, path, None)
