"""Progress of long operations, in bytes or steps, with a bar after some seconds.

A separate thread draws it, on a terminal: the operation itself only counts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from flaxckpt._util import forks, job

_log = logging.getLogger(__name__)

_DELAY_SECS = 2.0
"""Shorter operations show no bar."""

_REFRESH_SECS = 0.1

_JOIN_SECS = 2.0
"""A paused terminal (Ctrl-S) delays only the bar."""

_showing = forks.PerProcess(threading.Lock)
"""Held by the thread that draws: only one bar is shown at a time."""


class Counter:
    """Counts the bytes or steps of an operation; thread-safe.

    `what` is the operation, for people: `saving step 3`. The expected `total` is 0
    while unknown.
    """

    def __init__(self, what: str, *, of_bytes: bool = True, total: int = 0) -> None:
        self.what = what
        self.of_bytes = of_bytes
        self.total = total
        self.done = 0
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self.done += size

    def set(self, done: int, total: int) -> None:
        self.done, self.total = done, total


Count: TypeAlias = Callable[[int], object]
"""A function that is called with each finished amount."""


def ignore(size: int) -> None:
    """Counts nothing."""


_open = threading.local()
"""Its attribute `bar` is True in a thread with an open bar."""


@contextlib.contextmanager
def bar(counter: Counter) -> Iterator[None]:
    """Shows a progress bar to a person; of nested blocks, only the outermost."""
    if getattr(_open, "bar", False) or not _is_watched():
        yield
        return
    _open.bar = True
    try:
        with _bar(counter):
            yield
    finally:
        _open.bar = False


@contextlib.contextmanager
def _bar(counter: Counter) -> Iterator[None]:
    ended = threading.Event()
    painter = threading.Thread(
        target=_show, args=(counter, ended), name="flaxckpt progress", daemon=True
    )
    try:
        with contextlib.suppress(RuntimeError):  # Python is exiting, or out of threads
            painter.start()
        yield
    finally:
        ended.set()
        if painter.ident is not None:
            painter.join(_JOIN_SECS)


def _is_watched() -> bool:
    """Returns True if this process runs in the foreground of a terminal on stderr."""
    if os.environ.get("FLAXCKPT_PROGRESS") == "0":
        return False
    try:
        in_front = os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except (AttributeError, ValueError, OSError):  # none, closed, or no terminal
        return False
    return in_front and job.is_first()


def _show(counter: Counter, ended: threading.Event) -> None:
    showing = _showing.get()
    if ended.wait(_DELAY_SECS) or not showing.acquire(blocking=False):
        return
    try:
        _draw(counter, ended)
    except Exception:  # such as a closed terminal
        _log.debug("no progress is shown", exc_info=True)
    finally:
        showing.release()


def _draw(counter: Counter, ended: threading.Event) -> None:
    import rich.console
    import rich.progress
    import rich.table

    class Console(rich.console.Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False  # a hidden cursor would stay hidden after a kill

    console = Console(file=sys.stderr)
    if console.is_dumb_terminal or not console.is_interactive:
        return
    whole = rich.table.Column(no_wrap=True)  # only the bar is shortened
    amounts: tuple[rich.progress.ProgressColumn, ...] = (
        rich.progress.MofNCompleteColumn(table_column=whole),
    )
    if counter.of_bytes:
        amounts = (
            rich.progress.DownloadColumn(table_column=whole),
            rich.progress.TransferSpeedColumn(table_column=whole),
        )
    columns = (
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        *amounts,
        rich.progress.TimeRemainingColumn(table_column=whole),
    )
    with rich.progress.Progress(
        *columns,
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        task = bar.add_task(**_state(counter, console.width))
        while not ended.wait(_REFRESH_SECS):
            bar.update(task, refresh=True, **_state(counter, console.width))


_AMOUNTS_WIDTH = 48
"""Columns of a terminal for a short bar, the amounts and the time."""


def _state(counter: Counter, width: int) -> dict[str, Any]:
    done, total = counter.done, counter.total
    # All bytes are counted, but files are not yet flushed to the disk.
    rest = ", finishing" if done >= total > 0 and counter.of_bytes else ""
    room = max(20, width - _AMOUNTS_WIDTH) - len(rest)
    what = counter.what
    if len(what) > room:  # the end of a path tells more than its beginning
        verb, _, _ = what.partition(" ")
        what = f"{verb} …{what[-max(1, room - len(verb) - 2) :]}"
    return {"description": what + rest, "completed": done, "total": total or None}
