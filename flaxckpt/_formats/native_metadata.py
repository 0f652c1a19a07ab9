"""Reads and writes the metadata of a checkpoint: times, the user's own, and metrics."""

from __future__ import annotations

import collections
import contextlib
import copy
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxckpt import _steps, _storage, errors
from flaxckpt._formats import items, orbax_files, orbax_json
from flaxckpt._formats.items import CHECKPOINT, METRICS, METRICS_DIGESTS
from flaxckpt._formats.orbax_files import StepMetadata
from flaxckpt._formats.reader import CheckpointMetadata
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import JSON

_log = logging.getLogger(__name__)

_RUN_METADATA = "metadata/_ROOT_METADATA"
_STEP = "step"
_OLD_RUN_METADATA = "metadata/metadata"
"""File of Orbax before 0.11 that contains only the user's metadata of a run."""


def checkpoint_metadata(
    path: Path,
    format_name: str,
    step: int | None,
    infos: Sequence[LeafInfo],
    digests: Mapping[str, str],
    dataset: str | None,
    names: Collection[str],
    deleted: Collection[str],
    recorded_step: int | None = None,
) -> CheckpointMetadata:
    """Returns the metadata of a checkpoint; `recorded_step` is that of the save."""
    file = path / CHECKPOINT
    recorded = StepMetadata()
    if CHECKPOINT in digests or CHECKPOINT in names:
        content = items.read_file(file, path)
        items.check_digest(file, digests.get(CHECKPOINT), content)
        try:
            recorded = StepMetadata.from_json(orbax_json.loads(content, file))
        except errors.DamagedCheckpointError:
            # Orbax tolerates invalid content here, and the state does not need it.
            if CHECKPOINT in digests:
                raise
    return CheckpointMetadata(
        str(path),
        format_name,
        step,
        {info.path: info for info in infos},
        _read_metrics(path, recorded_step, names, recorded),
        recorded.created,
        recorded.committed,
        recorded.custom,
        dataset in names and dataset not in deleted and (path / str(dataset)).is_dir(),
        sum(info.stored_bytes for info in infos),
        deleted_items=tuple(sorted(deleted)),
    )


def read_created(path: Path) -> float:
    """Returns the seconds since 1970 at the save, or of the oldest file; else NaN."""
    created = None
    with contextlib.suppress(errors.DamagedCheckpointError):
        created = items.read_step_metadata(path).created
    if created is None:
        with contextlib.suppress(FileNotFoundError):  # just deleted
            times = (file.lstat().st_mtime for file in path.iterdir())
            return min(filter(None, times), default=math.nan)
        return time.time()
    return created


def read_run_metadata(root: Path) -> dict[str, JSON]:
    """Returns the user's metadata of a whole run, from Orbax's file."""
    if (path := root / _RUN_METADATA).is_file():
        return orbax_files.custom_metadata(items.read_json(path, root))
    if (path := root / _OLD_RUN_METADATA).is_file():
        return items.read_json(path, root)
    return {}


def write_run_metadata(
    root: Path, custom: Mapping[str, JSON], *, mode: int | None = None
) -> None:
    """Writes a run's user metadata atomically; raises ValueError for a link outside."""
    path = root / _RUN_METADATA
    _storage.of(path).check_file(path, root)
    _storage.of(path.parent).make_directory(path.parent, mode=mode)
    _storage.of(path).replace(
        path,
        orbax_json.dumps({"internal_metadata": {}, "custom_metadata": dict(custom)}),
        mode=mode,
    )


# ---- metrics ----------------------------------------------------------------------


def _read_metrics(
    path: Path, step: int | None, names: Collection[str], recorded: StepMetadata
) -> dict[str, float]:
    """Returns numeric metrics; a damaged file is logged and counts as empty."""
    has_none = isinstance(recorded.handlers, dict) and METRICS not in recorded.handlers
    if has_none and not {METRICS, _steps.markers.MEASURED}.intersection(names):
        return {}
    try:
        return flatten_metrics(load_metrics(path, step))
    except errors.DamagedCheckpointError as error:
        _log.warning("the metrics of %s are lost: %s", path, error)
        return {}


def load_metrics(path: Path, step: int | None) -> dict[str, Any]:
    """Returns the content of the metrics file of `path`; empty without metrics.

    Raises DamagedCheckpointError for metrics of another step than `step`, unless None.
    """
    file = path / METRICS / METRICS
    if not _storage.of(file).exists(file):
        if not _storage.of(file).costs_requests:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                _storage.of(file).names(file.parent)  # raises if it cannot be read
        evidence = _evidence_of_metrics(path)
        if evidence and not _storage.of(file).exists(file):
            raise errors.DamagedCheckpointError(
                f"{file} is missing, but {evidence} records that the step had metrics;"
                " add all metrics of the step again"
            )
        return {}
    content = items.read_file(file, path)
    if not _has_digest(path, content, step):
        # A writer may have replaced the file at this moment.
        previous, content = content, items.read_file(file, path)
        if content == previous or not _has_digest(path, content, step):
            raise errors.DamagedCheckpointError(
                f"{file} or {METRICS_DIGESTS} has changed since it was written"
            )
    return orbax_json.loads(content, file)


