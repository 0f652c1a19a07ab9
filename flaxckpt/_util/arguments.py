"""Arguments: what they must be, and what was found instead.

Who swaps two arguments, or passes a text for a number, is told so at the call, in the
words of the call.
"""

from __future__ import annotations

import operator
import os
import types
from collections.abc import Iterable, Mapping
from typing import Any

from flaxckpt import errors

_PLAIN = (bool, int, float, complex, str, bytes)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def found(value: Any) -> str:
    """Describes an unexpected value in a few words, never by its contents."""
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
    """Whether `value` can be gone through, and is no text, dict or class."""
    return isinstance(value, Iterable) and not isinstance(
        value, str | bytes | Mapping | type
    )


def is_path(value: Any) -> bool:
    """Whether `value` is a path as text, or can be made one."""
    return isinstance(value, str | os.PathLike) and isinstance(os.fspath(value), str)


def whole(name: str, value: Any, *, least: int | None = None) -> int:
    """`value` as a plain int.

    Raises:
        OptionError: It is no whole number, or less than `least`.
    """
    try:
        number = None if isinstance(value, bool) else int(operator.index(value))
    except (TypeError, ValueError):
        number = None
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f" of at least {least}"
        raise errors.OptionError(
            f"{name} must be a whole number{bound}, got {found(value)}"
        )
    return number


def wholes(
    name: str, values: Any, *, least: int | None = None, or_none: bool = False
) -> tuple[Any, ...]:
    """`values`, each a plain int, or None if that is allowed.

    Raises:
        OptionError: They are no list, or something else is among them.
    """
    if not is_list(values):
        raise errors.OptionError(
            f"{name} must be a list of whole numbers, got {found(values)}"
        )
    return tuple(
        [
            None if value is None and or_none else whole(name, value, least=least)
            for value in values
        ]
    )


def number(name: str, value: Any) -> None:
    """Asserts that `value` is a real number.

    Raises:
        OptionError: It is none, or NaN.
    """
    try:
        is_number = not isinstance(value, bool | str | bytes) and value == float(value)
    except (TypeError, ValueError):
        is_number = False
    if not is_number:
        raise errors.OptionError(f"{name} must be a number, got {found(value)}")


def positive(name: str, value: Any) -> None:
    """Asserts that `value` is a number above 0.

    Raises:
        OptionError: It is something else.
    """
    number(name, value)
    if value <= 0:
        raise errors.OptionError(f"{name} must be positive, got {value}")


def not_negative(name: str, value: Any) -> None:
    """Asserts that `value` is a number of at least 0.

    Raises:
        OptionError: It is something else.
    """
    number(name, value)
    if value < 0:
        raise errors.OptionError(f"{name} must be 0 or more, got {value}")


def seconds(name: str, value: Any) -> None:
    """Asserts that `value` is a time to wait in seconds, or None.

    Raises:
        OptionError: It is something else.
    """
    if value is not None:
        number(name, value)
        if value < 0:
            raise errors.OptionError(f"{name} must be 0 or more seconds, got {value}")
