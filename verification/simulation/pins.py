"""Histories of files whose steps are pinned while retention lets them go."""

from verification.simulation import files, filesystem, kernel

CONTEXTS = (filesystem.installed,)


def history(seed: int, *, is_traced: bool = False) -> list[kernel.Line]:
    """Runs one history; returns its timeline if traced.

    Raises:
        Violation: The history breaks a guarantee; its attribute `timeline` shows how.
    """
    return files.play(
        seed,
        _draw_slow_disk,
        lambda world, process: None,
        is_traced=is_traced,
        latest=(1,),
        operations={"save": 3, "pin": 3, "prune": 1},
    )


def _draw_slow_disk(world: kernel.World) -> filesystem.Weather:
    return filesystem.Weather(slow=0.05, slowest_secs=1.0)