def _evidence_of_metrics(path: Path) -> str | None:
    """Returns the file that records metrics of a native checkpoint, or None."""
    if _steps.markers.is_measured(path):
        return _steps.markers.MEASURED
    if not (path / orbax_json.MANIFEST).is_file():  # Orbax records no digests
        return None
    try:
        handlers = items.read_step_metadata(path).handlers
    except errors.DamagedCheckpointError:
        if (path / items.SEAL).is_file():  # an item, which has no metrics
            return None
        raise
    return CHECKPOINT if isinstance(handlers, dict) and METRICS in handlers else None


def _has_digest(path: Path, metrics: bytes, step: int | None) -> bool:
    file = path / METRICS_DIGESTS
    if not _storage.of(path).exists(file):
        return True
    digests, recorded = _parse_digests(items.read_file(file, path), file)
    if step is not None and recorded not in (step, None):
        raise errors.DamagedCheckpointError(
            f"{path / METRICS} has the metrics of step {recorded!r:.20}, wanted {step};"
            " delete the directory, and add the metrics of the step again"
        )
    return _storage.files.digest(metrics) in digests


def flatten_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers among `metrics`, except numbers too large for a float.

    Nested names, also indices of lists, are joined by `/`, as in `eval/loss`. Of two
    equal names, the less nested counts.
    """
    numbers: dict[str, float] = {}
    queue: collections.deque[tuple[str, Any]] = collections.deque(metrics.items())
    while queue:
        name, value = queue.popleft()
        if isinstance(value, dict):
            queue.extend((f"{name}/{key}", inner) for key, inner in value.items())
        elif isinstance(value, list):
            queue.extend((f"{name}/{i}", inner) for i, inner in enumerate(value))
        elif isinstance(value, float) or (
            isinstance(value, int) and abs(value) < 2**1023
        ):
            numbers.setdefault(name, float(value))
    return numbers


def merge_metrics(
    metrics: Mapping[str, Any], added: Mapping[str, float]
) -> dict[str, Any]:
    """Returns a copy of `metrics` with `added` numbers where Orbax looks for them."""
    merged = copy.deepcopy(dict(metrics))
    for name, number in added.items():
        if name in merged or not _replace_nested(merged, name, number):
            merged[name] = number
    return merged


def _replace_nested(metrics: dict[str, Any], name: str, number: float) -> bool:
    """Replaces the nested number `name`; returns False if not found."""
    for key, value in metrics.items():
        if not name.startswith(f"{key}/") or not isinstance(value, dict):
            continue
        rest = name.removeprefix(f"{key}/")
        if isinstance(value.get(rest), int | float):
            value[rest] = number
            return True
        if _replace_nested(value, rest, number):
            return True
    return False


def metrics_digests(*contents: bytes, step: int | None) -> bytes:
    digests = [_storage.files.digest(content) for content in contents]
    return _digests_text(digests, step)


def _digests_text(digests: JSON, step: JSON) -> bytes:
    row = {METRICS: digests, _STEP: step}
    return orbax_json.dumps(row if step is not None else {METRICS: digests})


def _parse_digests(content: bytes, file: Path) -> tuple[list[JSON], JSON]:
    """Parses `_digests_text`; malformed digests count as none."""
    record = orbax_json.loads(content, file)
    digests = record.get(METRICS)
    return digests if isinstance(digests, list) else [], record.get(_STEP)


def check_metrics_digests(path: Path) -> None:
    """Raises ValueError if `metrics/digests` has changed since it was written."""
    file = path / METRICS_DIGESTS
    content = items.read_file(file, path)
    if content != _digests_text(*_parse_digests(content, file)):
        raise ValueError("its content has changed since it was written")


def write_metrics(path: Path, metrics: Mapping[str, JSON], step: int | None) -> None:
    """Replaces metrics atomically, or raises ValueError, also if a link leads out."""
    storage, file = _storage.of(path), path / METRICS / METRICS
    storage.check_file(file, path)
    content = orbax_json.dumps(dict(metrics))
    orbax_json.check_size(content)
    files = {METRICS: content, "digests": metrics_digests(content, step=step)}
    # Atomically: Orbax reports a directory without the file as damage.
    is_there = (path / METRICS).is_dir()
    if is_there or not storage.add_directory(path / METRICS, files):
        valid = [content]
        with contextlib.suppress(errors.DamagedCheckpointError):
            valid.append(items.read_file(file, path))
        # Both digests count until the new metrics are written, even after an
        # interruption.
        digests, mode = path / METRICS_DIGESTS, _storage.modes.of_directory(path)
        storage.replace(digests, metrics_digests(*valid, step=step), mode=mode)
        storage.replace(file, content, mode=mode)
        storage.replace(digests, metrics_digests(content, step=step), mode=mode)
    _steps.markers.mark_measured(path)
