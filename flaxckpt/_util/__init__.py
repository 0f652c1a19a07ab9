"""Helpers independent of checkpoints: threads, memory, arguments, progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._util import (
        arguments,
        card,
        columns,
        folding,
        forks,
        gc_pause,
        guessed_names,
        html,
        humanize,
        job,
        json_limits,
        memory,
        pace,
        processes,
        progress,
        threads,
    )

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__)
