"""Pure functions that convert leaf infos to the JSON files of Orbax, and back.

Parsed text is not trusted.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flaxckpt import _arrays, _state, _util, errors
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import JSON, Shape

MANIFEST = "flaxckpt.json"
MAX_BYTES = 64 * 2**20
"""Largest metadata file that is read; 100,000 leaves take about 20 MB."""

_MAX_AXES = 64

UNSAFE = re.compile(r"\0|\\|^/|//|(?:^|/)\.{1,2}(?:/|$)")
"""Parts of the name of a file or an array that could lead out of a directory."""

_HANDLERS = "orbax.checkpoint._src.handlers."
STATE_HANDLER = f"{_HANDLERS}standard_checkpoint_handler.StandardCheckpointHandler"
JSON_HANDLER = f"{_HANDLERS}json_checkpoint_handler.JsonCheckpointHandler"

_VALUE_TYPES = {
    "numpy.ndarray": "np.ndarray",
    # Orbax has no complex scalars, and loses the types of numpy scalars.
    "numpy.generic": "np.ndarray",
    "complex": "np.ndarray",
    "int": "scalar",
    "float": "scalar",
    "bool": "scalar",
    "str": "string",
}
EMPTIES = {"dict": "Dict", "list": "List", "tuple": "Tuple", "None": "None"}
PYTHON_OF_KIND = {
    "int": "int",
    "uint": "int",
    "float": "float",
    "bool": "bool",
    "complex": "complex",
}


_text = json.JSONEncoder(separators=(",", ":")).encode
"""Compact JSON; NaN and infinities as Python and Orbax write them.

The rows of leaves are joined from cached texts, as most texts recur: a dict for each
leaf would take three times as long.
"""


def dumps(data: JSON) -> bytes:
    """Returns compact JSON, with NaN and infinities as in Python and Orbax."""
    return _text(data).encode()


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


# ---- writing ----------------------------------------------------------------------


def param_name(keys: Iterable[_state.tree.Key]) -> str:
    """Returns Orbax's name of a leaf, the keys joined by dots."""
    return ".".join([str(key.name) for key in keys])


def tree_metadata(
    infos: Iterable[LeafInfo], *, ocdbt: bool, zarr_version: int = 3
) -> bytes:
    """Returns the content of `_METADATA`."""
    key_text = functools.cache(_key_text)
    shape_text = functools.cache(_text)
    rows = []
    for info in infos:
        names = tuple([str(key.name) for key in info.keys])
        keys = ",".join([key_text(key) for key in info.keys])
        rows.append(
            f'{_text(str(names))}:{{"key_metadata":[{keys}],'
            f'"value_metadata":{_value_text(info, shape_text)}}}'
        )
    return (
        f'{{"tree_metadata":{{{",".join(rows)}}},"use_ocdbt":{_text(ocdbt)},'
        f'"use_zarr3":{_text(zarr_version == 3)},'
        '"store_array_data_equal_to_fill_value":true,"custom_metadata":null}'
    ).encode()


def _key_text(key: _state.tree.Key) -> str:
    return _text({"key": str(key.name), "key_type": 1 if key.kind == "index" else 2})


def _value_text(info: LeafInfo, shape_text: Callable[[Shape], str]) -> str:
    if info.kind == "empty":
        value_type = EMPTIES[info.python_type]
        return f'{{"value_type":"{value_type}","skip_deserialize":true}}'
    if info.python_type == "jax.Array":
        shape = _arrays.layout.write_shape(info, _arrays.layout.stored_form(info)[0])
        return (
            '{"value_type":"jax.Array","skip_deserialize":false,'
            f'"write_shape":{shape_text(shape)}}}'
        )
    value_type = _VALUE_TYPES[info.python_type]
    return f'{{"value_type":"{value_type}","skip_deserialize":false}}'


def shardings(infos: Iterable[LeafInfo]) -> bytes:
    """Returns the content of `_sharding`, Orbax's default shardings on a restore."""
    sharding_text = functools.cache(lambda sharding: _text(_text(_sharding(sharding))))
    rows = []
    for info in infos:
        if info.python_type == "jax.Array":
            name = base64.urlsafe_b64encode(param_name(info.keys).encode()).decode()
            rows.append(f'"{name}":{sharding_text(info.sharding)}')
    return f"{{{','.join(rows)}}}".encode()


def _sharding(sharding: jax.sharding.Sharding | None) -> JSON:
    if isinstance(sharding, NamedSharding) and isinstance(
        sharding.mesh, jax.sharding.Mesh
    ):
        mesh = sharding.mesh
        return {
            "sharding_type": "NamedSharding",
            "shape": list(mesh.devices.shape),
            "axis_names": [str(name) for name in mesh.axis_names],
            "axis_types": [str(kind) for kind in mesh.axis_types],
            "partition_spec": [
                list(part) if isinstance(part, tuple) else part
                for part in sharding.spec
            ],
            "device_mesh": {"mesh": _device_ids(mesh.devices)},
        }
    # A mesh of device 0, which always exists. Unlike a SingleDeviceSharding, which
    # names its platform, it loads on any kind of device.
    return {
        "sharding_type": "NamedSharding",
        "shape": [1],
        "axis_names": ["x"],
        "partition_spec": [],
        "device_mesh": {"mesh": [{"id": 0}]},
    }


def _device_ids(devices: Any) -> JSON:
    """Returns the ids in a nested array of devices."""
    if isinstance(devices, np.ndarray):
        return [_device_ids(part) for part in devices]
    return {"id": int(devices.id)}


def array_metadatas(infos: Iterable[LeafInfo]) -> bytes:
    """Returns the content of `array_metadatas/process_0`."""
    shape_text = functools.cache(_text)
    rows = []
    for info in infos:
        if info.chunk_shape is None:
            continue
        shape = _arrays.layout.write_shape(info, _arrays.layout.stored_form(info)[0])
        impl = info.prng_impl
        extra = {"random_key_impl": impl} if impl else None
        rows.append(
            f'{{"array_metadata":{{"param_name":{_text(param_name(info.keys))},'
            f'"write_shape":{shape_text(shape)},'
            f'"chunk_shape":{shape_text(info.chunk_shape)},'
            f'"ext_metadata":{_text(extra) if extra else "null"}}}}}'
        )
    return f'{{"array_metadatas":[{",".join(rows)}]}}'.encode()


def strings(values: Mapping[str, str]) -> bytes:
    """Returns the content of `_strings.json` for a map of param name -> string."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split("/")
        inner = nested
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return dumps(nested)


# ---- parsing ----------------------------------------------------------------------


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
