"""Pure functions that convert leaf infos to the files of a tree, as Orbax reads them.

The rows of leaves are joined from cached texts, as most texts recur: a dict for each
leaf would take three times as long.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from flaxckpt import _arrays, _state
from flaxckpt._formats import orbax_json
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import JSON, Shape

_text = orbax_json.to_text

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


def tree_metadata(infos: Iterable[LeafInfo], *, zarr_version: int = 3) -> bytes:
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
        f'{{"tree_metadata":{{{",".join(rows)}}},"use_ocdbt":true,'
        f'"use_zarr3":{_text(zarr_version == 3)},'
        '"store_array_data_equal_to_fill_value":true,"custom_metadata":null}'
    ).encode()


def _key_text(key: _state.tree.Key) -> str:
    return _text({"key": str(key.name), "key_type": 1 if key.kind == "index" else 2})


def _value_text(info: LeafInfo, shape_text: Callable[[Shape], str]) -> str:
    if info.kind == "empty":
        value_type = orbax_json.EMPTIES[info.python_type]
        return f'{{"value_type":"{value_type}","skip_deserialize":true}}'
    if info.python_type == "jax.Array":
        shape = _arrays.layout.write_shape(info, _arrays.forms.stored_form(info)[0])
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
            name = base64.urlsafe_b64encode(
                orbax_json.param_name(info.keys).encode()
            ).decode()
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
        shape = _arrays.layout.write_shape(info, _arrays.forms.stored_form(info)[0])
        impl = info.prng_impl
        extra = {"random_key_impl": impl} if impl else None
        rows.append(
            f'{{"array_metadata":{{"param_name":{_text(orbax_json.param_name(info.keys))},'
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
    return orbax_json.dumps(nested)
