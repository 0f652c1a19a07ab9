"""What several processes do together succeeds for all of them, or fails for all.

Nothing here goes through a device: see `_distributed.operation`.
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
    """Begins what all processes do; None if there is only one.

    On the thread that trains, in the same order in all processes.

    Raises:
        OptionError: The directory is one that each process has for itself.
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
    """Those that work with one directory; perhaps this one alone.

    Args:
        directory: All that they do together is about it.
        timeout_secs: How long one waits for others that are behind.
    """

    def __init__(self, directory: Path, timeout_secs: float) -> None:
        self._directory = directory
        self._timeout_secs = timeout_secs

    def begin(self, kind: str, what: str) -> Operation | None:
        """Begins what all of them do; see `begin`."""
        text = f"{what} of {self._directory}"
        return begin(kind, self._directory, text, self._timeout_secs)


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
    """Tells the others if this process fails within; then the operation ends."""
    with telling(together, saving=saving):
        yield
    if together is not None:
        together.close()


def not_saved(together: Operation, apart: ApartError) -> errors.CheckpointError:
    """The error of a save that some process has failed in."""
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
