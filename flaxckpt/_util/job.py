"""Whether this process is one of several, asked without importing jax or a backend."""

from __future__ import annotations

import sys

from flaxckpt import _util


def is_first() -> bool:
    """Returns True in process 0, without starting a backend in a single process."""
    return not _has_joined() or _util.processes.process_index() == 0


def is_distributed() -> bool:
    """Returns True in a multi-process job; starts no backend otherwise."""
    return _has_joined() and _util.processes.process_count() > 1


def _has_joined() -> bool:
    return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()
