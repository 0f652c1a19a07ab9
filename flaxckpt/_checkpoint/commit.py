"""A snapshot, written into a directory of its own that then gets its name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from flaxckpt import _arrays, _distributed, _state, _steps, _storage, _util, errors
from flaxckpt._arrays.zarr.array_layout import ArrayLayout
from flaxckpt._checkpoint import overwrite as checkpoint_overwrite
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import JSON, LeafPath
from flaxckpt.formats import _native
from flaxckpt.formats._reader import Lineage
from flaxckpt.transforms import Transform
from flaxckpt.transforms import _base as _transforms


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What belongs to a checkpoint beside its state.

    Attributes:
        step: Its number, or None.
        layout: How arrays are cut and encoded.
        transforms: What to change on the way to the checkpoint.
        metrics: What was measured.
        metadata: The user's own, JSON.
        dataset: A dataset iterator, or None.
        overwrite: Whether an existing checkpoint is replaced.
        max_concurrent_bytes: Budget of the writing thread.
        lineage: What the run began from.
        planned: Called with what will be saved, before its values are taken.
        temporary: Whether it stays only until there is a newer step.
        count: Called with bytes of values whenever some are written.
        together: What all processes save by; None if there is only one.
        marks: Files that say more of the step, by name.
    """

    step: int | None = None
    layout: ArrayLayout = dataclasses.field(default_factory=ArrayLayout)
    transforms: Sequence[Transform] = ()
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, JSON] = dataclasses.field(default_factory=dict)
    dataset: Any = None
    overwrite: bool = False
    max_concurrent_bytes: int = _arrays.write.DEFAULT_CONCURRENT_BYTES
    lineage: Sequence[Lineage] = ()
    planned: Callable[..., object] | None = None
    temporary: bool = False
    count: _arrays.write.Count = _util.progress.ignore
    together: _distributed.operation.Operation | None = None
    marks: Mapping[str, bytes] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """A state as it was at the call of `save`, ready to be written.

    Attributes:
        final: Where the checkpoint will be.
        infos: All its leaves.
        structure: Its containers.
        arrays: The values that this process writes.
        strings: Param name -> value of the string leaves.
        dataset: File name -> content of the iterator's state.
        ocdbt: Whether the arrays go into one database.
        options: As given.
        created: Seconds since 1970.
    """

    final: Path
    infos: tuple[LeafInfo, ...]
    structure: _state.tree.Node | LeafPath
    arrays: tuple[_arrays.to_host.HostArray, ...]
    strings: Mapping[str, str]
    dataset: Mapping[str, bytes]
    ocdbt: bool
    options: Options
    created: float

    @property
    def encoding(self) -> _arrays.zarr.metadata.Encoding:
        """How the chunks of the arrays are encoded."""
        return self.options.layout.encoding

    @property
    def nbytes(self) -> int:
        """Bytes of the values that this process writes, in memory."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def stored_bytes(self) -> int:
        """Size of all arrays of all processes, as stored if they are not compressed."""
        return sum(
            _arrays.layout.stored_bytes(i)
            for i in self.infos
            if i.chunk_shape is not None
        )


class Written(NamedTuple):
    """What a finished save has left.

    Attributes:
        size: Bytes of all files that were written; those that were linked do not count.
        arrays: Its arrays, for the save after it.
    """

    size: int
    arrays: _arrays.write.Previous


_locks: weakref.WeakValueDictionary[Path, threading.Lock] = (
    weakref.WeakValueDictionary()
)
"""One writer at a time of a path, within this process; gone when nobody writes it."""

_guard = _util.forks.PerProcess(threading.Lock)


def _lock(final: Path) -> threading.Lock:
    """The lock of all threads that write `final` at this time."""
    with _guard.get():
        return _locks.setdefault(final, threading.Lock())


def _forget_locks() -> None:
    """Drops the locks in a forked child: the threads that hold them are not there."""
    _locks.clear()


os.register_at_fork(after_in_child=_forget_locks)


@contextlib.contextmanager
def beginning(final: Path) -> Iterator[None]:
    """Tells of a store that fails before a save has begun to write.

    Raises:
        SaveFailedError: The store is out of reach.
    """
    try:
        yield
    except errors.StoreError as error:
        raise _of_store(final, error, "Nothing of it was written") from error


def _of_store(
    final: Path, error: errors.StoreError, left: str
) -> errors.SaveFailedError:
    """The error of a save to a store, with what is `left` of the save."""
    told = f"{final} could not be saved: {error}"
    if isinstance(error, _storage.client.ForkedError):
        return errors.SaveFailedError(told)
    return errors.SaveFailedError(
        f"{told}\n{left}; see that the store can be reached, then save again."
    )


@contextlib.contextmanager
def alone(final: Path) -> Iterator[None]:
    """Lets one thread at a time write `final`, and tells what fails in our words.

    Raises:
        SaveFailedError: An error of the disk, or another that is not ours.
    """
    try:
        with _lock(final):
            yield
    except errors.CheckpointError as error:
        if not isinstance(error, errors.StoreError):
            raise
        left = "Nothing of it counts, unless it was its marker that was not written"
        raise _of_store(final, error, left) from error
    except _storage.rename.NotDurableError as error:
        raise errors.SaveFailedError(
            f"{final} was written, but the disk did not confirm its name: {error}\n"
            "Whether it stays, or what was there before, is not known; see that the"
            " disk is sound, then save again."
        ) from error
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        raise errors.SaveFailedError(
            f"{final} could not be saved: {' '.join(str(error).split())[:300]}\n"
            "Nothing of it is kept and earlier checkpoints are untouched; see that the"
            " directory is writable and has space, then save again."
        ) from error


def execute(
    snapshot: Snapshot, previous: _arrays.write.Previous | None = None
) -> Written:
    """Writes a snapshot and commits it, durably, as the only process.

    Args:
        snapshot: What to write.
        previous: Arrays of an earlier step; those that are equal are linked.

    Raises:
        SaveFailedError: It could not be written. What was written is removed, or,
            after the disk did not confirm its name, told of.
    """
    with alone(snapshot.final), made(snapshot) as temporary:
        contents, files = fill(snapshot, temporary, previous)
        return finish(snapshot, temporary, contents, files)


@contextlib.contextmanager
def made(snapshot: Snapshot) -> Iterator[Path]:
    """The directory to write to; what is left of it at the end is removed."""
    final = snapshot.final
    _storage.local.make_directory(final.parent)
    with _storage.of(final).new_checkpoint(
        final,
        overwrite=snapshot.options.overwrite,
        keep=lambda name: name == _steps.markers.PIN,
        check=checkpoint_overwrite.check_replaceable,
    ) as temporary:
        (temporary / _native.checkpoint.STATE).mkdir()
        yield temporary


def fill(
    snapshot: Snapshot, temporary: Path, previous: _arrays.write.Previous | None
) -> tuple[_native.checkpoint.Contents, dict[str, bytes]]:
    """Writes all that this process has but the manifest, and describes it.

    Returns:
        The contents, and the files beside the arrays.
    """
    contents = _contents(snapshot)
    files: dict[str, bytes] = {}

    @_util.gc_pause.paused()
    def describe() -> None:
        files.update(_native.checkpoint.files(contents))
        write_new(temporary, files)

    with _util.threads.beside(describe) as check:
        root = temporary / _native.checkpoint.STATE
        write_arrays(snapshot, root, previous, check)
    return contents, files


def write_arrays(
    snapshot: Snapshot,
    root: Path,
    previous: _arrays.write.Previous | None,
    check: Callable[[], object],
) -> None:
    """Writes the arrays of this process; `check` may end that."""
    together = snapshot.options.together

    def count(size: int) -> None:
        check()
        snapshot.options.count(size)

    _arrays.write.write(
        root,
        snapshot.arrays,
        encoding=snapshot.encoding,
        ocdbt=snapshot.ocdbt,
        previous=previous,
        max_concurrent_bytes=snapshot.options.max_concurrent_bytes,
        count=count,
        writer=None if together is None else together.index,
    )


def finish(
    snapshot: Snapshot,
    temporary: Path,
    contents: _native.checkpoint.Contents,
    files: Mapping[str, bytes],
    digests: Mapping[str, str] | None = None,
) -> Written:
    """Seals what was written, and gives it its name.

    Args:
        snapshot: What was written.
        temporary: Where.
        contents: Its description.
        files: What lies beside the arrays, by name.
        digests: Of such files that others have written.
    """
    sealed = _native.checkpoint.seal(contents, files, temporary, digests or {})
    marker = sealed.pop(_native.checkpoint.COMMITTED)
    write_new(temporary, sealed)
    is_temporary = snapshot.options.temporary
    marks = _steps.markers.of_new(snapshot.final, temporary=is_temporary)
    write_new(temporary, {**marks, **snapshot.options.marks})
    manifest = _storage.local.stamp(temporary / _native.orbax_json.MANIFEST)
    publish = functools.partial(name, overwrite=snapshot.options.overwrite)
    size = _storage.of(temporary).commit(temporary, snapshot.final, marker, publish)
    stamp = manifest._replace(path=snapshot.final / _native.orbax_json.MANIFEST)
    return Written(size, for_next(snapshot, stamp))


def name(temporary: Path, final: Path, *, overwrite: bool) -> None:
    """Gives a finished directory its name, durably."""
    if overwrite and final.exists():
        # Somebody may have put files there since the save began.
        checkpoint_overwrite.check_replaceable(final)
        aside = _storage.temporary.beside(final, _storage.temporary.REPLACED)
        with _storage.temporary.claimed(final):
            _storage.rename.exchange(temporary, final, aside)
    else:
        _storage.rename.publish(temporary, final)


def for_next(snapshot: Snapshot, stamp: _storage.local.Stamp) -> _arrays.write.Previous:
    """What the save after this one may link."""
    sources = {
        array.name: (array.source, array.dtype)
        for array in snapshot.arrays
        if array.source is not None
    }
    return _arrays.write.Previous(
        snapshot.final / _native.checkpoint.STATE, sources, stamp
    )


def metadata_files(snapshot: Snapshot) -> dict[str, bytes]:
    """All files of a checkpoint but its arrays, as if those had no digests."""
    contents = _contents(snapshot)
    made = _native.checkpoint.files(contents)
    return made | _native.checkpoint.seal(contents, made, snapshot.final)


def _contents(snapshot: Snapshot) -> _native.checkpoint.Contents:
    options = snapshot.options
    return _native.checkpoint.Contents(
        options.step,
        snapshot.infos,
        snapshot.structure,
        snapshot.strings,
        snapshot.ocdbt,
        snapshot.encoding,
        options.metrics,
        options.metadata,
        snapshot.dataset,
        snapshot.created,
        time.time(),
        versions(),
        options.lineage,
        _transforms.describe(options.transforms),
    )


def write_new(root: Path, files: Mapping[str, bytes]) -> None:
    """Writes new files, each synced; their directories are not yet."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _storage.local.write(path, content)


@functools.cache
def versions() -> dict[str, str]:
    found = {"jax": jax.__version__}
    for name in ("flaxckpt", "flax", "optax", "tensorstore"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found
