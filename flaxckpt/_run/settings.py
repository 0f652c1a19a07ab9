"""The settings of a run as its journal records them.

A run directory has no file of settings. Its journal has an event `configured` with the
rules of retention, so that tools outside of the run explain and apply the same rules.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from flaxckpt import _steps, errors, policies
from flaxckpt._run import events, retention
from flaxckpt._steps.event import Event
from flaxckpt._types import JSON
from flaxckpt.formats._native import names
from flaxckpt.policies import PreservationPolicy, Ranked

_log = logging.getLogger(__name__)

_RECORDED_AGAIN_AFTER = 100
"""Saves after which the settings are recorded again: a journal in an object store loses
its oldest lines."""

_POLICIES = {
    cls.__name__: cls
    for cls in (
        policies.BestN,
        policies.EveryNSecs,
        policies.EveryNSteps,
        policies.EveryNStepsClosest,
        policies.ExponentialSteps,
        policies.LatestDuration,
        policies.LatestN,
        policies.OnSteps,
        policies.WithoutMetric,
    )
}
_NEEDS_METRICS = (policies.BestN, policies.WithoutMetric)


@dataclasses.dataclass(frozen=True, slots=True)
class UnknownPolicy(PreservationPolicy):
    """A policy that only the program of the run can evaluate; may keep every step.

    Attributes:
        text: The policy as text.
    """

    text: str

    def __str__(self) -> str:
        return f"perhaps {self.text}"

    def preserved(self, checkpoints: Sequence[Ranked], /) -> AbstractSet[int]:
        return {checkpoint.step for checkpoint in checkpoints}


class RunSettings(NamedTuple):
    """Recorded settings of a run.

    Attributes:
        rules: Rules of retention. Policies that only the program can evaluate are
            `UnknownPolicy` objects.
        callback: Arguments of the `CheckpointCallback`; empty without one.
        time: When the settings were recorded, in seconds since 1970.
    """

    rules: retention.Rules
    callback: Mapping[str, JSON]
    time: float


# ---- writing ----------------------------------------------------------------------


class Recorder:
    """Records the settings of a run before its first save, and when they change.

    Args:
        stream: The events of the run.
        rules: Rules of retention.

    Attributes:
        callback: Arguments of the `CheckpointCallback`.
    """

    def __init__(self, stream: events.Stream, rules: retention.Rules) -> None:
        self.callback: Mapping[str, JSON] = {}
        self._stream = stream
        self._rules = rules
        self._saves = 0
        self._recorded: Mapping[str, JSON] | None = None

    def record(self) -> None:
        """Records the settings, unless recorded not long ago; call once per save."""
        settings = {**_rules_to_json(self._rules), "callback": dict(self.callback)}
        is_due = self._saves % _RECORDED_AGAIN_AFTER == 0
        self._saves += 1
        if is_due or settings != self._recorded:
            self._stream.record("configured", **settings)
            self._recorded = settings


def _rules_to_json(rules: retention.Rules) -> dict[str, JSON]:
    return {
        "keep": [_to_json(policy) for policy in rules.keep],
        "keep_items": {
            item: [_to_json(policy) for policy in keep]
            for item, keep in rules.keep_items.items()
        },
        "items": _steps.event.plain(rules.items.state),
        "dataset_item": rules.items.dataset,
        "metrics_from": rules.metrics_from is not None,
    }


def _to_json(policy: PreservationPolicy) -> dict[str, JSON]:
    name = type(policy).__name__
    if _POLICIES.get(name) is not type(policy):
        return {"policy": "custom", "text": f"{policy}"[:200]}
    fields = {
        field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)
    }
    if isinstance(policy, policies.OnSteps):
        fields["steps"] = sorted(policy.steps)
    return {"policy": name, **fields}


# ---- reading ----------------------------------------------------------------------


def read(root: Path) -> RunSettings | None:
    """Returns the last recorded settings of a run directory, or None."""
    return last(_steps.journal.recent(root / _steps.journal.NAME))


def last(journal: Sequence[Event], before: float | None = None) -> RunSettings | None:
    """Returns the last settings in a journal, or None.

    Args:
        journal: The events, in order.
        before: Seconds since 1970, to ignore later events.
    """
    for event in reversed(journal):
        if event.kind != "configured" or (before is not None and event.time > before):
            continue
        try:
            return _parse(event)
        except (errors.OptionError, TypeError, ValueError) as error:
            _log.warning(
                "the recorded settings of %s are ignored: %s", event.path, error
            )
            return None
    return None


def _parse(event: Event) -> RunSettings:
    """Parses the settings in an event.

    Raises:
        OptionError, TypeError, ValueError: The event has no such settings.
    """
    details: Mapping[str, Any] = event.details
    has_other_metrics = details.get("metrics_from") is True
    items = details.get("items", "state")
    made = names.make_items(
        tuple(items) if isinstance(items, list) else items,
        details.get("dataset_item", "dataset"),
    )
    keep_items = {
        item: _from_list(keep, has_other_metrics)
        for item, keep in _mapping(details.get("keep_items", {})).items()
    }
    keep = _from_list(details.get("keep", []), has_other_metrics)
    rules = retention.Rules.of(keep, (), keep_items, None, made)
    callback = _mapping(details.get("callback", {}))
    return RunSettings(rules, MappingProxyType(callback), event.time)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.80} is not an object")
    return value


def _from_list(value: Any, has_other_metrics: bool) -> list[PreservationPolicy]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.80} is not a list")
    return [_from_json(_mapping(policy), has_other_metrics) for policy in value]


def _from_json(table: Mapping[str, Any], has_other_metrics: bool) -> PreservationPolicy:
    fields = {name: value for name, value in table.items() if name != "policy"}
    cls = _POLICIES.get(str(table.get("policy")))
    if cls is None:  # the user's own, or of a later version
        text = table.get("text", f"{table.get('policy')}({fields})")
        return UnknownPolicy(str(text)[:200])
    policy: PreservationPolicy = cls(**fields)
    if has_other_metrics and isinstance(policy, _NEEDS_METRICS):
        return UnknownPolicy(str(policy))
    return policy
