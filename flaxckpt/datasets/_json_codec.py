"""Converts the state of an iterator to JSON and back, with its types.

Types that JSON lacks become an object with a single key, a tag. Without pickle, reading
can only return data.
"""

from __future__ import annotations

import base64
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flaxckpt import _state, _util
from flaxckpt.datasets import _duck_types

VERSION = 2
"""Version of the tags. Version 1 lacks the newer tags; version 0 is plain JSON."""

MAX_STATE_BYTES = 256 * 2**20
"""Limit for a file, on writing and on reading."""

_LONG = 2**16
"""Texts longer than this are not indented for readability."""

_BYTES, _TUPLE, _ARRAY = "__bytes__", "__tuple__", "__ndarray__"
_SCALAR, _TENSOR, _DICT = "__scalar__", "__tensor__", "__dict__"
_TAGS = (
    frozenset[str](),
    frozenset((_BYTES, _TUPLE, _ARRAY)),
    frozenset((_BYTES, _TUPLE, _ARRAY, _SCALAR, _TENSOR, _DICT)),
)


def dumps(state: Any) -> bytes:
    """Converts `state` to JSON; JSON's own types exactly as `json.dumps` does.

    Indented like grain's files, unless long. Raises TypeError or ValueError for objects
    other than data, and for data that JSON cannot restore; the message names them.
    """
    encoded = _encode(state, "state", 0)
    text = json.dumps(encoded)
    # Indenting uses the slow encoder written in Python.
    return (text if len(text) > _LONG else json.dumps(encoded, indent=4)).encode()


def loads(content: bytes, *, version: int = VERSION) -> Any:
    """Converts JSON from `dumps` back to the state; `version` is that of its tags.

    Raises ValueError if the JSON is invalid, or would need too much memory.
    """
    check_size(content)
    if not 0 <= version < len(_TAGS):
        raise ValueError(f"it has tags of version {version}: use a newer flaxckpt")
    return json.loads(
        content, object_hook=functools.partial(_untag, tags=_TAGS[version])
    )


def check_size(content: bytes) -> None:
    """Raises ValueError for JSON above the limits of writing and reading."""
    if len(content) > MAX_STATE_BYTES:
        raise ValueError(
            f"it takes {len(content)} bytes, more than {MAX_STATE_BYTES}:"
            " use an iterator without a large shuffle buffer"
        )
    try:
        _util.json_limits.check(content)
    except ValueError as error:
        raise ValueError(f"{error}: store long lists as numpy arrays") from None


def is_own_json(content: bytes) -> bool:
    """Returns True if bytes can be stored as JSON unchanged, as an untagged object."""
    try:
        check_size(content)
        data = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and not _is_tagged(data)


def _is_tagged(data: dict[str, Any]) -> bool:
    """Returns True for a JSON object in the form of a tag."""
    return len(data) == 1 and not _TAGS[-1].isdisjoint(data)


# ---- writing --------------------------------------------------------------------


def _encode(state: Any, at: str, depth: int) -> Any:
    if depth > _util.json_limits.MAX_DEPTH:
        raise TypeError(
            f"{at[:80]} … is nested more than {_util.json_limits.MAX_DEPTH} deep, or"
            " contains itself"
        )
    if isinstance(state, np.generic) and not isinstance(state, str | bytes):
        return {_SCALAR: _array(np.asarray(state), at)}
    if isinstance(state, str):
        return _util.json_limits.check_text(state, at)
    if state is None or isinstance(state, bool | int | float):
        return state
    if isinstance(state, bytes):
        return {_BYTES: _text(state)}
    if isinstance(state, np.ma.MaskedArray):  # the mask would be lost
        raise _type_error(state, at)
    if isinstance(state, np.ndarray):
        return {_ARRAY: _array(state, at)}
    if isinstance(state, Mapping):
        return _dict(state, at, depth)
    if isinstance(state, list):
        return _items(state, at, depth)
    if isinstance(state, tuple) and not hasattr(state, "_fields"):
        return {_TUPLE: _items(state, at, depth)}
    if _duck_types.is_a(state, "torch.Tensor"):
        return {_TENSOR: _tensor(state)}
    raise _type_error(state, at)


def _items(state: Sequence[Any], at: str, depth: int) -> list[Any]:
    return [_encode(item, f"{at}[{i}]", depth + 1) for i, item in enumerate(state)]


def _dict(state: Mapping[Any, Any], at: str, depth: int) -> Any:
    plain = all(type(key) is str for key in state)
    encoded = [
        (key, _encode(value, f"{at}[{key!r}]", depth + 1))
        for key, value in state.items()
    ]
    for key in state if plain else ():
        _util.json_limits.check_text(key, f"{at}.keys()")
    if plain and not _is_tagged(data := dict(encoded)):
        return data
    rows = [[_encode(key, f"{at}.keys()", depth + 1), value] for key, value in encoded]
    return {_DICT: rows}


def _array(array: np.ndarray[Any, Any], at: str) -> dict[str, Any]:
    if _state.dtypes.stored_name(array.dtype.name) is None:
        raise _type_error(array, at)
    native = _state.numpy_dtypes.to_stored(array)
    return {
        "dtype": ("" if array.dtype.isnative else ">") + array.dtype.name,
        "shape": array.shape,
        "data": _text(native.tobytes()),
    }


def _tensor(tensor: Any) -> dict[str, Any]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": _text(flat.view(sys.modules["torch"].uint8).numpy().tobytes()),
    }


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _type_error(value: Any, at: str) -> TypeError:
    kind = _duck_types.type_name(value)
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        kind = f"numpy array of {value.dtype}"
    return TypeError(
        f"it contains a {kind} at {at}: wanted dicts, lists, tuples, numbers, strings,"
        " bytes, numpy arrays or torch tensors"
    )


# ---- reading --------------------------------------------------------------------


def _untag(data: dict[str, Any], *, tags: frozenset[str]) -> Any:
    if len(data) != 1 or tags.isdisjoint(data):
        return data
    [(tag, value)] = data.items()
    match tag, value:
        case "__bytes__", str():
            return _data(value)
        case "__tuple__", list():
            return tuple(value)
        case "__ndarray__", dict():
            return _to_array(value)
        case "__scalar__", dict():
            return _to_array(value)[()]
        case "__tensor__", dict():
            return _to_tensor(value)
        case "__dict__", list():
            return dict(value)
    return data


def _data(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _to_array(row: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    name = row["dtype"]
    dtype = _state.numpy_dtypes.to_numpy(name.removeprefix(">"))
    array = np.frombuffer(_data(row["data"]), dtype).reshape(row["shape"])
    _state.numpy_dtypes.check_bools(array)
    swapped = name.startswith(">")
    return array.astype(dtype.newbyteorder(">")) if swapped else array.copy()


def _to_tensor(row: Mapping[str, Any]) -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        raise ValueError("it contains torch tensors, but torch is not imported")
    dtype = getattr(torch, row["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no type {row['dtype']!r}")
    data = bytearray(_data(row["data"]))
    if not data:
        return torch.empty(row["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(row["shape"])
