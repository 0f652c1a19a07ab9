"""Bytes that processes read to restore on another mesh, to those that they need.

Four processes with two devices each save on four meshes and restore on the other three.
Everything that a restore reads counts, also metadata, and all of it is verified.
"""

from __future__ import annotations

import collections

from benchmarks import reshard, several, timing
from benchmarks.samples import Rows, Sample, Series, Settings, Skip

CASE = "reshard"
_FIGURES = {
    "shard_axes": "12 changes of mesh, shard_axes",
    "default": "12 changes of mesh",
}


def run(settings: Settings) -> Rows:
    """Measures once, because the bytes hardly vary."""
    if not reshard.IO.exists():
        yield Skip(CASE, "all", f"this system has no {reshard.IO}")
        return
    with timing.scratch(settings.directory) as scratch:
        rows = several.run(
            reshard.__name__, reshard.PROCESSES, scratch, quick=settings.quick
        )
    for layout, figure in _FIGURES.items():
        read: collections.Counter[str] = collections.Counter()
        needed: collections.Counter[str] = collections.Counter()
        for row in rows:
            if row["layout"] == layout:
                read[row["change"]] += row["read"]
                needed[row["change"]] += row["needed"]
        ratios = [read[change] / needed[change] for change in needed]
        total = read.total() / needed.total()
        yield Sample(Series(CASE, f"{figure}: read", "flaxckpt"), total, "x")
        worst = Series(CASE, f"{figure}: the worst", "flaxckpt")
        yield Sample(worst, max(ratios), "x")
