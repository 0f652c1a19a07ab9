"""Preservation policies as tables in files, such as `{latest = 3}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flaxckpt import _policy_forms, errors
from flaxckpt.configs import _parsing
from flaxckpt.configs._parsing import Parser
from flaxckpt.policies import PreservationPolicy

_FIELDS: Mapping[str, Parser] = {
    "n": _parsing.whole(1),
    "secs": _parsing.secs,
    "steps": _parsing.steps,
    "metric": _parsing.text,
    "mode": _parsing.one_of("min", "max"),
    "base": _parsing.whole(2),
}
"""Name of a policy's field -> its parser."""


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
    forms = {form.key: form for form in _policy_forms.FORMS.values()}
    further = dict.fromkeys(n for form in forms.values() for n in form.fields[1:])
    options = _parsing.table(key, value, [*forms, *further])
    kinds = [form for name, form in forms.items() if name in options]
    more = kinds[0].fields[1:] if len(kinds) == 1 else []
    if len(kinds) != 1 or options.keys() != {kinds[0].key, *more}:
        also = "; ".join(
            f"{form.key} also {' and '.join(form.fields[1:])}"
            for form in forms.values()
            if form.fields[1:]
        )
        raise errors.OptionError(
            f"{key} must have one of {', '.join(forms)} ({also}), found {options!r:.80}"
        )
    keys = (kinds[0].key, *more)
    fields = {
        field: _FIELDS[field](f"{key}.{name}", options[name])
        for field, name in zip(kinds[0].fields, keys, strict=True)
    }
    result: PreservationPolicy = _parsing.create(key, kinds[0].cls, fields)
    return result


def to_table(key: str, policy: PreservationPolicy) -> dict[str, Any]:
    """Returns the table of a policy, for files; the inverse of `parse`.

    Raises:
        OptionError: The policy is a custom policy.
    """
    form = _policy_forms.find(policy)
    if form is not None:
        [(_, first), *others] = form.to_dict(policy).items()
        return {form.key: first, **dict(others)}
    raise errors.OptionError(
        f"{key} is {policy}, a custom policy, which has no name in files: pass it"
        " to checkpointer(keep=…)"
    )
