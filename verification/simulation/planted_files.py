"""Faults planted in the code for files and jobs, which the simulation must find."""

import contextlib
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from flaxckpt._distributed import heartbeat, operation
from flaxckpt._steps import delete, markers
from flaxckpt._storage import files as storage_files
from flaxckpt._storage import leases, rename, temporary
from verification.simulation import failures, files, jobs, pauses, pins


class Fault(NamedTuple):
    """A fault.

    Attributes:
        histories: The module with the histories that find it.
        patches: Functions to replace, for `stand_ins.installed`.
    """

    histories: ModuleType
    patches: dict[tuple[Any, str], Any]


def _replace_published(new: Path, final: Path) -> None:
    """Stands in for `rename.publish`: replaces a step of another writer."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(final)
    new.rename(final)


def _make_all_parents(root: Path, file: str) -> None:
    (root / file).parent.mkdir(parents=True, exist_ok=True)


class _NoPins:
    """Stands in for the module `markers` in `delete`: no step is pinned."""

    def __getattr__(self, name: str) -> Any:
        return getattr(markers, name)

    def is_pinned(self, path: Path) -> bool:
        return False


FAULTS = {
    # Two checks hold this off: each alone is enough.
    "a writer makes its directory anew after a sweep": Fault(
        pauses,
        {
            (storage_files, "make_parents"): _make_all_parents,
            (temporary, "check_claim"): lambda path: None,
        },
    ),
    "a sweep locks no directory": Fault(
        files, {(temporary, "_lock"): lambda descriptor, patience_secs: True}
    ),
    "directories count as abandoned between two touches": Fault(
        files, {(temporary, "_ABANDONED_SECS"): 1.0}
    ),
    "a deletion looks for no readers": Fault(
        files, {(leases, "readers"): lambda path: []}
    ),
    "a deletion looks for no pin": Fault(pins, {(delete, "markers"): _NoPins()}),
    "a new step replaces the step of another writer": Fault(
        files, {(rename, "publish"): _replace_published}
    ),
    "process 0 commits before all have written": Fault(
        jobs,
        {
            (operation.Operation, "gather"): lambda self, stage, mine="": (
                [mine] + ['{"digests": {}, "arrays": {}}'] * (self.count - 1)
            )
        },
    ),
    "the silence of a process is ignored": Fault(
        jobs, {(heartbeat.Heartbeats, "silent_secs"): lambda self, process: 0.0}
    ),
    "process 0 removes its directory at once after a failure": Fault(
        failures, {(operation.Operation, "_settle"): lambda self, stage, deadline: None}
    ),
}
"""What is wrong -> the fault."""
