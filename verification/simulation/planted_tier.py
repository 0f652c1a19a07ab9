"""Faults planted in the code of the local tier, which the simulation must find."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxckpt import _storage
from flaxckpt._checkpoint import verify
from flaxckpt._distributed import operation
from flaxckpt._run.tiers import parts, peer_copies
from flaxckpt._zarr import chunk_file
from verification.simulation import network, tier
from verification.simulation.planted_files import Fault

_Choice = tuple[list[parts.Whole], list[parts.Lost]]
_choose = parts.choose
_exchange = operation.Operation.exchange


def _ask_first_only(
    held: Sequence[Mapping[int, parts.Held]], far: Mapping[int, str | None]
) -> _Choice:
    """Stands in for `parts.choose`: looks at what process 0 has."""
    return _choose([held[0], *({} for _ in held[1:])], far)


def _exchange_without(*stages: str) -> Callable[..., list[str]]:
    """Returns a stand-in for `Operation.exchange` that waits for nobody there."""

    def exchange(self: Any, stage: str, mine: str = "") -> list[str]:
        if stage in stages:
            return [mine] * int(self.count)
        return _exchange(self, stage, mine)

    return exchange


class _Stand:
    """Stands in for an object, with some other attributes."""

    def __init__(self, real: Any, **names: Any) -> None:
        self._real = real
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _unsynced_storage() -> _Stand:
    """Returns a stand-in for the package `_storage` that syncs nothing."""

    def of(path: Path) -> _Stand:
        return _Stand(
            _storage.of(path),
            sync_tree=lambda root: 0,
            sync_files=lambda paths, threads: None,
        )

    return _Stand(
        _storage, of=of, files=_Stand(_storage.files, sync_directory=lambda path: None)
    )


def _verify_nothing(
    path: Path,
    names: Collection[str],
    stream: Callable[[str], Iterable[memoryview]] | None = None,
    pace: Any = None,
) -> dict[str, str]:
    """Stands in for `verify.find_faults`: receives the files only."""
    for name in names if stream is not None else ():
        for _ in stream(name):
            pass
    return {}


def _identify_by_step(path: Path) -> str | None:
    """Stands in for `parts.identify`: takes each save of a step for the same."""
    return path.name if (path / parts.MARKER).exists() else None


FAULTS = {  # some with the faults of the world that show them
    # Three checks hold this off: the first alone makes steps unreadable at most.
    "parts of several saves of a step are mixed": Fault(
        tier,
        {
            (parts, "identify"): _identify_by_step,
            (verify, "find_faults"): _verify_nothing,
            (chunk_file, "check"): lambda *args, **options: None,
        },
    ),
    "a restore takes the newest step of process 0": Fault(
        tier, {(parts, "choose"): _ask_first_only}
    ),
    "a copy is not verified": Fault(
        tier,
        {
            (verify, "find_faults"): _verify_nothing,
            (tier, "_FAULTS"): ("network",) * 3,
            (network, "_FAULTS"): ("wrong bytes",),
        },
    ),
    "a copy is not synced": Fault(
        tier,
        {
            (peer_copies, "_storage"): _unsynced_storage(),
            (tier, "_FAULTS"): ("crash",) * 3,
        },
    ),
    "a save is acknowledged before all parts are committed": Fault(
        tier,
        {
            (operation.Operation, "exchange"): _exchange_without("committed"),
            (tier, "_FAULTS"): ("outage",) * 3,
        },
    ),
}
"""What is wrong -> the fault."""
