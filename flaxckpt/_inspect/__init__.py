"""Inspects checkpoints: listings, differences, statistics, diagnoses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._inspect import (
        abstract_file,
        best_step,
        dataset_positions,
        diff,
        doctor,
        history,
        leaf_statistics,
        listing,
        plan_damage,
        replay,
        restore_call,
        run_search,
        run_view,
        simulate,
        subtrees,
    )

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__)
