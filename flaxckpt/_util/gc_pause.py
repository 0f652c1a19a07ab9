"""Python's garbage collector, out of the way while a state is planned.

Planning makes some ten objects for each leaf and keeps them all. The collector is set
off by their number, again and again, and would each time look at all of them and at
everything else in the process, to find nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

_pauses: list[None] = []
"""One for each block that has switched the collector off."""


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Starts no collection in the process until the block ends.

    For blocks that only compute and end soon: other threads' garbage waits meanwhile.
    If the collector is off already, it is left alone.
    """
    if not gc.isenabled():
        yield
        return
    _pauses.append(None)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        _pauses.pop()


def _resume_in_child() -> None:
    """Ends, in a fork, the pauses of threads that are not there."""
    if _pauses:
        gc.enable()


os.register_at_fork(after_in_child=_resume_in_child)
