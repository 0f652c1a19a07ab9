"""Which process this is, among how many."""

from __future__ import annotations

import jax


def process_index() -> int:
    """This process's number, from 0."""
    return int(jax.process_index())


def process_count() -> int:
    """How many processes run together."""
    return int(jax.process_count())


def is_first() -> bool:
    """Whether this is process 0. Where there is only one, no backend is started."""
    return not jax.distributed.is_initialized() or process_index() == 0
