"""What Orbax says of a leaf: rows of `_METADATA`, and the metadata of its array.

Pure, and never trusted.
"""

from __future__ import annotations

import base64
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from flaxckpt import _arrays, _state
from flaxckpt.formats._native import orbax_json

_MAX_AXES = 64


def keys(row: Any) -> tuple[_state.tree.Key, ...]:
    """The keys of one entry of `_METADATA`.

    Raises:
        ValueError, KeyError, TypeError: The entry is not one.
    """
    keys = []
    for key in row["key_metadata"]:
        name = key["key"]
        if type(name) not in (str, int):
            raise ValueError(f"the key {str(name)[:80]} is no text")
        if key["key_type"] == 1:
            keys.append(_state.tree.Key(int(name), "index"))
        else:
            keys.append(_state.tree.Key(str(name), "key"))
    if len(keys) > _state.tree.MAX_DEPTH:
        raise ValueError(f"{keys[0].name} … is nested {len(keys)} deep")
    return tuple(keys)


def python_type(value_type: str, dtype: str) -> str:
    """What a leaf that Orbax wrote comes back as when no state is given.

    Raises:
        ValueError: Orbax has no such value type.
    """
    match value_type:
        case "jax.Array":
            return "jax.Array"
        case "np.ndarray":
            return "numpy.ndarray"
        case "scalar":
            return orbax_json.PYTHON_OF_KIND[_state.dtypes.kind(dtype)]
        case _:
            raise ValueError(f"value type {value_type!r} is not known")


def empty(value_type: str) -> str | None:
    """Our name of an empty container in `_METADATA`; None if it is a leaf."""
    return {"Dict": "dict", "List": "list", "Tuple": "tuple"}.get(
        value_type, "None" if value_type in ("None", "NamedTuple") else None
    )


# ---- how arrays were split -------------------------------------------------------


class Split(NamedTuple):
    """How an array was split over a mesh when it was saved.

    Attributes:
        spec: Its partition spec.
        parts: Into how many parts each of the first axes was cut.
    """

    spec: PartitionSpec
    parts: tuple[int, ...]

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """The part of an array that one device held; None if it was all of it."""
        parts = [*self.parts, *[1] * (len(shape) - len(self.parts))]
        if len(parts) != len(shape) or any(
            n % k for n, k in zip(shape, parts, strict=True)
        ):
            return None
        shard = tuple(n // k for n, k in zip(shape, parts, strict=True))
        return None if shard == tuple(shape) else shard


def splits(data: Mapping[str, Any]) -> dict[str, Split]:
    """Param name -> how the array was split, from the content of `_sharding`.

    Arrays on one device are left out, and so is what does not say how it was split:
    nothing that is read depends on it.
    """
    found = {}
    split_of = functools.cache(_split)  # many arrays are split alike
    for key, text in data.items():
        try:
            name = base64.urlsafe_b64decode(key).decode()
            split = split_of(text) if isinstance(text, str) else None
        except ValueError:
            continue
        if split is not None:
            found[name] = split
    return found


def _split(text: str) -> Split | None:
    try:
        data = json.loads(text)
        if data["sharding_type"] != "NamedSharding":
            return None
        sizes = dict(
            zip(
                data["axis_names"],
                _arrays.zarr.limits.sizes(data["shape"]),
                strict=True,
            )
        )
        spec = [tuple(p) if isinstance(p, list) else p for p in data["partition_spec"]]
        axes = [p if isinstance(p, tuple) else () if p is None else (p,) for p in spec]
        used = [axis for part in axes for axis in part]
        is_text = all(isinstance(axis, str) for axis in used)
        if not is_text or len(set(used)) < len(used) or len(spec) > _MAX_AXES:
            return None
        parts = tuple(math.prod(sizes[axis] for axis in part) for part in axes)
        if 0 in parts:
            return None
        return Split(PartitionSpec(*spec), parts)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
