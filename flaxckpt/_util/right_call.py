"""The call that was meant, from one with wrong, swapped or missing arguments.

A value takes the place of a parameter of its kind: an int is a step, a str a name or a
path, a dict of numbers metrics, and anything else a state.
"""

from __future__ import annotations

import difflib
import inspect
import json
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

MODES = ("min", "max")
"""Texts that only take the place of each other."""

_NOUNS = ("format", "item", "metrics", "source", "step", "step_a", "step_b")
"""Keywords that are often passed by position."""

_STATE = "PyTree"
_NUMBERS = "Mapping[str, float]"
"""Annotations of states and metrics."""

_SHOWN_CHARS = 60
_ALIKE = 0.75


def write(
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
) -> str:
    """Returns the call that was probably meant, `save(1, state)`, without `self`."""
    parameters = _parameters(function)
    places, _ = _assign(parameters, args, options)
    return _format(name, parameters, places)


def write_swapped(
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
) -> str | None:
    """Returns the call with positional arguments in other places; None if unclear."""
    parameters = _parameters(function)
    places, has_all = _assign(parameters, args, options)
    given = dict(zip(parameters, args, strict=False)) | dict(options)
    is_same = places.keys() == given.keys() and all(
        places[each] is given[each] for each in given
    )
    has_all &= options.keys() <= parameters.keys()
    is_whole = has_all and all(
        each in places or _is_optional(parameter)
        for each, parameter in parameters.items()
    )
    return _format(name, parameters, places) if is_whole and not is_same else None


def nearest(function: Callable[..., Any], name: str) -> str | None:
    """Returns the parameter of a function with nearly the same name, or None."""
    close = difflib.get_close_matches(name, _parameters(function), 1, _ALIKE)
    return close[0] if close else None


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {
        name: parameter
        for name, parameter in parameters.items()
        if name != "self"
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def _assign(
    parameters: Mapping[str, inspect.Parameter],
    args: Sequence[Any],
    options: Mapping[str, Any],
) -> tuple[dict[str, Any], bool]:
    """Returns the value for each parameter, and whether every value has a place."""
    places = {name: value for name, value in options.items() if name in parameters}
    left = [*args]
    for name in sorted(parameters, key=lambda name: _is_optional(parameters[name])):
        fitting = [
            at for at, value in enumerate(left) if _fits(parameters[name], value)
        ]
        if name not in places and fitting:
            places[name] = left.pop(fitting[0])
    return places, not left


def _is_optional(parameter: inspect.Parameter) -> bool:
    return parameter.default is not parameter.empty


def _fits(parameter: inspect.Parameter, value: Any) -> bool:
    """Returns whether a positional value may be meant for a parameter."""
    is_noun = parameter.kind is not parameter.KEYWORD_ONLY or parameter.name in _NOUNS
    wanted = _NUMBERS if parameter.name == "metrics" else str(parameter.annotation)
    return is_noun and any(kind in wanted for kind in _kinds(value))


def _kinds(value: Any) -> Iterator[str]:
    """Yields parts of the annotations of parameters that a value may be meant for."""
    if isinstance(value, str | os.PathLike):
        yield repr(value)  # of a Literal
        if value not in MODES:
            yield from ("str", "PathLike")
    elif value is not None and not isinstance(value, bool):
        if _is_integer(value):
            yield "int"
            return
        if _is_numbers(value):
            yield _NUMBERS
        yield _STATE


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except Exception:  # arrays of other libraries may raise anything
        return False
    return True


def _is_numbers(value: Any) -> bool:
    """Returns True for a dict of plain numbers, as metrics are."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(type(each) in (int, float) for each in value.values())
    )


def _format(
    name: str, parameters: Mapping[str, inspect.Parameter], places: Mapping[str, Any]
) -> str:
    words = []
    has_gap = False
    for each, parameter in parameters.items():
        is_state = str(parameter.annotation).startswith(_STATE)
        is_state &= parameter.kind is not parameter.KEYWORD_ONLY
        if each not in places and _is_optional(parameter) and not is_state:
            has_gap = True
            continue
        text = _show(each, parameter, places)
        is_named = has_gap or parameter.kind is parameter.KEYWORD_ONLY
        words.append(f"{each}={text}" if is_named else text)
    return f"{name}({', '.join(words)})"


def _show(name: str, parameter: inspect.Parameter, places: Mapping[str, Any]) -> str:
    """Returns the text of an argument: its value if short, else what it is."""
    value = places.get(name)
    if str(parameter.annotation).startswith(_STATE):
        return "state"
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
    elif name in places and (isinstance(value, int) or _is_numbers(value)):
        text = repr(value)
    else:
        return name
    return text if len(text) <= _SHOWN_CHARS else name
