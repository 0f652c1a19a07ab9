"""What several processes of a job save and restore together.

Each writes the chunks that its devices hold; process 0 makes the directory, describes
the whole, and commits it when all have told that theirs is durable. Nothing here goes
through a device: see `_together`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding

from flaxckpt import (
    _commit,
    _ocdbt,
    _raw_chunks,
    _remote,
    _snapshot,
    _storage,
    _threads,
    _together,
    _write,
    datasets,
    errors,
)
from flaxckpt._commit import Snapshot, Written
from flaxckpt._info import Leaf, LeafInfo
from flaxckpt._together import ApartError, Failure, Operation
from flaxckpt._types import Shape
from flaxckpt.formats import _orbax, _orbax_json

T = TypeVar("T")
Named = tuple[str, Shape, Leaf]
"""A leaf with its name on disk and its chunk shape."""

_SYNCING_THREADS = 8


def begin(
    kind: str, directory: Path, what: str, timeout_secs: float = _together.TIMEOUT_SECS
) -> Operation | None:
    """Begins what all processes do; None if there is only one.

    On the thread that trains, in the same order in all processes.

    Raises:
        OptionError: The directory is one that each process has for itself.
    """
    group = _together.group(directory)
    if group is None:
        return None
    if str(directory).startswith("memory://"):
        raise errors.OptionError(
            f"{directory}: each process has a memory of its own; several processes"
            " save to a directory or a store that all of them see"
        )
    return group.begin(kind, directory, what, timeout_secs=timeout_secs)


@contextlib.contextmanager
def telling(together: Operation | None, *, saving: bool = True) -> Iterator[None]:
    """Tells the others if this process fails within, and goes no further.

    Raises:
        CheckpointError: Another one has failed.
    """
    try:
        yield
    except ApartError as apart:
        assert together is not None
        _give_up(together, apart)
        failed = _not_saved if saving else _not_restored
        raise failed(together, apart) from None
    except BaseException as error:
        if together is not None:
            _give_up(together, error)
        raise


def _give_up(together: Operation, error: BaseException) -> None:
    together.fail(error)
    together.close()


@contextlib.contextmanager
def ending(together: Operation | None, *, saving: bool = True) -> Iterator[None]:
    """Tells the others if this process fails within; then the operation ends."""
    with telling(together, saving=saving):
        yield
    if together is not None:
        together.close()


# ---- saving ------------------------------------------------------------------------


def own(
    together: Operation, infos: Sequence[LeafInfo], arrays: Sequence[Named]
) -> list[Named]:
    """The arrays of which this process may write something.

    Process 0 writes what every process has for itself: numpy arrays, numbers, and jax
    arrays on each one's own devices. So it tells which arrays it has nothing of. It
    also tells what it saves, which must be what the others save.

    Raises:
        SaveFailedError: This process saves another step, or another tree.
    """
    mine = [leaf for leaf in arrays if together.is_first or _is_on_devices(leaf)]
    marks = [_mark(info) for info in infos]

    def begun() -> str:
        elsewhere = [leaf[0] for leaf in mine if not _is_here(leaf)]
        each = marks if len(marks) <= _MARKS_TOLD else None
        return json.dumps([together.what, elsewhere, _all_of(marks), each])

    what, elsewhere, whole, each = json.loads(together.first("begun", begun))
    if together.is_first:
        return mine
    if what != together.what:
        raise errors.SaveFailedError(
            f"process {together.index} saves {together.what}, and process 0 {what}: all"
            " processes must save the same steps, in the same order"
        )
    if whole != _all_of(marks):
        raise _other_tree(together, infos, marks, each)
    absent = set(elsewhere)
    return [
        leaf
        for leaf in mine
        if _is_here(leaf) and (leaf[0] in absent or _is_of_several(leaf))
    ]


_MARKS_TOLD = 10_000
"""Leaves up to which each is told of, so that those that differ can be named."""


def _mark(info: LeafInfo) -> int:
    """What must be the same of a leaf in all processes, in a number."""
    is_shared = info.sharding is not None and _snapshot.is_of_several(info.sharding)
    spec = info.sharding.spec if isinstance(info.sharding, NamedSharding) else None
    text = (
        f"{info.path} {info.kind} {info.shape} {info.dtype} {info.chunk_shape}"
        f" {is_shared} {spec if is_shared else None}"
    )
    return zlib.crc32(text.encode(errors="surrogateescape"))


def _all_of(marks: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(marks).encode()).hexdigest()


def _other_tree(
    together: Operation,
    infos: Sequence[LeafInfo],
    marks: Sequence[int],
    theirs: Sequence[int] | None,
) -> errors.SaveFailedError:
    known = set(theirs or ())
    rows = [
        f"{info.path}: {info}"
        for info, mark in zip(infos, marks, strict=True)
        if theirs is not None and mark not in known
    ]
    return errors.SaveFailedError(
        f"the state of process {together.index} has other leaves, shapes, types or"
        f" shardings than that of process 0, in {together.what}"
        + (f"; of process {together.index}:\n{errors.rows(rows)}" if rows else "")
        + "\nAll processes must save the same tree."
    )


def _is_on_devices(leaf: Named) -> bool:
    return isinstance(leaf[2].source, jax.Array)


def _is_here(leaf: Named) -> bool:
    """Whether this process has some of a leaf."""
    value = leaf[2].source
    return not isinstance(value, jax.Array) or bool(value.sharding.addressable_devices)


def _is_of_several(leaf: Named) -> bool:
    value = leaf[2].source
    return isinstance(value, jax.Array) and not value.is_fully_addressable


def execute(
    snapshot: Snapshot, previous: _write.Previous | None, together: Operation
) -> Written:
    """Writes this process's part of a snapshot; process 0 commits it.

    Returns:
        What all have written, the same in all processes.

    Raises:
        SaveFailedError: Somebody could not write, or is gone; nothing is kept.
    """
    try:
        with _commit.alone(snapshot.final):
            if together.is_first:
                return _lead(snapshot, previous, together)
            return _follow(snapshot, previous, together)
    except ApartError as apart:
        raise _not_saved(together, apart) from apart.__cause__


def _lead(
    snapshot: Snapshot, previous: _write.Previous | None, together: Operation
) -> Written:
    with _commit.made(snapshot) as temporary:
        try:
            together.first("made", lambda: temporary.name)
            contents, files = _commit.fill(snapshot, temporary, previous)
            told = together.gather("written")
        except BaseException as error:
            # The others write there: it is removed when they have stopped.
            together.fail(error, stage="written")
            if isinstance(error, Exception):
                raise together.outcome() from error
            raise
        if snapshot.ocdbt:
            _ocdbt.merge(temporary / _orbax.STATE, together.count)
        digests = {n: d for each in told[1:] for n, d in json.loads(each).items()}
        written = _commit.finish(snapshot, temporary, contents, files, digests)
    together.first("committed", lambda: str(written.size))
    return written


def _follow(
    snapshot: Snapshot, previous: _write.Previous | None, together: Operation
) -> Written:
    try:
        temporary = snapshot.final.parent / together.first("made", str)
        digests = _write_part(snapshot, temporary, previous, together)
        together.tell("written", json.dumps(digests))
    except BaseException as error:
        together.fail(error)
        if isinstance(error, Exception):
            raise together.outcome() from error
        raise
    size = int(together.first("committed", str))
    manifest = _storage.stamp(snapshot.final / _orbax_json.MANIFEST)
    return Written(size, _commit.for_next(snapshot, manifest))


def _write_part(
    snapshot: Snapshot,
    temporary: Path,
    previous: _write.Previous | None,
    together: Operation,
) -> dict[str, str]:
    """Writes what this process has, durably.

    Returns:
        File -> digest, of the state of its dataset iterators.
    """
    root = temporary / _orbax.STATE
    _commit.write_arrays(snapshot, root, previous, together.check)
    files = {
        f"{_orbax.DATASET}/{name}": content
        for name, content in snapshot.dataset.items()
        if name != datasets.DESCRIPTION
    }
    _commit.write_new(temporary, files)
    if files:
        _storage.sync_directory(temporary / _orbax.DATASET)
    if snapshot.ocdbt:
        _storage.sync_tree(root / f"{_ocdbt.PART}{together.index}")
    else:
        _sync(root, snapshot)
    _storage.sync_directory(root)
    return {name: _storage.digest(content) for name, content in files.items()}


def _sync(root: Path, snapshot: Snapshot) -> None:
    """Syncs the files of arrays that this process has written; objects are durable."""
    if _remote.is_remote(root):
        return
    paths = [root / array.name for array in snapshot.arrays if array.shards]
    for array in snapshot.arrays:
        if _raw_chunks.is_raw(array, snapshot.encoding):
            paths += _raw_chunks.files_of(root, array)

    def sync(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    _threads.each(sync, paths, threads=_SYNCING_THREADS)


def _not_saved(together: Operation, apart: ApartError) -> errors.CheckpointError:
    if (exists := _as(apart, errors.CheckpointExistsError)) is not None:
        return exists
    return errors.SaveFailedError(
        f"{together.what} could not be saved by all {together.count} processes:\n"
        + errors.rows(map(str, apart.failures))
        + "\nNothing of it is kept and earlier checkpoints are untouched, unless it was"
        " committed already; see what became of these processes, then save again."
    )


def _as(apart: ApartError, kind: type[T]) -> T | None:
    """What all failures are; None if they are not all of one kind."""
    if any(failure.kind != kind.__name__ for failure in apart.failures):
        return None
    return kind(apart.failures[0].text)  # type: ignore[call-arg]


# ---- restoring ---------------------------------------------------------------------


def first_says(together: Operation | None, stage: str, say: Callable[[], Any]) -> Any:
    """What process 0 finds, as JSON, so that all go the same way."""
    if together is None:
        return say()
    return json.loads(together.first(stage, lambda: json.dumps(say())))


def check_asked(together: Operation | None, what: str) -> None:
    """Sees that all processes ask for the same.

    Raises:
        OptionError: They do not.
    """
    if together is None:
        return
    asked = together.exchange("asked", what)
    if len(set(asked)) > 1:
        rows = [f"process {i}: {each}" for i, each in enumerate(asked)]
        raise errors.OptionError(
            "all processes must restore the same step, and they ask for\n"
            + errors.rows(rows)
        )


def attempt(together: Operation | None, work: Callable[[Callable[[], object]], T]) -> T:
    """Does what all processes do, and fails if it fails for any of them.

    Args:
        together: What they do it by; None if there is only one.
        work: Does it. Calls what it is given when it has read all and waits for
            nobody, before it has devices work together.

    Raises:
        CheckpointError: Its own, or in one of ours what others have raised.
    """
    if together is None:
        return work(lambda: None)
    with contextlib.closing(together):
        try:
            result = work(lambda: together.exchange("read"))
            together.exchange("restored")
            return result
        except ApartError as apart:
            together.fail(apart)
            raise _not_restored(together, apart) from None
        except Exception as error:
            together.fail(error)
            raise _agreed(together, error, together.outcome()) from error
        except BaseException as error:
            together.fail(error)
            raise


def _agreed(together: Operation, error: Exception, apart: ApartError) -> Exception:
    """This process's own error, if the others go the same way with theirs."""
    common = _not_restored(together, apart)
    is_damage = isinstance(error, errors.DamagedCheckpointError)
    if is_damage is isinstance(common, errors.DamagedCheckpointError):
        return error
    return common


def _not_restored(together: Operation, apart: ApartError) -> errors.CheckpointError:
    text = (
        f"{together.what} could not be restored by all {together.count} processes:\n"
        + errors.rows(map(str, apart.failures))
    )
    damage = errors.DamagedCheckpointError.__name__
    if all(failure.kind == damage for failure in apart.failures):
        return errors.DamagedCheckpointError(f"{text}\nRestore another step.")
    if any(failure.kind == _together.LATE for failure in apart.failures):
        return errors.CheckpointTimeoutError(
            f"{text}\nSee what became of these processes, then start the job again."
        )
    kinds: Mapping[str, type[errors.CheckpointError]] = {
        kind.__name__: kind
        for kind in (errors.CheckpointNotFoundError, errors.DatasetStateError)
    }
    return kinds.get(_kind(apart.failures), errors.CheckpointError)(text)


def _kind(failures: Sequence[Failure]) -> str:
    return failures[0].kind if len({f.kind for f in failures}) == 1 else ""
