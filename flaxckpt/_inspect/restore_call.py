"""A restore that is planned from texts: its plan, its remedies, its call in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from flaxckpt import _checkpoint, errors
from flaxckpt import transforms as tf
from flaxckpt._checkpoint.plan import RestorePlan
from flaxckpt._inspect.abstract_file import TargetState
from flaxckpt._transforms import base as _transforms
from flaxckpt._transforms import mirrors
from flaxckpt._util import humanize
from flaxckpt.transforms import Transform


class RestoreCall(NamedTuple):
    """A restore of a checkpoint into `target`; with `as_source`, a new run begins."""

    path: str
    step: int | None
    target: TargetState
    transforms: Sequence[Transform] = ()
    optimizer: Literal["match", "exact", "reinit"] | None = None
    missing: Literal["error", "init"] = "error"
    unused: Literal["warn", "error", "ignore"] = "warn"
    as_source: bool = False

    def plan(self) -> RestorePlan:
        default: Any = "exact" if self._is_by_path else "match"
        return _checkpoint.restore.plan_for_target(
            self.path,
            self.target.state,
            step=self.step,
            transforms=self.transforms,
            missing=self.missing,
            optimizer=self.optimizer or ("reinit" if self.as_source else default),
            unused=self.unused,
            as_source=self.as_source,
        )

    @property
    def _is_by_path(self) -> bool:
        """True if optimizer leaves are matched by path, as the target has no roles."""
        is_default = self.optimizer is None and not self.as_source
        return is_default and not self.target.has_roles

    def remedies(self, plan: RestorePlan) -> list[dict[str, Any]]:
        """Returns options for plans that may help; rules, to be added, come first."""
        if rules := find_rules(plan):
            return [rules]
        missing = [each.leaf for each in plan.problems if each.kind == "missing"]
        if not missing:
            return []
        lacks_optimizer = any("opt_state" in leaf.split("/") for leaf in missing)
        options: dict[str, Any] = {
            "suggest": not self.transforms,
            "missing": self.missing == "error" and "init",
            "optimizer": self._is_by_path and lacks_optimizer and "match",
        }
        return [{name: value} for name, value in options.items() if value]

    def options_as_source(self, *, has_dropped: bool) -> dict[str, Any]:
        """Returns the further options of a plan for the source of a new run."""
        plan = self._replace(as_source=True).plan()
        if has_dropped and {each.kind for each in plan.problems} == {"missing"}:
            # What was dropped may be missing on purpose.
            return find_rules(plan) or {"missing": "init"}
        return find_rules(plan)

    def write_call(self) -> str:
        """Returns the call of the restore in Python, in one line."""
        listed = ", ".join(_transforms.describe(self.transforms))
        prefix = "source_" if self.as_source else ""
        given = {
            f"{prefix}step": "" if self.step is None else f"{self.step}",
            f"{prefix}transforms": f"[{listed}]" if listed else "",
            "missing": "" if self.missing == "error" else f'"{self.missing}"',
            "unused": "" if self.unused == "warn" else f'"{self.unused}"',
            "optimizer": "" if self.optimizer is None else f'"{self.optimizer}"',
        }
        options = "".join(f", {name}={text}" for name, text in given.items() if text)
        if self.as_source:
            return f"callback.restore_or_init(state, source={self.path!r}{options})"
        return f"flaxckpt.load({self.path!r}, state{options})"

    def write_import(self) -> str:
        """Returns the import of the functions that the call names; empty for none."""
        texts = _transforms.describe(self.transforms)
        used = {text.partition("(")[0] for text in texts} & {*tf.__all__}
        names = ", ".join(sorted(used))
        return f"from flaxckpt.transforms import {names}" if used else ""

    def describe_fresh(self, plan: RestorePlan) -> str:
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
        if self.missing == "init":
            text = (
                f"Not from the checkpoint: {leaves}. Pass a state with values for them,"
                " not only shapes"
            )
            optimizer = ", and with its optimizer, such as a TrainState"
            return f"{text}{optimizer if has_optimizer else ''}."
        if self.as_source:
            text = f"Begin anew, as in a new run: {leaves}."
            optimizer = " Pass a state that has an optimizer, such as a TrainState."
            return f"{text}{optimizer if has_optimizer else ''}"
        return (
            f"The optimizer initializes {leaves}: pass a state that has one, such as a"
            " TrainState."
        )


def find_rules(plan: RestorePlan) -> dict[str, Any]:
    """Returns the rules that the problems of a plan call for, as options."""
    rules: dict[str, Any] = {}
    if plan.renames:
        rules["rename"] = [f"{pattern}={name}" for pattern, name in plan.renames]
    if plan.drops:
        rules |= {"drop": [*plan.drops], "missing": "init"}
    return rules


def describe_loaded(plan: RestorePlan) -> str:
    """Returns which leaves come from the checkpoint; empty for all leaves, or none."""
    others = {"init", "dropped", "conflict"}
    loaded = [p for p, leaf in plan.leaves.items() if others.isdisjoint(leaf.actions)]
    if not loaded or not plan.count("init"):
        return ""
    names = errors.first_few(loaded, 4)
    return f"From the checkpoint: {names}{'' if names.endswith('…') else '.'}"
