"""Joint operations of several processes succeed or fail for all of them.

Messages never go through devices: see `_distributed.operation`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from flaxckpt import errors
from flaxckpt._distributed import messages, operation
from flaxckpt._distributed.messages import ApartError, Failure
from flaxckpt._distributed.operation import Operation

T = TypeVar("T")


def begin(
    kind: str, directory: Path, what: str, timeout_secs: float = operation.TIMEOUT_SECS
) -> Operation | None:
    """Begins a joint operation of all processes; returns None for a single process.

    Call it on the training thread, in the same order in all processes.

    Raises:
        OptionError: The processes do not share the directory.
    """
    group = operation.group(directory)
    if group is None:
        return None
    if str(directory).startswith("memory://"):
        raise errors.OptionError(
            f"{directory}: each process has a memory of its own; several processes"
            " save to a directory or a store that all of them see"
        )
    return group.begin(kind, directory, what, timeout_secs=timeout_secs)


class Processes:
    """The processes working with a directory, possibly only this process.

    Args:
        directory: The directory of their joint operations.
        timeout_secs: Seconds to wait for late processes.
    """

    def __init__(self, directory: Path, timeout_secs: float) -> None:
        self._directory = directory
        self._timeout_secs = timeout_secs

    def begin(self, kind: str, what: str) -> Operation | None:
        """Begins a joint operation; see `begin`."""
        text = f"{what} of {self._directory}"
        return begin(kind, self._directory, text, self._timeout_secs)


@contextlib.contextmanager
def telling(together: Operation | None, *, saving: bool = True) -> Iterator[None]:
    """Reports a failure of the block to the other processes and raises the error.

    Raises:
        CheckpointError: Another process has failed.
    """
    try:
        yield
    except ApartError as apart:
        assert together is not None
        _give_up(together, apart)
        failed = not_saved if saving else _not_restored
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
    """Reports a failure of the block to the other processes; ends the operation."""
    with telling(together, saving=saving):
        yield
    if together is not None:
        together.close()


def not_saved(together: Operation, apart: ApartError) -> errors.CheckpointError:
    """Returns the error of a save after the failure of a process."""
    if (exists := _as(apart, errors.CheckpointExistsError)) is not None:
        return exists
    return errors.SaveFailedError(
        f"{together.what} could not be saved by all {together.count} processes:\n"
        + errors.rows(map(str, apart.failures))
        + "\nNothing of it is kept and earlier checkpoints are untouched, unless it was"
        " committed already; see what became of these processes, then save again."
    )


def _as(apart: ApartError, kind: type[T]) -> T | None:
    """Returns the common error of all failures; None for different kinds."""
    if any(failure.kind != kind.__name__ for failure in apart.failures):
        return None
    return kind(apart.failures[0].text)  # type: ignore[call-arg]


# ---- restoring ---------------------------------------------------------------------


def first_says(together: Operation | None, stage: str, say: Callable[[], Any]) -> Any:
    """Returns the result of `say` on process 0, as JSON, on all processes."""
    if together is None:
        return say()
    return json.loads(together.first(stage, lambda: json.dumps(say())))


def check_asked(together: Operation | None, what: str) -> None:
    """Checks that all processes make the same request.

    Raises:
        OptionError: The requests differ.
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
    """Runs `work` on all processes, and fails on all if it fails on any.

    Args:
        together: The joint operation; None for a single process.
        work: The work. Must call its argument after reading everything, before the
            first device collective.

    Raises:
        CheckpointError: The error of this process, or the errors of other processes.
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
    """Returns this process's own error if all processes failed alike."""
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
    if any(failure.kind == messages.LATE for failure in apart.failures):
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
