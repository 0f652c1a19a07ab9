"""The call in Python of a restore that was planned from texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from flaxckpt import transforms as tf
from flaxckpt.transforms import Transform
from flaxckpt.transforms import _base as _transforms


def write_call(
    path: str,
    step: int | None,
    transforms: Sequence[Transform],
    *,
    missing: Literal["error", "init"],
    optimizer: Literal["match", "exact", "reinit"] | None,
    unused: Literal["warn", "error", "ignore"] = "warn",
    as_source: bool,
) -> str:
    """Returns the call of the restore of a plan, in one line.

    Args:
        path: The checkpoint, or its run directory.
        step: Step of a run directory; None for the newest.
        transforms: The transforms of the checkpoint.
        missing: How leaves that the checkpoint lacks are treated.
        optimizer: How to match optimizer leaves; None for the default of the call.
        unused: How leaves that the state lacks are treated.
        as_source: True for the source of a new run.
    """
    listed = ", ".join(_transforms.describe(transforms))
    prefix = "source_" if as_source else ""
    given = {
        f"{prefix}step": "" if step is None else f"{step}",
        f"{prefix}transforms": f"[{listed}]" if listed else "",
        "missing": "" if missing == "error" else f'"{missing}"',
        "unused": "" if unused == "warn" else f'"{unused}"',
        "optimizer": "" if optimizer is None else f'"{optimizer}"',
    }
    options = "".join(f", {name}={text}" for name, text in given.items() if text)
    if as_source:
        return f"callback.restore_or_init(state, source={path!r}{options})"
    return f"flaxckpt.load({path!r}, state{options})"


def write_import(transforms: Sequence[Transform]) -> str:
    """Returns the import of the functions that the call names; empty for none."""
    texts = _transforms.describe(transforms)
    used = {text.partition("(")[0] for text in texts} & {*tf.__all__}
    return f"from flaxckpt.transforms import {', '.join(sorted(used))}" if used else ""
