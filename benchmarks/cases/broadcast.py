"""A state that all processes need whole, from a bucket with a round trip of 20 ms.

Each process reads it, or they read it once together, or get it from each other's disks.
All run on this machine, so that its two cores do the work of all.
"""

from __future__ import annotations

import os

from benchmarks import job_broadcast, latency, several, timing
from benchmarks.cases import buckets
from benchmarks.samples import Rows, Sample, Series, Settings, Skip

CASE = "broadcast"
_PROCESSES = (4, 8)
_ROUND_TRIP_MS = 20


def run(settings: Settings) -> Rows:
    """Measures a job for each number of processes, which does all ways in turn."""
    if obstacle := buckets.obstacle():
        yield Skip(CASE, "all", obstacle)
        return
    for processes in _PROCESSES:
        with (
            timing.scratch(settings.directory) as scratch,
            buckets.server(scratch) as (url, bucket),
            latency.delayed(url, _ROUND_TRIP_MS) as delayed_url,
        ):
            os.environ[job_broadcast.URL] = f"s3://{bucket}/run"
            os.environ[job_broadcast.ENDPOINT] = delayed_url
            rows = several.run(
                job_broadcast.__name__, processes, scratch, quick=settings.quick
            )
        for row in rows:
            for way, seconds in row.items():
                yield Sample(Series(CASE, f"{processes} processes", way), seconds)
