"""Python's garbage collector, out of the way while a state is planned.

Planning makes some ten objects for each leaf and keeps them all. The collector is set
off by their number, again and again, and would each time look at all of them and at
everything else in the process, to find nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Starts no collection in the process until the block ends.

    For blocks that only compute and end soon: other threads' garbage waits meanwhile.
    If the collector is off already, it is left alone.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
