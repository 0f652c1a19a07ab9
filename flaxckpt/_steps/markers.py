"""The marks of a step: small files that say what has become, or shall become, of it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _storage, errors

PIN = "PINNED"
"""A file of this name keeps its step, whatever the policies say; T5X's convention."""

UNTIL_NEXT = "TEMPORARY"
"""A file of this name lets its step go as soon as there is a newer one."""

WITHOUT_DATASET = "DATASET_LET_GO"
"""A file of this name says that the dataset's state was deleted on purpose."""

MEASURED = "MEASURED"
"""A file of this name says that metrics were added after the save."""

DAMAGED = "DAMAGED"
"""A file of this name takes its step out of the list, and has the reason in JSON."""

NOT_UPLOADED = "NOT_UPLOADED"
"""A file of this name keeps its step in the staging directory, and has JSON: the run's
directory has not got the step from there, or not its latest marks and metrics."""

_MARK = b"1\n"

_MAX_MARK_BYTES = 2**16
_MAX_REASON = 1000


class Marks(NamedTuple):
    """What the files beside its arrays say of a step.

    Attributes:
        pinned: It stays, whatever the policies say.
        temporary: It goes as soon as there is a newer step.
        has_dataset: There is a dataset's state.
        let_go: That was, or is to be, deleted on purpose.
        readers: Who reads it.
        waiting: It is in a staging directory, and still to be uploaded.
    """

    pinned: bool
    temporary: bool
    has_dataset: bool
    let_go: bool
    readers: tuple[str, ...]
    waiting: bool


def of(path: Path, names: Collection[str], *, dataset: str) -> Marks:
    """Returns the marks of the step at `path`.

    Args:
        path: Its directory.
        names: The names of what is directly in it.
        dataset: The name that the directory of a dataset's state has in it.
    """
    reading = [name for name in names if name.startswith(_storage.leases.READING)]
    return Marks(
        PIN in names,
        UNTIL_NEXT in names,
        dataset in names,
        WITHOUT_DATASET in names,
        tuple(map(_storage.leases.reader, _storage.leases.living(path, reading))),
        NOT_UPLOADED in names,
    )


def is_mark(name: str) -> bool:
    """Whether a file of this name only says how long its step stays."""
    return name in _MARKS_OF_STAYING or name.startswith(_storage.leases.READING)


def goes_along(name: str) -> bool:
    """Whether a mark of this name goes along with a copy of its step."""
    return name in (WITHOUT_DATASET, MEASURED)


_MARKS_OF_STAYING = frozenset(
    (
        PIN,
        UNTIL_NEXT,
        WITHOUT_DATASET,
        MEASURED,
        DAMAGED,
        NOT_UPLOADED,
        _storage.leases.DELETING,
    )
)


def of_new(final: Path, *, temporary: bool) -> dict[str, bytes]:
    """The marks of what is about to take the name `final`: file name -> content.

    A pin is of the name: what replaces a pinned step is pinned.
    """
    found = {UNTIL_NEXT: _MARK} if temporary else {}
    return found | ({PIN: _MARK} if is_pinned(final) else {})


def is_pinned(path: Path) -> bool:
    """Whether the step at `path` stays whatever the policies say."""
    return (path / PIN).is_file()


def is_temporary(path: Path) -> bool:
    """Whether the step at `path` goes as soon as there is a newer one."""
    return (path / UNTIL_NEXT).is_file()


def pin(path: Path) -> None:
    """Keeps the step at `path` until it is unpinned."""
    _storage.local.replace(path / PIN, _MARK)


def unpin(path: Path) -> None:
    """Leaves the step at `path` to the policies again."""
    _remove_mark(path, PIN)


def make_permanent(path: Path) -> None:
    """Has the step at `path` stay like others, when it was temporary."""
    _remove_mark(path, UNTIL_NEXT)


def let_dataset_go(path: Path) -> None:
    """Notes that the dataset's state of the step at `path` is deleted on purpose."""
    if not (path / WITHOUT_DATASET).is_file():
        _storage.local.replace(path / WITHOUT_DATASET, _MARK)


def is_measured(path: Path) -> bool:
    """Whether metrics were added to the step at `path` after its save."""
    return _storage.local.lexists(path / MEASURED)


def mark_measured(path: Path) -> None:
    """Notes that metrics were added to the step at `path`: they are there already."""
    if not is_measured(path):
        _storage.local.replace(path / MEASURED, _MARK)


def is_damaged(path: Path) -> bool:
    """Whether the step at `path` is marked as damaged."""
    return _storage.local.lexists(path / DAMAGED)


def mark_damaged(path: Path, reason: str) -> None:
    """Takes the step at `path` out of the list of steps, durably."""
    told = {"reason": reason[:_MAX_REASON], "time": time.time()}
    _storage.local.replace(path / DAMAGED, json.dumps(told).encode())


def unmark_damaged(path: Path) -> None:
    """Puts the step at `path` back into the list of steps."""
    _remove_mark(path, DAMAGED)


def why_damaged(path: Path) -> str:
    """What the mark of a damaged step says; it counts even if that is lost."""
    try:
        told = json.loads(
            _storage.local.read(path / DAMAGED, max_bytes=_MAX_MARK_BYTES)
        )
        return errors.printable(str(told["reason"])[:_MAX_REASON])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "its mark does not say why"


class Waiting(NamedTuple):
    """What the mark of a step says that is still to be uploaded.

    Attributes:
        overwrite: Whether it replaces what the directory has of its name.
        removed: Marks that were taken from it, which the directory may have still.
        change: Another one whenever something of the step has changed.
        settled: Whether the step had been uploaded, or left to staging, before its
            latest change. Another step of its number in the directory is newer then.
    """

    overwrite: bool = False
    removed: tuple[str, ...] = ()
    change: str = ""
    settled: bool = False

    def content(self) -> bytes:
        """Of the mark, as of a new change."""
        row = self._replace(change=secrets.token_hex(8))._asdict()
        return json.dumps(row).encode()


def waiting(path: Path) -> Waiting | None:
    """What is still to be uploaded of the step at `path`; None if nothing is."""
    try:
        found = json.loads(
            _storage.local.read(path / NOT_UPLOADED, max_bytes=_MAX_MARK_BYTES)
        )
        removed = tuple(map(str, found["removed"]))
        return Waiting(
            bool(found["overwrite"]),
            removed,
            str(found["change"]),
            bool(found.get("settled", False)),
        )
    except FileNotFoundError:
        return None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ):
        return Waiting()  # it counts even if what it says is lost


def is_waiting(path: Path) -> bool:
    """Whether the step at `path` is still to be uploaded."""
    return (path / NOT_UPLOADED).is_file()


def is_settled(path: Path) -> bool:
    """Whether the step at `path` has been uploaded, or left to staging, before."""
    mark = waiting(path)
    return mark is None or mark.settled


def wait_for_upload(path: Path, removed: Collection[str] = ()) -> None:
    """Marks the step at `path` as still to be uploaded, or as changed once more."""
    now = waiting(path) or Waiting(settled=True)
    both = tuple(sorted({*now.removed, *removed}))
    _storage.local.replace(path / NOT_UPLOADED, now._replace(removed=both).content())


def uploaded(path: Path) -> None:
    """Nothing of the step at `path` is still to be uploaded."""
    _remove_mark(path, NOT_UPLOADED)


def _remove_mark(path: Path, name: str) -> None:
    try:
        (path / name).unlink()
    except FileNotFoundError:
        return
    _storage.local.sync_directory(path)
