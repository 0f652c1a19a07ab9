"""Preservation policies as tables in files, such as `{latest = 3}`."""

from __future__ import annotations

from typing import Any

from flaxckpt import _policy_forms, errors
from flaxckpt.configs import _parsing
from flaxckpt.policies import PreservationPolicy


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
    form, keys = kinds[0], (kinds[0].key, *more)
    fields = {
        field: _parsing.by_type(field_type)(f"{key}.{name}", options[name])
        for field, field_type, name in zip(form.fields, form.types, keys, strict=True)
    }
    result: PreservationPolicy = _parsing.create(key, form.cls, fields)
    return result


def parse_option(key: str, text: str) -> PreservationPolicy:
    """Parses a policy as an option, such as `best:1:loss:min`.

    Raises KeyError or ValueError if the text has no policy's name, or other fields, and
    OptionError if a field has a value that is refused.
    """
    name, _, rest = text.partition(":")
    form = {form.option: form for form in _policy_forms.FORMS.values()}[name]
    parts = zip(form.types, form.split(rest), strict=True)
    values = [_parsing.raw_value(field_type, part) for field_type, part in parts]
    return parse(key, dict(zip((form.key, *form.fields[1:]), values, strict=True)))


def to_table(key: str, policy: PreservationPolicy) -> dict[str, Any]:
    """Returns the table of a policy for files; raises OptionError for a custom one."""
    form = _policy_forms.find(policy)
    if form is not None:
        [(_, first), *others] = form.to_dict(policy).items()
        return {form.key: first, **dict(others)}
    raise errors.OptionError(
        f"{key} is {policy}, a custom policy, which has no name in files: pass it"
        " to checkpointer(keep=…)"
    )
