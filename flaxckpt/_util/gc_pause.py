"""Pauses Python's garbage collector while a state is planned.

Planning creates about ten objects per leaf, and keeps them all: the collector would run
again and again, and find nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

_pauses: list[None] = []
"""One entry for each active block that disabled the collector."""


@contextlib.contextmanager
def pause() -> Iterator[None]:
    """Pauses the process's garbage collector in a block, which must be short."""
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
    """Ends the pauses of the parent's other threads in a forked child."""
    if _pauses:
        gc.enable()


os.register_at_fork(after_in_child=_resume_in_child)
