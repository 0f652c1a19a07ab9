"""The checkpoints of a run: `Checkpointer`, retention, staging, metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._run import (
        checkpointer,
        damage,
        disk_usage,
        events,
        judge,
        metrics,
        restoring,
        retention,
        run_index,
        run_steps,
        sample_log,
        session,
        settings,
        tiers,
    )

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__)
