"""The time of a save of one state by one process, by two, and by four.

All processes run on this machine and write to the same disk, so that several gain only
what a single process leaves unused.
"""

from __future__ import annotations

from benchmarks import job_save, several, timing
from benchmarks.samples import Rows, Sample, Series, Settings

CASE = "processes"
JOBS = {"1 process": 1, "2 processes": 2, "4 processes": 4}
"""Name of a job -> its processes."""


def run(settings: Settings) -> Rows:
    """Measures jobs in turn, each with several saves."""
    for turn in timing.turns(list(JOBS), settings.rounds, warm_up=False):
        with timing.scratch(settings.directory) as scratch:
            rows = several.run(
                job_save.__name__, JOBS[turn.contender], scratch, quick=settings.quick
            )
        for row in rows:
            yield Sample(Series(CASE, "commit", turn.contender), row["seconds"])
