"""Which process this is, among how many, and what they agree on."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils


def process_index() -> int:
    """This process's number, from 0."""
    return int(jax.process_index())


def process_count() -> int:
    """How many processes run together."""
    return int(jax.process_count())


def is_first() -> bool:
    """Whether this is process 0. Where there is only one, no backend is started."""
    return not jax.distributed.is_initialized() or process_index() == 0


def gather_flags(flags: Sequence[bool]) -> list[list[bool]]:
    """The flags of every process, the first process's first.

    All processes call it at the same place of the program: it is a collective of the
    devices.
    """
    if process_count() == 1:
        return [list(flags)]
    gathered = multihost_utils.process_allgather(np.array(flags, np.uint8))
    return [[bool(flag) for flag in row] for row in np.asarray(gathered)]


def has_preemption_service() -> bool:
    """Whether jax itself tells all processes of preemptions."""
    try:
        from jax._src import distributed  # no public way to ask

        return distributed.global_state.preemption_sync_manager is not None
    except (ImportError, AttributeError):
        return False


def reached_preemption(step: int) -> bool:
    """Whether jax's preemption service wants all processes to save at `step`."""
    if not has_preemption_service():
        return False
    return bool(multihost_utils.reached_preemption_sync_point(step))
