"""Checks of arguments, and descriptions of unexpected values.

A wrong or swapped argument raises at the call, with the argument's name in the error.
"""

from __future__ import annotations

import operator
import os
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from flaxckpt import errors

T = TypeVar("T")

_PLAIN = (bool, int, float, complex, str, bytes)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def describe(value: Any) -> str:
    """Describes an unexpected value in a few words, without contents."""
    if value is None or type(value) in _PLAIN:
        return f"{value!r:.80}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, _FUNCTIONS):
        return f"the function {value.__name__}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if not value.shape:
            return f"{value.dtype} with the value {value!s:.80}"
        return f"an array {value.dtype}{list(value.shape)}"
    name = type(value).__name__.strip("_") or "object"
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def is_list(value: Any) -> bool:
    """Returns True for an iterable, except str, bytes, mappings and classes."""
    return isinstance(value, Iterable) and not isinstance(
        value, str | bytes | Mapping | type
    )


def is_path(value: Any) -> bool:
    """Returns True for a str, or a path object for a str path."""
    return isinstance(value, str | os.PathLike) and isinstance(os.fspath(value), str)


def check_int(name: str, value: Any, *, least: int | None = None) -> int:
    """Returns `value` as a plain int of at least `least`, or raises OptionError."""
    try:
        number = None if isinstance(value, bool) else int(operator.index(value))
    except (TypeError, ValueError):
        number = None
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f" of at least {least}"
        raise errors.OptionError(
            f"{name} must be a whole number{bound}, got {describe(value)}"
        )
    return number


def check_choice(name: str, value: Any, choices: Sequence[T]) -> T:
    """Returns `value`, one of `choices`, or raises OptionError."""
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    *most, last = map(repr, choices)
    raise errors.OptionError(
        f"{name} must be {', '.join(most)} or {last}, got {describe(value)}"
    )


def check_ints(
    name: str, values: Any, *, least: int | None = None, or_none: bool = False
) -> tuple[Any, ...]:
    """Returns ints, and None if `or_none`; raises OptionError for other values."""
    if not is_list(values):
        raise errors.OptionError(
            f"{name} must be a list of whole numbers, got {describe(values)}"
        )
    return tuple(
        [
            None if value is None and or_none else check_int(name, value, least=least)
            for value in values
        ]
    )


def check_number(name: str, value: Any) -> None:
    """Raises OptionError if `value` is NaN or not a real number."""
    try:
        is_number = not isinstance(value, bool | str | bytes) and value == float(value)
    except (TypeError, ValueError):
        is_number = False
    if not is_number:
        raise errors.OptionError(f"{name} must be a number, got {describe(value)}")


def check_positive(name: str, value: Any) -> None:
    """Raises OptionError if `value` is not a number above 0."""
    check_number(name, value)
    if value <= 0:
        raise errors.OptionError(f"{name} must be positive, got {value}")


def check_not_negative(name: str, value: Any) -> None:
    """Raises OptionError if `value` is not a number of at least 0."""
    check_number(name, value)
    if value < 0:
        raise errors.OptionError(f"{name} must be 0 or more, got {value}")


def check_function(name: str, value: Any, meaning: str = "") -> None:
    """Raises OptionError if `value` cannot be called; `meaning` says what it does."""
    if not callable(value):
        wanted = f"a function {meaning}" if meaning else "a function"
        raise errors.OptionError(f"{name} must be {wanted}, got {describe(value)}")


def check_timeout(value: Any) -> None:
    """Raises OptionError unless `timeout_secs` is None or a number of at least 0."""
    if value is not None:
        check_not_negative("timeout_secs", value)
