"""Known damage of a checkpoint, where a restore would read it, and elsewhere."""

from __future__ import annotations

from typing import NamedTuple

from flaxckpt import _steps, _storage
from flaxckpt._checkpoint.plan import RestorePlan
from flaxckpt._inspect import run_view


class PlanDamage(NamedTuple):
    """Known damage of a plan's checkpoint, and whether the restore would read it."""

    reason: str
    is_read: bool


def find(plan: RestorePlan) -> PlanDamage | None:
    """Returns the known damage of a plan's checkpoint, or None; reads no array.

    A marker of damage without leaves counts for all of them.
    """
    path = _storage.paths.from_text(plan.path)
    leaves = {
        source
        for leaf in plan.leaves.values()
        if leaf.wanted is not None
        for source in leaf.sources
    }
    marked = run_view.find_marked_damage(path)
    damaged = None if marked is None else _steps.markers.damaged_leaves(path)
    if marked is not None and damaged is None:
        return PlanDamage(f"{marked} (the mark does not say of which leaves)", True)
    if marked is not None and damaged and not leaves.isdisjoint(damaged):
        return PlanDamage(marked, is_read=True)
    lost = run_view.find_lost_files(path, None)
    if lost is not None:
        lost_here = run_view.find_lost_files(path, None, leaves)
        return PlanDamage(lost_here or lost, is_read=lost_here is not None)
    return None if marked is None else PlanDamage(marked, is_read=False)
