"""Histories of files on a slow network, with pauses after which all seems abandoned."""

from verification.simulation import files, filesystem, kernel

CONTEXTS = (filesystem.installed,)


def history(seed: int, *, is_traced: bool = False) -> list[kernel.Line]:
    """Runs one history; returns its timeline if traced.

    Raises:
        Violation: The history breaks a guarantee; its attribute `timeline` shows how.
    """
    return files.play(seed, _draw_network, _suspend, is_traced=is_traced)


def _draw_network(world: kernel.World) -> filesystem.Weather:
    random = world.random
    return filesystem.Weather(
        is_local=False,
        has_locks=random.random() < 0.3,
        can_exchange=random.random() < 0.5,
        slow=0.05,
    )


def _suspend(world: kernel.World, process: kernel.Process) -> None:
    random = world.random
    process.pauses[random.randrange(40, 250)] = random.choice((590, 610, 650, 700))
