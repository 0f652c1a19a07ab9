"""Work side by side, on plain threads.

No pool: while Python exits, pools take no more work, and a save may then still be under
way. Where no thread can be started any more, the caller's own does all the work.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def each(function: Callable[[T], object], items: Iterable[T], *, threads: int) -> None:
    """Calls `function` once with every item, on up to `threads` threads.

    Raises:
        BaseException: The first that a call raised. Items that were not begun by then
            are left out; no call is running any more.
    """
    items = list(items)
    waiting = iter(items)
    lock = threading.Lock()
    raised: list[BaseException] = []

    def work() -> None:
        try:
            while not raised:
                with lock:
                    item = next(waiting, waiting)
                if item is waiting:
                    return
                function(item)  # type: ignore[arg-type]
        except BaseException as error:
            raised.append(error)

    wanted = min(threads, len(items)) - 1  # this thread works, too
    helpers = [helper for _ in range(wanted) if (helper := _start(work))]
    work()
    for helper in helpers:
        helper.join()
    if raised:
        raise raised[0]


@contextlib.contextmanager
def beside(function: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Runs `function` beside the `with` block, and waits for both.

    Yields:
        What the block may call to end at once if the function has failed.

    Raises:
        BaseException: What the block raised, else what the function raised.
    """
    raised: list[BaseException] = []

    def work() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    def check() -> None:
        if raised:
            raise raised[0]

    helper = _start(work)
    try:
        yield check
    finally:
        if helper is not None:
            helper.join()
    if helper is None:
        work()
    check()


def _start(work: Callable[[], None]) -> threading.Thread | None:
    thread = threading.Thread(target=work, name="flaxckpt", daemon=False)
    try:
        thread.start()
    except RuntimeError:  # Python is exiting, or the system has no more threads
        return None
    return thread


class Budget:
    """Bytes that may be held at one time, by all threads together."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = total
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Waits until `size` bytes are free and holds them during the `with` block.

        What is larger than the whole budget is let through alone.
        """
        size = min(size, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()
