"""What processes tell each other: run by all of a group, whatever carries it.

Also the groups of threads, which stand in for processes and have a directory for texts.
"""

import time
from pathlib import Path

import pytest

from flaxckpt._distributed.key_value import FileStore
from flaxckpt._distributed.messages import LATE, ApartError
from flaxckpt._distributed.operation import ProcessGroup

WORK = Path("/a/run")

__all__ = [
    "LATE",
    "WORK",
    "ApartError",
    "begin",
    "exercise",
    "open_group",
    "open_store",
]


def open_store(directory):
    """Returns the texts in a directory."""
    return FileStore(directory)


def open_group(directory, count):
    """Returns the same group as each of its processes has it."""
    return [ProcessGroup(FileStore(directory), index, count) for index in range(count)]


def begin(group, kind="trial", timeout_secs=60.0):
    return group.begin(kind, WORK, "step 7", timeout_secs=timeout_secs)


def exercise(group):
    """All of it, one after another: what failed leaves nothing behind."""
    for _ in range(3):
        _exchange(group)
        _fail(group)
    _first_fails(group)
    _stop_early(group)
    _exchange(group)
    _late(group)


def _exchange(group):
    with begin(group) as operation:
        for stage in ("one", "two"):
            told = operation.exchange(stage, f"{stage} {group.index}")
            assert told == [f"{stage} {i}" for i in range(group.count)]
        assert operation.first("three", lambda: f"by {group.index}") == "by 0"


def _fail(group):
    """The last one fails; all know who and why, and know the same."""
    operation = begin(group)
    if group.index == group.count - 1:
        operation.fail(OSError(28, "no room"))
        apart = operation.outcome()
    else:
        with pytest.raises(ApartError) as raised:
            operation.exchange("one")
        apart = raised.value
    operation.close()
    [failure] = apart.failures
    assert failure.process == group.count - 1
    assert (failure.kind, failure.text) == ("OSError", "[Errno 28] no room")


def _first_fails(group):
    operation = begin(group)
    with pytest.raises((ApartError, ZeroDivisionError)), operation:
        operation.first("one", lambda: str(1 / 0))
    if group.index:
        [failure] = operation.outcome().failures
        assert (failure.process, failure.kind) == (0, "ZeroDivisionError")
        assert failure.text == "ZeroDivisionError: division by zero"


def _stop_early(group):
    """Whoever works on is stopped when another one has failed."""
    operation = begin(group)
    if group.index == group.count - 1:
        operation.fail(ValueError("it is over"))
    else:
        with pytest.raises(ApartError) as raised, operation:
            _work(operation)
        assert "it is over" in str(raised.value)
    assert "it is over" in str(operation.outcome())
    operation.close()


def _work(operation):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        operation.check()
        time.sleep(0.01)


def _late(group):
    """The second one does not come, and the others after it are not blamed."""
    operation = begin(group, "late", timeout_secs=2)
    if group.index == 1:
        assert "has not reached 'one' of step 7" in str(operation.outcome())
    else:
        with pytest.raises(ApartError) as raised:
            operation.exchange("one")
        [failure] = raised.value.failures
        assert (failure.process, failure.kind) == (1, "late")
        assert "has not reached 'one' of step 7 after" in failure.text
    operation.close()
