"""The call in Python of a restore that was planned from texts, and its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from flaxckpt import errors
from flaxckpt import transforms as tf
from flaxckpt._checkpoint.plan import RestorePlan
from flaxckpt._transforms import base as _transforms
from flaxckpt._transforms import mirrors
from flaxckpt._util import humanize
from flaxckpt.transforms import Transform


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

    The arguments are those of the restore; `as_source` is True for the source of a new
    run.
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


def describe_loaded(plan: RestorePlan) -> str:
    """Returns which leaves come from the checkpoint; empty for all leaves, or none."""
    others = {"init", "dropped", "conflict"}
    loaded = [p for p, leaf in plan.leaves.items() if others.isdisjoint(leaf.actions)]
    if not loaded or not plan.count("init"):
        return ""
    names = errors.first_few(loaded, 4)
    return f"From the checkpoint: {names}{'' if names.endswith('…') else '.'}"


def describe_fresh(
    plan: RestorePlan, *, missing: Literal["error", "init"], as_source: bool
) -> str:
    """Returns which state to pass for the leaves that keep its values, or ""."""
    fresh = {
        path: leaf.wanted
        for path, leaf in plan.leaves.items()
        if "init" in leaf.actions and leaf.wanted is not None
    }
    if not fresh:
        return ""
    leaves = humanize.count(len(fresh), "leaf", "leaves")
    has_optimizer = any(mirrors.is_optimizer_leaf(*each) for each in fresh.items())
    if missing == "init":
        text = (
            f"Not from the checkpoint: {leaves}. Pass a state with values for them, not"
            " only shapes"
        )
        optimizer = ", and with its optimizer, such as a TrainState"
        return f"{text}{optimizer if has_optimizer else ''}."
    if as_source:
        text = f"Begin anew, as in a new run: {leaves}."
        optimizer = " Pass a state that has an optimizer, such as a TrainState."
        return f"{text}{optimizer if has_optimizer else ''}"
    return (
        f"The optimizer initializes {leaves}: pass a state that has one, such as a"
        " TrainState."
    )
