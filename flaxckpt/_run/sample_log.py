"""The statistics of the leaves at each save, in a file of the run directory."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flaxckpt import _arrays, _steps, _storage, _util
from flaxckpt._types import LeafPath

_MAX_BYTES = 2**20
"""Limit in an object store; a write beyond the limit drops the oldest saves."""

_MAX_READ_BYTES = 64 * 2**20


class StepSamples(NamedTuple):
    """Statistics of the leaves of a step, saved `time` seconds after 1970."""

    step: int
    time: float
    leaves: Mapping[LeafPath, _arrays.leaf_sample.LeafSample]


def append(root: Path, samples: StepSamples, mode: int | None = None) -> None:
    """Appends a line with the statistics of a step, or raises OSError."""
    row = {
        "step": samples.step,
        "time": samples.time,
        "leaves": {path: _short(leaf) for path, leaf in samples.leaves.items()},
    }
    line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
    path = root / _steps.journal.STATISTICS
    _storage.of(path).append_lines(path, line, _MAX_BYTES, mode=mode)


def _short(leaf: _arrays.leaf_sample.LeafSample) -> list[Any]:
    return [_round(value) if isinstance(value, float) else value for value in leaf]


def _round(value: float) -> float | str:
    return float(f"{value:.5g}") if math.isfinite(value) else str(value)  # as JSON


def read(root: Path) -> list[StepSamples]:
    """Returns the statistics of the last saves in order; leaves out damaged lines."""
    path = root / _steps.journal.STATISTICS
    try:
        lines = _storage.of(path).last_lines(path, _MAX_READ_BYTES)
    except OSError:
        return []
    parsed = (_parse(line) for line in lines)
    return [samples for samples in parsed if samples is not None]


def _parse(line: bytes) -> StepSamples | None:
    try:
        _util.json_limits.check(line)
        row = json.loads(line)
        leaves = {str(p): _to_sample(fields) for p, fields in row["leaves"].items()}
        step, when = row["step"], float(row["time"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    is_step = isinstance(step, int) and not isinstance(step, bool)
    return StepSamples(step, when, leaves) if is_step and math.isfinite(when) else None


def _to_sample(fields: Any) -> _arrays.leaf_sample.LeafSample:
    """Returns statistics in a line; raises ValueError or TypeError for other fields."""
    count, sampled, norm, mean, low, high, nonfinite, bins = fields
    return _arrays.leaf_sample.LeafSample(
        int(count),
        int(sampled),
        float(norm),
        float(mean),
        float(low),
        float(high),
        int(nonfinite),
        tuple(int(n) for n in bins),
    )
