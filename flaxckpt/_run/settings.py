"""The settings of a run as its journal records them, in events `configured`.

By these, tools outside of the run explain and apply the same rules.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from flaxckpt import _policy_forms, _steps, errors
from flaxckpt._formats import native_names
from flaxckpt._run import events, judge
from flaxckpt._steps.event import Event
from flaxckpt._types import JSON
from flaxckpt.policies import PreservationPolicy, Ranked

_log = logging.getLogger(__name__)

_RECORDED_AGAIN_AFTER = 100
"""Saves after which the settings are recorded again: a journal in an object store loses
its oldest lines."""

_LONGEST = 1000
"""Values of a list in the record; a line of a journal is limited."""

_KEYS = frozenset(
    (
        *("keep", "keep_items", "items", "dataset_item", "metrics_from"),
        *("step_format", "callback"),
    )
)


@dataclasses.dataclass(frozen=True, slots=True)
class UnknownPolicy(PreservationPolicy):
    """A policy that only the program of the run can evaluate; may keep every step."""

    text: str

    def __str__(self) -> str:
        return f"perhaps {self.text}"

    def preserved(self, checkpoints: Sequence[Ranked], /) -> AbstractSet[int]:
        return {checkpoint.step for checkpoint in checkpoints}


class RunSettings(NamedTuple):
    """Recorded settings of a run.

    Policies that only the program can evaluate are `UnknownPolicy` objects.
    """

    rules: judge.Rules
    step_format: str
    callback: Mapping[str, JSON]


# ---- writing ----------------------------------------------------------------------


class Recorder:
    """Records the settings of a run before its first save, and when they change."""

    def __init__(
        self, stream: events.Stream, rules: judge.Rules, step_format: str
    ) -> None:
        self.callback: Mapping[str, JSON] = {}
        self._stream = stream
        self._rules = {**_rules_to_json(rules), "step_format": step_format}
        self._saves = 0
        self._recorded: Mapping[str, JSON] | None = None

    def record(self) -> None:
        """Records the settings, unless recorded not long ago; call once per save."""
        settings = {**self._rules, "callback": dict(self.callback)}
        is_due = self._saves % _RECORDED_AGAIN_AFTER == 0
        if not is_due and settings == self._recorded:
            self._saves += 1
        elif self._stream.record("configured", **settings):
            self._recorded = settings
            self._saves += 1


def _rules_to_json(rules: judge.Rules) -> dict[str, JSON]:
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
    form = _policy_forms.find(policy)
    fields = {} if form is None else form.to_dict(policy)
    is_long = any(isinstance(v, list) and len(v) > _LONGEST for v in fields.values())
    if form is None or is_long:
        return {"policy": "custom", "text": _describe(policy)}
    return {"policy": form.cls.__name__, **fields}


def _describe(policy: PreservationPolicy) -> str:
    try:
        return f"{policy}"[:200]
    except Exception:  # of the user's own `__str__`
        return type(policy).__name__


# ---- reading ----------------------------------------------------------------------


def read(root: Path, names: Mapping[int, str]) -> RunSettings | None:
    """Returns the last recorded settings of a run directory, or None.

    `names` has the name of each step: settings of programs with other names, which may
    use the same directory, do not count.
    """
    if (root / _steps.names.STAGING_OWNER).is_file():
        return None
    return last(_steps.journal.recent(root / _steps.journal.NAME), names)


def read_rules(root: Path, paths: Mapping[int, Path]) -> judge.Rules | None:
    """Returns the last recorded rules of a run directory with these steps, or None."""
    recorded = read(root, {step: path.name for step, path in paths.items()})
    return None if recorded is None else recorded.rules


def last(
    journal: Sequence[Event], names: Mapping[int, str] = MappingProxyType({})
) -> RunSettings | None:
    for event in reversed(journal):
        if event.kind != "configured" or not _has_format(event, names):
            continue
        try:
            return _parse(event)
        except (errors.OptionError, TypeError, ValueError, OverflowError) as error:
            _log.warning(
                "the recorded settings of %s are ignored: %s", event.path, error
            )
            return None
    return None


def _has_format(event: Event, names: Mapping[int, str]) -> bool:
    """Returns True if the settings in an event are of steps with these names."""
    try:
        step_format = _steps.names.StepFormat(str(event.details.get("step_format")))
    except errors.OptionError:
        return True  # `_parse` reports it
    return all(step_format.step(name) == step for step, name in names.items())


def _parse(event: Event) -> RunSettings:
    """Parses settings; raises OptionError, TypeError or ValueError for others."""
    details: Mapping[str, Any] = event.details
    if unknown := details.keys() ^ _KEYS:
        raise ValueError(f"they lack, or a later version added, {sorted(unknown)}")
    _steps.names.StepFormat(details["step_format"])
    has_other_metrics = details.get("metrics_from") is True
    items = details["items"]
    made = native_names.make_items(
        tuple(items) if isinstance(items, list) else items, details["dataset_item"]
    )
    keep_items = {
        item: _from_list(keep, has_other_metrics)
        for item, keep in _mapping(details["keep_items"]).items()
    }
    keep = _from_list(details["keep"], has_other_metrics)
    rules = judge.Rules.of(keep, (), keep_items, None, made)
    callback = MappingProxyType(_mapping(details["callback"]))
    return RunSettings(rules, details["step_format"], callback)


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
    form = _policy_forms.FORMS.get(str(table.get("policy")))
    if form is None:  # the user's own, or of a later version
        text = table.get("text", f"{table.get('policy')}({fields})")
        return UnknownPolicy(str(text)[:200])
    policy: PreservationPolicy = form.cls(**fields)
    if has_other_metrics and "metric" in fields:
        return UnknownPolicy(str(policy))
    return policy
