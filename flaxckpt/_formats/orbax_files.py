"""The files of a checkpoint as Orbax reads and writes them; no text is trusted."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from flaxckpt import _arrays, _state, _zarr
from flaxckpt._formats import orbax_json
from flaxckpt._state.leaf import LeafInfo, MeshAxes
from flaxckpt._types import JSON, LeafPath

if TYPE_CHECKING:
    from jax.sharding import Sharding

_text = orbax_json.to_text

_HANDLERS = "orbax.checkpoint._src.handlers."
STATE_HANDLER = f"{_HANDLERS}standard_checkpoint_handler.StandardCheckpointHandler"
JSON_HANDLER = f"{_HANDLERS}json_checkpoint_handler.JsonCheckpointHandler"

EMPTIES = {"dict": "Dict", "list": "List", "tuple": "Tuple", "None": "None"}
"""Empty container -> its value type."""

_EMPTY_OF = {"NamedTuple": "None", **{kind: name for name, kind in EMPTIES.items()}}

_NUMBERS = ("int", "float", "bool")
PYTHON_OF_KIND = {"uint": "int", **{name: name for name in (*_NUMBERS, "complex")}}
"""Kind of element type -> Python type of a number."""

# Orbax has no complex scalars, and loses the types of numpy scalars.
_ARRAYS = dict.fromkeys(("numpy.ndarray", "numpy.generic", "complex"), "np.ndarray")
_VALUE_TYPES = {
    "jax.Array": "jax.Array",
    **_ARRAYS,
    **dict.fromkeys(_NUMBERS, "scalar"),
    "str": "string",
}


class StepMetadata(NamedTuple):
    """The content of `_CHECKPOINT_METADATA`; times are in seconds since 1970.

    `handlers` are item -> class of its handler, or the class of a single item.
    """

    handlers: Mapping[str, JSON] | str | None = None
    created: float | None = None
    committed: float | None = None
    custom: Mapping[str, JSON] = MappingProxyType({})

    def to_json(self) -> dict[str, JSON]:
        return {
            "item_handlers": self.handlers,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": int((self.created or 0) * 1e9),
            "commit_timestamp_nsecs": time.time_ns(),
            "custom_metadata": dict(self.custom),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepMetadata:
        """Parses the content; malformed fields count as not recorded."""
        handlers = data.get("item_handlers")
        handlers = handlers if isinstance(handlers, dict | str) else None
        created = _seconds(data.get("init_timestamp_nsecs"))
        committed = _seconds(data.get("commit_timestamp_nsecs"))
        return cls(handlers, created, committed, custom_metadata(data))


def _seconds(nanoseconds: object) -> float | None:
    if not isinstance(nanoseconds, int | float) or not abs(nanoseconds) < 1e30:
        return None  # not NaN, either
    return nanoseconds / 1e9


def custom_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the user's own metadata; Orbax 0.11.0 to 0.11.5 called it `custom`."""
    custom = metadata.get("custom_metadata", metadata.get("custom"))
    return custom if isinstance(custom, dict) else {}


# ---- _METADATA, _sharding, array_metadatas ------------------------------------------


class TreeFiles(NamedTuple):
    """The contents of `_METADATA`, `_sharding` and `array_metadatas/process_0`.

    `_sharding` has Orbax's default shardings on a restore.
    """

    metadata: bytes
    sharding: bytes
    arrays: bytes


def tree_files(
    leaves: Iterable[tuple[LeafInfo, str]], *, zarr_version: int
) -> TreeFiles:
    """Returns the files that describe a tree of leaves with Orbax's names."""
    text, key_text = functools.cache(_text), functools.cache(_key_text)
    sharding_text = functools.cache(lambda sharding: _text(_text(_sharding(sharding))))
    rows, shardings, arrays = [], [], []
    for info, name in leaves:
        is_jax = info.python_type == "jax.Array"
        written = ""
        if info.chunk_shape is not None:
            shape = info.stored_shape
            written = text(_arrays.layout.write_shape(info, shape))
            impl = {"random_key_impl": info.prng_impl} if info.prng_impl else None
            arrays.append(
                f'{{"array_metadata":{{"param_name":{_text(name)},'
                f'"write_shape":{written},"chunk_shape":{text(info.chunk_shape)},'
                f'"ext_metadata":{_text(impl) if impl else "null"}}}}}'
            )
        if is_jax:
            encoded = base64.urlsafe_b64encode(name.encode()).decode()
            shardings.append(f'"{encoded}":{sharding_text(info.sharding)}')
        names = tuple([str(key.name) for key in info.keys])
        keys = ",".join([key_text(key) for key in info.keys])
        is_empty = info.kind == "empty"
        value_type = (EMPTIES if is_empty else _VALUE_TYPES)[info.python_type]
        shape_field = f',"write_shape":{written}' if is_jax else ""
        rows.append(
            f'{_text(str(names))}:{{"key_metadata":[{keys}],"value_metadata":{{'
            f'"value_type":"{value_type}","skip_deserialize":{_text(is_empty)}'
            f"{shape_field}}}}}"
        )
    metadata = (
        f'{{"tree_metadata":{{{",".join(rows)}}},"use_ocdbt":true,'
        f'"use_zarr3":{_text(zarr_version == 3)},'
        '"store_array_data_equal_to_fill_value":true,"custom_metadata":null}'
    )
    return TreeFiles(
        metadata.encode(),
        f"{{{','.join(shardings)}}}".encode(),
        f'{{"array_metadatas":[{",".join(arrays)}]}}'.encode(),
    )


