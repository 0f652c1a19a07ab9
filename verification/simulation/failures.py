"""Histories of jobs whose disks fail, and nothing else."""

from verification.simulation import filesystem, jobs, kernel

CONTEXTS = jobs.CONTEXTS
PATCHES = jobs.PATCHES


def history(seed: int, *, is_traced: bool = False) -> list[kernel.Line]:
    """Runs one history; returns its timeline if traced.

    Raises:
        Violation: The history breaks a guarantee; its attribute `timeline` shows how.
    """
    return jobs.play(
        seed,
        lambda world: filesystem.Weather(fails=0.02),
        lambda world: jobs.Weather(),
        lambda world, processes, service: set(),
        is_traced=is_traced,
    )
