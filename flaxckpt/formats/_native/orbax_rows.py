"""Parses Orbax's metadata of leaves: rows of `_METADATA`, and `_sharding`.

Pure functions, which do not trust their input.
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
    """Returns the keys of an entry of `_METADATA`.

    Raises:
        ValueError, KeyError, TypeError: The entry is malformed.
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
    """Returns the Python type of a leaf restored without a target state.

    Raises:
        ValueError: The value type is unknown.
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
    """Returns our name of an empty container's value type; None for a leaf."""
    return {"Dict": "dict", "List": "list", "Tuple": "tuple"}.get(
        value_type, "None" if value_type in ("None", "NamedTuple") else None
    )


# ---- how arrays were split -------------------------------------------------------


class Split(NamedTuple):
    """The sharding of an array over a mesh at the save.

    Attributes:
        spec: The partition spec.
        parts: Number of parts along each of the first axes.
    """

    spec: PartitionSpec
    parts: tuple[int, ...]

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Returns the shard shape of an array; None if whole or not divisible."""
        parts = [*self.parts, *[1] * (len(shape) - len(self.parts))]
        if len(parts) != len(shape) or any(
            n % k for n, k in zip(shape, parts, strict=True)
        ):
            return None
        shard = tuple(n // k for n, k in zip(shape, parts, strict=True))
        return None if shard == tuple(shape) else shard


def splits(data: Mapping[str, Any]) -> dict[str, Split]:
    """Parses `_sharding`: param name -> split of the array.

    Arrays on a single device are left out, and so are malformed entries, because
    reading the values does not depend on them.
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
                _arrays.zarr.metadata.sizes(data["shape"]),
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
