"""Joint operations of several processes succeed or fail for all of them.

Messages never go through devices: see `_distributed.operation`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from flaxckpt import _util, errors
from flaxckpt._distributed import messages
from flaxckpt._distributed.messages import ApartError
from flaxckpt._distributed.operation import TIMEOUT_SECS, Operation, find_group

T = TypeVar("T")

MakeError: TypeAlias = Callable[[Operation, ApartError], errors.CheckpointError]


def begin(
    kind: str, directory: Path, what: str, timeout_secs: float = TIMEOUT_SECS
) -> Operation | None:
    """Begins a joint operation of all processes; returns None for a single process.

    Call it on the training thread, in the same order in all processes.

    Raises:
        OptionError: The processes do not share the directory.
    """
    group = find_group(directory)
    if group is None:
        return None
    if str(directory).startswith("memory://"):
        raise errors.OptionError(
            f"{directory}: each process has its own memory://; several processes must"
            " use a directory or a store that all of them can access"
        )
    return group.begin(kind, directory, what, timeout_secs=timeout_secs)


class Processes:
    """The processes working with a directory; `timeout_secs` is to wait for others."""

    def __init__(self, directory: Path, timeout_secs: float) -> None:
        self._directory = directory
        self._timeout_secs = timeout_secs

    def begin(self, kind: str, what: str) -> Operation | None:
        """Begins a joint operation; see `begin`."""
        text = f"{what} of {self._directory}"
        return begin(kind, self._directory, text, self._timeout_secs)

    def call(self, kind: str, what: str) -> Operation:
        """Begins an operation, as process 0, that the others `join` when they look."""
        group, text = find_group(self._directory), f"{what} of {self._directory}"
        assert group is not None, text
        return group.call(kind, self._directory, text, timeout_secs=self._timeout_secs)

    def join(self, kind: str) -> Operation | None:
        """Returns the operation that process 0 has called; None without a new one."""
        group = find_group(self._directory)
        if group is None:
            return None
        return group.join(kind, self._directory, timeout_secs=self._timeout_secs)

    def listen(self, kind: str) -> Callable[[], None]:
        """Begins to answer calls of a kind; see `ProcessGroup.listen`."""
        group = find_group(self._directory)
        assert group is not None, kind
        return group.listen(kind, self._directory)

    def are_several(self) -> bool:
        return _util.job.is_distributed()


@contextlib.contextmanager
def report_failure(
    operation: Operation | None, make_error: MakeError | None = None
) -> Iterator[None]:
    """Reports a failure of the block to the other processes and raises the error.

    `make_error` returns the error if another process has failed; by default
    `save_error`.

    Raises:
        CheckpointError: Another process has failed.
    """
    try:
        yield
    except ApartError as apart:
        assert operation is not None
        _give_up(operation, apart)
        raise (make_error or save_error)(operation, apart) from None
    except BaseException as error:
        if operation is not None:
            _give_up(operation, error)
        raise


def _give_up(operation: Operation, error: BaseException) -> None:
    operation.fail(error)
    operation.close()


@contextlib.contextmanager
def closing(
    operation: Operation | None, make_error: MakeError | None = None
) -> Iterator[None]:
    """Reports a failure of the block to the other processes; ends the operation."""
    with report_failure(operation, make_error):
        yield
    if operation is not None:
        operation.close()


def save_error(operation: Operation, apart: ApartError) -> errors.CheckpointError:
    """Returns the error of a save after the failure of a process."""
    for kind in (errors.CheckpointExistsError, errors.SaveCancelledError):
        if all(failure.kind == kind.__name__ for failure in apart.failures):
            return kind(apart.failures[0].text)
    return errors.SaveFailedError(
        f"{operation.what} could not be saved by all {operation.count} processes:\n"
        + errors.rows(map(str, apart.failures))
        + "\nUnless it was already committed, nothing of it is kept; earlier"
        " checkpoints are untouched. Find out why these processes failed, then save"
        " again."
    )


def _background_error(
    operation: Operation, apart: ApartError
) -> errors.CheckpointError:
    """Returns the error of copies or uploads after the failure of a process."""
    late = errors.CheckpointTimeoutError
    if all(failure.kind == late.__name__ for failure in apart.failures):
        return late("\n".join(failure.text for failure in apart.failures))
    return errors.SaveFailedError(
        f"{operation.what} failed at some of the {operation.count} processes:\n"
        + errors.rows(map(str, apart.failures))
        + "\nThe steps stay where they are. Find out why these processes failed, then"
        " try again."
    )


def closing_background(
    operation: Operation | None,
) -> contextlib.AbstractContextManager[None]:
    """Closes the operation of copies or uploads, and shares an error of the block."""
    return closing(operation, _background_error)


# ---- restoring ---------------------------------------------------------------------


def broadcast(
    operation: Operation | None,
    stage: str,
    compute: Callable[[], Any],
    *,
    is_patient: bool = False,
) -> Any:
    """Returns `compute()` of process 0, as JSON; see `Operation.first`."""
    if operation is None:
        return compute()
    return operation.first(stage, compute, is_patient=is_patient)


def check_same_tier(operation: Operation | None, has_staging: bool) -> None:
    """Raises OptionError if only this process, or only process 0, has `staging`."""
    if operation is None:
        return
    of_first = operation.first("staging", lambda: has_staging)
    if of_first != has_staging:
        raise _tier_error({0: of_first, operation.index: has_staging})


def _tier_error(tiers: Mapping[int, bool]) -> errors.OptionError:
    names = {True: "has staging", False: "has none"}
    return errors.OptionError(
        "all processes must pass staging=, or none of them, but\n"
        + errors.rows(f"process {n}: {names[has_it]}" for n, has_it in tiers.items())
    )


def check_same_request(
    operation: Operation | None, what: str, has_staging: bool
) -> None:
    """Checks that all processes make the same request, of the same tier.

    Raises OptionError if they differ.
    """
    if operation is None:
        return
    rows = operation.exchange("asked", [what, has_staging])
    requests, tiers = zip(*rows, strict=True)
    if len({*tiers}) > 1:
        raise _tier_error(dict(enumerate(tiers)))
    if len({*requests}) > 1:
        named = [f"process {i}: {request}" for i, request in enumerate(requests)]
        raise errors.OptionError(
            "all processes must restore the same step, but they requested\n"
            + errors.rows(named)
        )


def attempt(
    operation: Operation | None, work: Callable[[Callable[[], object]], T]
) -> T:
    """Runs `work` on all processes, and fails on all if it fails on any.

    `work` must call its argument after reading everything, before the first device
    collective. Raises the error of this process, or CheckpointError with those of
    others.
    """
    if operation is None:
        return work(lambda: None)
    with contextlib.closing(operation):
        try:
            result = work(lambda: operation.exchange("read"))
            operation.exchange("restored")
            return result
        except ApartError as apart:
            operation.fail(apart)
            raise restore_error(operation, apart) from None
        except Exception as error:
            operation.fail(error)
            raise _shared_error(operation, error, operation.outcome()) from error
        except BaseException as error:
            operation.fail(error)
            raise


def _shared_error(
    operation: Operation, error: Exception, apart: ApartError
) -> Exception:
    """Returns this process's own error if all processes failed alike."""
    common = restore_error(operation, apart)
    damage = errors.DamagedCheckpointError
    is_alike = isinstance(error, damage) is isinstance(common, damage)
    return error if is_alike else common


def restore_error(operation: Operation, apart: ApartError) -> errors.CheckpointError:
    text = (
        f"{operation.what} could not be restored by all {operation.count} processes:\n"
        + errors.rows(map(str, apart.failures))
    )
    damage = errors.DamagedCheckpointError.__name__
    if all(failure.kind == damage for failure in apart.failures):
        return errors.DamagedCheckpointError(f"{text}\nRestore another step.")
    if any(failure.kind == messages.LATE for failure in apart.failures):
        return errors.CheckpointTimeoutError(
            f"{text}\nFind out why these processes ended, then restart the job."
        )
    for kind in (errors.CheckpointNotFoundError, errors.DatasetStateError):
        if all(failure.kind == kind.__name__ for failure in apart.failures):
            return kind(text)
    return errors.CheckpointError(text)
