"""Pure functions that parse the JSON files of Orbax; the text is not trusted."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flaxckpt import _state, _storage, _util, _zarr, errors
from flaxckpt._state.leaf import MeshAxes
from flaxckpt._types import JSON

MANIFEST = _storage.commit_marker.MANIFEST
MAX_BYTES = 64 * 2**20
"""Largest metadata file that is read; 100,000 leaves take about 20 MB."""

_MAX_AXES = 64

UNSAFE = re.compile(r"\0|\\|^/|//|(?:^|/)\.{1,2}(?:/|$)")
"""Parts of the name of a file or an array that could lead out of a directory."""

EMPTIES = {"dict": "Dict", "list": "List", "tuple": "Tuple", "None": "None"}
PYTHON_OF_KIND = {
    "int": "int",
    "uint": "int",
    "float": "float",
    "bool": "bool",
    "complex": "complex",
}


to_text = json.JSONEncoder(separators=(",", ":")).encode
"""Returns compact JSON, with NaN and infinities as in Python and Orbax."""


def dumps(data: JSON) -> bytes:
    """Returns `to_text` as bytes."""
    return to_text(data).encode()


def parse(content: bytes, path: object) -> JSON:
    """Parses JSON of any type.

    Raises:
        DamagedCheckpointError: `content` is not JSON.
    """
    try:
        _util.json_limits.check(content)
        data: JSON = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise errors.DamagedCheckpointError(
            f"{path} is not valid JSON ({errors.one_line(error, 100)}); restore"
            " another step"
        ) from None
    return data


def loads(content: bytes, path: object) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
        DamagedCheckpointError: `content` is not a JSON object.
    """
    data = parse(content, path)
    if not isinstance(data, dict):
        raise errors.DamagedCheckpointError(
            f"{path}: wanted a JSON object, found a {type(data).__name__}; restore"
            " another step"
        )
    return data


def check_size(content: bytes) -> None:
    """Raises ValueError if JSON exceeds the limits of our readers."""
    if len(content) > MAX_BYTES:
        raise ValueError(
            f"it has {len(content)} bytes; readers accept at most {MAX_BYTES}"
        )
    _util.json_limits.check(content)


def param_name(keys: Iterable[_state.tree.Key]) -> str:
    """Returns Orbax's name of a leaf, the keys joined by dots."""
    return ".".join([str(key.name) for key in keys])


def string_at(data: Mapping[str, Any], name: str) -> str:
    """Returns the string of the leaf `name` from the content of `_strings.json`.

    Raises:
        KeyError: No such string exists.
    """
    value: Any = data
    for part in name.split("/"):
        if not isinstance(value, dict):
            raise KeyError(name)
        value = value[part]
    if not isinstance(value, str):
        raise KeyError(name)
    return value


def parse_keys(row: Any) -> tuple[_state.tree.Key, ...]:
    """Returns the keys of an entry of `_METADATA`.

    Raises:
        ValueError, KeyError, TypeError: The entry is malformed.
    """
    keys = []
    for key in row["key_metadata"]:
        name = key["key"]
        if type(name) not in (str, int):
            raise ValueError(f"the key {str(name)[:80]} is not a string")
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
            return PYTHON_OF_KIND[_state.dtypes.kind(dtype)]
        case _:
            raise ValueError(f"unknown value type {value_type!r}")


def empty_type(value_type: str) -> str | None:
    """Returns our name of an empty container's value type; None for a leaf."""
    return {"Dict": "dict", "List": "list", "Tuple": "tuple"}.get(
        value_type, "None" if value_type in ("None", "NamedTuple") else None
    )


def parse_mesh_axes(part: Any) -> MeshAxes:
    """Returns the mesh axes of a part of a partition spec, as `PartitionSpec` has them.

    Raises:
        ValueError: `part` is neither the name of an axis, a list of names, nor null.
    """
    names = part if isinstance(part, list) else [part]
    if any(isinstance(name, list | dict) for name in names):
        raise ValueError(f"{str(part)[:80]} is not a part of a partition spec")
    return tuple(names) if len(names) > 1 else names[0] if names else None


class Split(NamedTuple):
    """The sharding of an array over a mesh at the save.

    Attributes:
        mesh_axes: The partition spec as a tuple; see `LeafInfo`.
        parts: Number of parts along each of the first axes.
    """

    mesh_axes: tuple[MeshAxes, ...]
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


def parse_splits(data: Mapping[str, Any]) -> dict[str, Split]:
    """Parses `_sharding`: param name -> split of the array.

    Arrays on a single device are left out, and so are malformed entries, because
    reading the values does not depend on them.
    """
    splits = {}
    parse = functools.cache(_parse_split)  # many arrays are split alike
    for key, text in data.items():
        with contextlib.suppress(ValueError):
            name = base64.urlsafe_b64decode(key).decode()
            if isinstance(text, str) and (split := parse(text)):
                splits[name] = split
    return splits


def _parse_split(text: str) -> Split | None:
    try:
        data = json.loads(text)
        if data["sharding_type"] != "NamedSharding":
            return None
        sizes = dict(
            zip(
                data["axis_names"],
                _zarr.metadata.sizes(data["shape"]),
                strict=True,
            )
        )
        spec = tuple(map(parse_mesh_axes, data["partition_spec"]))
        axes = [p if isinstance(p, tuple) else () if p is None else (p,) for p in spec]
        used = [axis for part in axes for axis in part]
        is_text = all(isinstance(axis, str) for axis in used)
        if not is_text or len(set(used)) < len(used) or len(spec) > _MAX_AXES:
            return None
        parts = tuple(math.prod(sizes[axis] for axis in part) for part in axes)
        if 0 in parts:
            return None
        return Split(spec, parts)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
