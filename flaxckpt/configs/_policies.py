"""Preservation policies as tables in files, such as `{latest = 3}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flaxckpt import errors, policies
from flaxckpt.configs import _parsing
from flaxckpt.configs._parsing import Parser
from flaxckpt.policies import PreservationPolicy

# Name in files -> policy, its field for the name's value, and the field's parser.
_POLICIES: Mapping[str, tuple[type[Any], str, Parser]] = {
    "latest": (policies.LatestN, "n", _parsing.whole(1)),
    "latest_duration": (policies.LatestDuration, "secs", _parsing.secs),
    "best": (policies.BestN, "n", _parsing.whole(1)),
    "without_metric": (policies.WithoutMetric, "metric", _parsing.text),
    "every_steps": (policies.EveryNSteps, "n", _parsing.whole(1)),
    "every_steps_closest": (policies.EveryNStepsClosest, "n", _parsing.whole(1)),
    "exponential_steps": (policies.ExponentialSteps, "n", _parsing.whole(1)),
    "every_secs": (policies.EveryNSecs, "secs", _parsing.secs),
    "on_steps": (policies.OnSteps, "steps", _parsing.steps),
}
# Name in files -> further fields of the policy.
_MORE_FIELDS: Mapping[str, Mapping[str, Parser]] = {
    "best": {"metric": _parsing.text, "mode": _parsing.one_of("min", "max")},
    "exponential_steps": {"base": _parsing.whole(2)},
}


def parse(key: str, value: Any) -> PreservationPolicy:
    """Parses a policy, or a table such as `{latest = 3}`."""
    if isinstance(value, type):
        raise errors.OptionError(
            f"{key} must be a policy, found the class {value.__name__}: pass an"
            " instance of it"
        )
    if hasattr(value, "preserved"):
        policy: PreservationPolicy = value
        return policy
    further = [name for more in _MORE_FIELDS.values() for name in more]
    options = _parsing.table(key, value, [*_POLICIES, *further])
    kinds = [name for name in _POLICIES if name in options]
    more = _MORE_FIELDS.get(kinds[0], {}) if len(kinds) == 1 else {}
    if len(kinds) != 1 or options.keys() != {*kinds, *more}:
        also = "; ".join(
            f"{kind} also {' and '.join(more)}" for kind, more in _MORE_FIELDS.items()
        )
        raise errors.OptionError(
            f"{key} must have one of {', '.join(_POLICIES)} ({also}), found"
            f" {options!r:.80}"
        )
    cls, field, parse = _POLICIES[kinds[0]]
    fields = {field: parse(f"{key}.{kinds[0]}", options[kinds[0]])}
    fields |= {name: more[name](f"{key}.{name}", options[name]) for name in more}
    result: PreservationPolicy = _parsing.create(key, cls, fields)
    return result


def to_table(key: str, policy: PreservationPolicy) -> dict[str, Any]:
    """Returns the table of a policy, for files; the inverse of `parse`.

    Raises:
        OptionError: The policy is a custom policy.
    """
    for name, (cls, field, _) in _POLICIES.items():
        if type(policy) is cls:
            value = getattr(policy, field)
            more = _MORE_FIELDS.get(name, {})
            return {
                name: sorted(value) if name == "on_steps" else value,
                **{other: getattr(policy, other) for other in more},
            }
    raise errors.OptionError(
        f"{key} is {policy}, a custom policy, which has no name in files: pass it"
        " to checkpointer(keep=…)"
    )
