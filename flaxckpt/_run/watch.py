"""Iteration over new steps, each protected by a lease."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from flaxckpt import _formats, _steps, _storage, _util

_log = logging.getLogger(__name__)


def new_steps(
    listed: Callable[[], Mapping[int, Path]],
    *,
    timeout_secs: float | None,
    poll_secs: float,
) -> Iterator[int]:
    """Yields each step that `listed` returns, once; see `Checkpointer.new_steps`."""
    _util.arguments.check_timeout(timeout_secs)
    _util.arguments.check_not_negative("poll_secs", poll_secs)
    seen: set[int] = set()
    is_warned = False
    since = time.monotonic()
    while True:
        for step, path in listed().items():
            entry = _steps.index.Entry(step, path, _formats.recognises)
            if step in seen or not entry.is_step:
                continue
            lease: _storage.leases.Lease | None = None
            try:
                lease = _storage.leases.Lease(path)
            except FileNotFoundError:
                continue  # just deleted
            except OSError as error:
                if not is_warned:
                    _log.warning(
                        "steps may be deleted while they are read, because no lease can"
                        " be written: %s",
                        error,
                    )
                is_warned = True
            try:
                again = _steps.index.Entry(step, path, _formats.recognises)
                if _storage.leases.is_being_deleted(path) or not again.is_step:
                    continue  # yielded later if not deleted
                seen.add(step)
                yield step
            finally:
                if lease is not None:
                    lease.release()
            since = time.monotonic()
        if timeout_secs is not None and time.monotonic() - since >= timeout_secs:
            return
        time.sleep(poll_secs)
