"""Texts that tell the functions of transforms apart, so that a run undoes its own."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_LONGEST = 160
_DEEPEST = 3
_MOST_BYTES = 2**20
"""Of an array whose values are read."""


def name(fn: Callable[..., Any]) -> str:
    """Returns the name of a function, or of the class of an object."""
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


def describe(fn: Callable[..., Any]) -> str:
    """Returns the name of a function, and what tells it from others of this name.

    For example `f.<locals>.<lambda>: lambda x: x * k, k=2`: a lambda's source, and
    values from outside.
    """
    detail = ", ".join(_details(fn, 0))
    if len(detail) > _LONGEST:
        detail = f"{detail[:_LONGEST]}… {zlib.crc32(detail.encode()):08x}"
    return f"{name(fn)}: {detail}" if detail else name(fn)


def is_described(recorded: str, described: str) -> bool:
    """Returns True for the text of `describe`, or the name alone, as of release 0.1."""
    return described == recorded or described.startswith(f"{recorded}: ")


def _details(fn: Any, depth: int) -> Iterator[str]:
    if isinstance(fn, functools.partial):
        yield _show(fn.func, depth)
        yield from (_show(value, depth) for value in fn.args)
        yield from (f"{k}={_show(v, depth)}" for k, v in sorted(fn.keywords.items()))
        return
    fn = inspect.unwrap(fn)
    if not isinstance(fn, types.FunctionType) or "<" not in fn.__qualname__:
        return
    code = fn.__code__
    if code.co_name == "<lambda>":
        yield _read_source(code) or f"code {_digest(code):08x}"
    values: dict[str, Any] = dict(fn.__kwdefaults__ or {})
    names = code.co_varnames[: code.co_argcount]
    values |= zip(names[::-1], (fn.__defaults__ or ())[::-1], strict=False)
    for key in code.co_names:
        value = fn.__globals__.get(key)
        if isinstance(value, (bool, int, float, complex)) or _is_array(value):
            values[key] = value
    for key, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not set yet
            values[key] = cell.cell_contents
    yield from (f"{key}={_show(values[key], depth)}" for key in sorted(values))


def _is_array(value: Any) -> bool:
    jax = sys.modules.get("jax")  # without it, there are no arrays of it
    arrays = (np.generic, np.ndarray, *([jax.Array] if jax else []))
    return isinstance(value, arrays)


def _show(value: Any, depth: int) -> str:
    """Returns a text for a value that is the same in each process and run."""
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_show(each, depth) for each in value)})"
    if _is_array(value):
        text = f"{value.dtype}{list(value.shape)}"
        is_here = getattr(value, "is_fully_addressable", True)
        is_key = not isinstance(value.dtype, np.dtype)
        if not is_here or is_key or value.nbytes > _MOST_BYTES:
            return text
        return f"{text} {zlib.crc32(np.asarray(value).tobytes()):08x}"
    if not callable(value):
        return type(value).__qualname__
    inner = ", ".join(_details(value, depth + 1)) if depth < _DEEPEST else ""
    return f"{name(value)}({inner})" if inner else name(value)


def _read_source(code: types.CodeType) -> str | None:
    """Returns the source of a lambda, without its layout; None if unknown."""
    try:
        lines, _ = inspect.findsource(code)
        tree = ast.parse("".join(lines))
    except (OSError, SyntaxError, ValueError):
        return None
    places = set(code.co_positions())
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Lambda)
        and (body := node.body).lineno >= code.co_firstlineno
        and (body.lineno, body.end_lineno, body.col_offset, body.end_col_offset)
        in places
    ]
    return ast.unparse(found[0]) if len(found) == 1 else None


def _digest(code: types.CodeType) -> int:
    parts = [code.co_code, repr(code.co_names).encode()]
    for value in code.co_consts:
        is_code = isinstance(value, types.CodeType)
        parts.append(repr(_digest(value) if is_code else value).encode())
    return zlib.crc32(b"\0".join(parts))