def _key_text(key: _state.tree.Key) -> str:
    return _text({"key": str(key.name), "key_type": 1 if key.kind == "index" else 2})


class TreeMetadataRow(NamedTuple):
    """A leaf or an empty container in `_METADATA`, with Orbax's name of its type."""

    keys: tuple[_state.tree.Key, ...]
    value_type: str

    @property
    def path(self) -> LeafPath:
        return _state.tree.join(self.keys)

    @property
    def name(self) -> str:
        return orbax_json.param_name(self.keys)

    @property
    def empty_type(self) -> str | None:
        """Our name of an empty container's type; None for a leaf."""
        return _EMPTY_OF.get(self.value_type)

    @property
    def is_array(self) -> bool:
        return self.value_type != "string" and self.empty_type is None

    def python_type(self, dtype: str) -> str:
        """Returns the Python type of an array restored without a target state."""
        if self.value_type == "scalar":
            return PYTHON_OF_KIND[_state.dtypes.kind(dtype)]
        if self.value_type not in ("jax.Array", "np.ndarray"):
            raise ValueError(f"unknown value type {self.value_type!r}")
        return self.value_type.replace("np.", "numpy.")


class TreeMetadata(NamedTuple):
    """The content of `_METADATA`; a missing chunk is damage if `strict`, else zeros."""

    rows: Sequence[TreeMetadataRow]
    zarr_version: int
    ocdbt: bool | None
    strict: bool

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TreeMetadata:
        ocdbt = data.get("use_ocdbt")
        return cls(
            [
                TreeMetadataRow(
                    _parse_keys(row), str(row["value_metadata"]["value_type"])
                )
                for row in data["tree_metadata"].values()
            ],
            3 if data.get("use_zarr3") else 2,
            None if ocdbt is None else bool(ocdbt),
            bool(data.get("store_array_data_equal_to_fill_value")),
        )


def _parse_keys(row: Any) -> tuple[_state.tree.Key, ...]:
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


# ---- _sharding ----------------------------------------------------------------------


def _sharding(sharding: Sharding | None) -> JSON:
    from jax.sharding import Mesh, NamedSharding  # only a save needs jax

    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        mesh = sharding.mesh
        return {
            "sharding_type": "NamedSharding",
            "shape": list(mesh.devices.shape),
            "axis_names": [str(name) for name in mesh.axis_names],
            "axis_types": [str(kind) for kind in mesh.axis_types],
            "partition_spec": list(sharding.spec),
            "device_mesh": {"mesh": _device_ids(mesh.devices.tolist())},
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
    if isinstance(devices, list):
        return [_device_ids(part) for part in devices]
    return {"id": int(devices.id)}


def parse_mesh_axes(part: Any) -> MeshAxes:
    """Returns mesh axes as `PartitionSpec` has them; raises ValueError if malformed."""
    names = part if isinstance(part, list) else [part]
    if any(isinstance(name, list | dict) for name in names):
        raise ValueError(f"{str(part)[:80]} is not a part of a partition spec")
    return tuple(names) if len(names) > 1 else names[0] if names else None


class Split(NamedTuple):
    """How an array was sharded: its mesh axes, and numbers of `parts` along axes."""

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
    """Parses `_sharding`: param name -> split; leaves out malformed entries."""
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
        shape = _zarr.metadata.sizes(data["shape"])
        sizes = dict(zip(data["axis_names"], shape, strict=True))
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


_MAX_AXES = 64

# ---- array_metadatas and _strings.json ----------------------------------------------


def parse_impls(data: Mapping[str, Any]) -> dict[str, str]:
    """Returns param name -> implementation of the PRNG keys from `array_metadatas`."""
    impls = {}
    for row in data.get("array_metadatas", []):
        array = row.get("array_metadata", {})
        impl = (array.get("ext_metadata") or {}).get("random_key_impl")
        if isinstance(impl, str):
            impls[str(array.get("param_name"))] = impl
    return impls


def string_at(data: Mapping[str, Any], name: str) -> str:
    """Returns the string of the leaf `name` in `_strings.json`, or raises KeyError."""
    value: Any = data
    for part in name.split("/"):
        if not isinstance(value, dict):
            raise KeyError(name)
        value = value[part]
    if not isinstance(value, str):
        raise KeyError(name)
    return value
