"""Known damage of a checkpoint, where a restore would read it, and elsewhere."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _checkpoint, _storage, errors
from flaxckpt._checkpoint.plan import RestorePlan
from flaxckpt._inspect import run_view
from flaxckpt._types import LeafPath
from flaxckpt.formats import _locate


class PlanDamage(NamedTuple):
    """Known damage of the checkpoint of a plan.

    Attributes:
        reason: The damage.
        is_read: True if the restore would read the damaged files. False if it would
            not, as far as is known.
    """

    reason: str
    is_read: bool


def find(plan: RestorePlan) -> PlanDamage | None:
    """Returns the known damage of a plan's checkpoint, or None.

    Known is the reason in the marker of a damaged step, and what the names and sizes
    of files say: no array is read.
    """
    path = _storage.paths.from_text(plan.path)
    leaves = {
        source
        for leaf in plan.leaves.values()
        if leaf.wanted is not None
        for source in leaf.sources
    }
    marked = run_view.find_damage(path, None)
    if marked is not None and not _is_elsewhere(path, marked, leaves):
        return PlanDamage(marked, is_read=True)
    lost = run_view.find_lost_files(path, None)
    if lost is not None:
        lost_here = run_view.find_lost_files(path, None, leaves)
        return PlanDamage(lost_here or lost, is_read=lost_here is not None)
    return None if marked is None else PlanDamage(marked, is_read=False)


def _is_elsewhere(path: Path, reason: str, leaves: Set[LeafPath]) -> bool:
    """Returns True if the marker of a step names only leaves that are not in `leaves`.

    Its reason begins with the path of a damaged leaf, or the name of its file.
    """
    name, colon, _ = reason.partition(": ")
    try:
        stored = _locate.read_without_classes(path)
    except (errors.CheckpointError, OSError):
        return False
    damaged = [name] if name in stored.table else []
    damaged = damaged or _checkpoint.verify_arrays.leaves_in(name, stored)
    return bool(colon and damaged) and leaves.isdisjoint(damaged)
