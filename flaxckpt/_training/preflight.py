"""Checks before training for faults that would make a later save fail."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from flaxckpt import _policy_forms, _storage, _util, errors
from flaxckpt._run.checkpointer import Checkpointer, session_of
from flaxckpt._types import JSON, PyTree
from flaxckpt.policies import PreservationPolicy

_log = logging.getLogger(__name__)

_PROBE_BYTES = 8 * 2**20
"""The most bytes of the small file; a save of less may have to do with less space."""

_FEW_SAVES = 5


class Preflight(NamedTuple):
    """Expected size and duration of the saves of a run.

    Attributes:
        bytes: Size of a save.
        free_bytes: Free space of the file system.
        needed_bytes: Space needed in addition to the used space, until new steps
            replace old steps; with policies without a maximal number of steps, for the
            next save only.
        saves_kept: Maximal number of steps that the policies keep; None if unlimited.
        blocking_secs: Measured time that `save` blocks the loop.
        total_secs: Time until a save is durable, estimated from a small file.
    """

    bytes: int
    free_bytes: int
    needed_bytes: int
    saves_kept: int | None
    blocking_secs: float
    total_secs: float


def check(
    checkpointer: Checkpointer,
    state: PyTree,
    dataset: Any,
    json: Mapping[str, JSON] = MappingProxyType({}),
    *,
    only_warn: bool,
) -> Preflight | None:
    """Rehearses a save without writing arrays, and tests the directory.

    Returns None after an error that is only logged. Raises SaveFailedError if the
    directory cannot be written to, or has not enough space.
    """
    try:
        return _check(checkpointer, state, dataset, json)
    except errors.CheckpointError as error:
        if not only_warn:
            raise
        _log.warning("the saves of this run may fail: %s", error)
        return None


def _check(
    checkpointer: Checkpointer, state: PyTree, dataset: Any, json: Mapping[str, JSON]
) -> Preflight:
    session = session_of(checkpointer)
    start = time.monotonic()
    size = session.saves.rehearse(state, dataset, json)
    blocking_secs = time.monotonic() - start
    place = session.run.saves_in

    def probe() -> float:
        content = bytes(max(1, min(size, _PROBE_BYTES)))
        if place != checkpointer.directory:
            _probe(checkpointer.directory, content)
        return _probe(place, content)

    rate = session.on_first_process("the preflight", probe)
    kept = max_kept(session.run.retention.rules.keep)
    existing = len(session.run.retention.index.paths())
    free = _storage.filesystem.free_bytes(place)
    more_saves = 1 if kept is None else max(1, kept + 1 - existing)
    preflight = Preflight(
        size,
        sys.maxsize if free is None else free,  # a bucket has no limit
        more_saves * size,
        kept,
        blocking_secs,
        blocking_secs + size / rate,
    )
    checkpointer.events.emit("preflight", **preflight._asdict())
    _report(place, preflight)
    return preflight


def max_kept(keep: Sequence[PreservationPolicy]) -> int | None:
    """Returns the maximal number of steps that policies keep; None if unlimited."""
    total = 0
    for policy in keep:
        form = _policy_forms.find(policy)
        if form is None or form.count_kept is None:
            return None
        total += form.count_kept(policy)
    return total or None


def _report(directory: Path, preflight: Preflight) -> None:
    """Logs the expected saves, and warns of unlimited saves."""
    size = _util.humanize.size(preflight.bytes)
    free = _util.humanize.size(preflight.free_bytes)
    _log.info(
        "each save: %s, blocks training for about %.3f s, durable after about %.1f s;"
        " %s free",
        size,
        preflight.blocking_secs,
        preflight.total_secs,
        free,
    )
    kept = preflight.saves_kept
    if preflight.needed_bytes > preflight.free_bytes:
        limit = "" if kept is None else f", {kept} are kept"
        raise errors.SaveFailedError(
            f"{directory} has {free} free, and"
            f" {_util.humanize.size(preflight.needed_bytes)} are needed: a save takes"
            f" up to {size}{limit}, and each save is written before an old one is"
            " deleted. Free some space, keep fewer steps, or, if much of the state"
            " never changes and is hard-linked, pass preflight='warn'."
        )
    if kept is None and preflight.free_bytes < _FEW_SAVES * preflight.bytes:
        _log.warning(
            "%s has room for %d more saves of %s, and no policy limits the number of"
            " kept steps: pass keep=[LatestN(3)], for example",
            directory,
            preflight.free_bytes // preflight.bytes,
            size,
        )


def _probe(directory: Path, content: bytes) -> float:
    """Does the file operations of a save; returns the bytes written per second."""
    final = directory / _storage.temporary.PREFLIGHT
    renamed = _storage.temporary.new_path(final, _storage.temporary.WRITING)
    action = "make a directory in"
    try:
        with _storage.transaction.begin(final) as transaction:
            made = transaction.directory
            action = "write and sync a file in"
            start = time.monotonic()
            _storage.of(made).write(made / "probe", content)
            secs = time.monotonic() - start
            action = "rename a directory in"
            if _storage.of(made).can_rename:
                _storage.rename.withdraw(made, renamed)
                made = renamed
            action = "remove a directory from"
            _storage.of(made).remove_tree(made)
    except OSError as error:
        raise errors.SaveFailedError(
            f"cannot {action} {directory}: {error}; no step could be saved there."
            " Choose another directory, or check that it is writable and has space"
        ) from error
    return len(content) / max(secs, 1e-6)
