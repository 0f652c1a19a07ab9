"""Events of the checkpoints of a run."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from flaxckpt._types import JSON

Kind: TypeAlias = Literal[
    "configured",
    "preflight",
    "scheduled",
    "started",
    "snapshot",
    "committed",
    "copied",
    "uploaded",
    "measured",
    "deleted",
    "restored",
    "fell_back",
    "found_damaged",
    "found_good",
    "failed",
    "cancelled",
    "skipped",
    "preempted",
]


KINDS = frozenset(get_args(Kind))

NOT_KEPT = "no policy keeps it"
"""Reason of a deletion by the policies of a run, after a save."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a checkpoint.

    Attributes:
        kind: `started`, `snapshot`, `committed`, `failed`, `cancelled` and `skipped`
            for a save, `copied` for its copies at other processes, `uploaded` for an
            upload from staging, `restored` and
            `fell_back` for a restore, `found_damaged` and `found_good` for markers of
            damage, `measured` for metrics added later, `deleted`; `preflight`,
            `scheduled` and `preempted` for a training loop; `configured`, only in the
            journal, for the settings of the run.
        step: The checkpoint's step, or None.
        path: The checkpoint, or the run directory.
        time: Seconds since 1970.
        details: Further values by name: `bytes`, `total_secs`, `error`.
    """

    kind: Kind
    step: int | None
    path: str
    time: float
    details: Mapping[str, JSON]


def first_lines(error: BaseException, lines: int = 3) -> str:
    """Returns the first lines of an error message, and a row that they announce."""
    found = str(error).strip().splitlines()
    lines += lines < len(found) and found[lines - 1].endswith(":")
    text = "\n".join(found[:lines])[:500]
    return text or type(error).__name__


def plain(value: Any) -> JSON:
    """Converts `value` to JSON types; anything else to `str(value)`."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)
