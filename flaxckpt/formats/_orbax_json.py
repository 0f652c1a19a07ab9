"""The JSON files of a checkpoint: Orbax's own, and our manifest.

Pure: leaf infos in, text out, and back. `_orbax` puts them on disk.
"""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flaxckpt import _chunks, _dtypes, _json, _layout, _tree, _zarr, errors
from flaxckpt._info import LeafInfo, Lineage, Role
from flaxckpt._types import JSON, LeafPath, Shape

MANIFEST = "flaxckpt.json"
MANIFEST_VERSION = 1
MAX_BYTES = 64 * 2**20
"""Largest metadata file that is read; 100,000 leaves take about 20 MB."""

UNSAFE = re.compile(r"\0|\\|^/|//|(?:^|/)\.{1,2}(?:/|$)")
"""In the name of a file or an array: what could lead out of a directory."""

_MAX_CHUNKS = 2**20  # of one array; beyond that, their names take gigabytes

_HANDLERS = "orbax.checkpoint._src.handlers."
STATE_HANDLER = f"{_HANDLERS}standard_checkpoint_handler.StandardCheckpointHandler"
JSON_HANDLER = f"{_HANDLERS}json_checkpoint_handler.JsonCheckpointHandler"

_VALUE_TYPES = {
    "numpy.ndarray": "np.ndarray",
    # Orbax has no complex scalars, and forgets the type of numpy's.
    "numpy.generic": "np.ndarray",
    "complex": "np.ndarray",
    "int": "scalar",
    "float": "scalar",
    "bool": "scalar",
    "str": "string",
}
_EMPTIES = {"dict": "Dict", "list": "List", "tuple": "Tuple", "None": "None"}
PYTHON_OF_KIND = {
    "int": "int",
    "uint": "int",
    "float": "float",
    "bool": "bool",
    "complex": "complex",
}
_SCALARS = frozenset((*PYTHON_OF_KIND.values(), "numpy.generic"))


_text = json.JSONEncoder(separators=(",", ":")).encode
"""Compact JSON; NaN and infinities as Python and Orbax write them.

What is written for every leaf is put together from texts, most of which recur: a dict
for each leaf would take three times as long.
"""


def dumps(data: JSON) -> bytes:
    """Compact JSON; NaN and infinities as Python and Orbax write them."""
    return _text(data).encode()


def loads(content: bytes, path: object) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
        DamagedCheckpointError: `content` is something else.
    """
    try:
        _json.check(content)
        data = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise errors.DamagedCheckpointError(
            f"{path} is not valid JSON ({str(error)[:100]}); restore another step"
        ) from None
    if not isinstance(data, dict):
        raise errors.DamagedCheckpointError(
            f"{path}: wanted a JSON object, found a {type(data).__name__}"
        )
    return data


# ---- written for Orbax ----------------------------------------------------------


def param_name(keys: Iterable[_tree.Key]) -> str:
    """What Orbax calls a leaf: its keys joined by dots."""
    return ".".join([str(key.name) for key in keys])


def tree_metadata(
    infos: Iterable[LeafInfo], *, ocdbt: bool, zarr_version: int = 3
) -> bytes:
    """The content of `_METADATA`."""
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


def _key_text(key: _tree.Key) -> str:
    return _text({"key": str(key.name), "key_type": 1 if key.kind == "index" else 2})


def _value_text(info: LeafInfo, shape_text: Callable[[Shape], str]) -> str:
    if info.kind == "empty":
        value_type = _EMPTIES[info.python_type]
        return f'{{"value_type":"{value_type}","skip_deserialize":true}}'
    if info.python_type == "jax.Array":
        shape = _layout.write_shape(info, _layout.stored_form(info)[0])
        return (
            '{"value_type":"jax.Array","skip_deserialize":false,'
            f'"write_shape":{shape_text(shape)}}}'
        )
    value_type = _VALUE_TYPES[info.python_type]
    return f'{{"value_type":"{value_type}","skip_deserialize":false}}'


def shardings(infos: Iterable[LeafInfo]) -> bytes:
    """The content of `_sharding`, which Orbax uses when it is given none."""
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
    # One device, found again by its number: unlike a SingleDeviceSharding, which
    # names its platform, this loads on any kind of device. 0 is always there.
    return {
        "sharding_type": "NamedSharding",
        "shape": [1],
        "axis_names": ["x"],
        "partition_spec": [],
        "device_mesh": {"mesh": [{"id": 0}]},
    }


def _device_ids(devices: Any) -> JSON:
    """The ids in a nested array of devices."""
    if isinstance(devices, np.ndarray):
        return [_device_ids(part) for part in devices]
    return {"id": int(devices.id)}


def array_metadatas(infos: Iterable[LeafInfo]) -> bytes:
    """The content of `array_metadatas/process_0`."""
    shape_text = functools.cache(_text)
    rows = []
    for info in infos:
        if info.chunk_shape is None:
            continue
        shape = _layout.write_shape(info, _layout.stored_form(info)[0])
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
    """The content of `_strings.json`, from param name -> string."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split("/")
        inner = nested
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return dumps(nested)


def string_at(data: Mapping[str, Any], name: str) -> str:
    """Finds the string of the leaf `name` in the content of `_strings.json`.

    Raises:
        KeyError: There is none.
    """
    found: Any = data
    for part in name.split("/"):
        if not isinstance(found, dict):
            raise KeyError(name)
        found = found[part]
    if not isinstance(found, str):
        raise KeyError(name)
    return found


# ---- written for us -------------------------------------------------------------


def leaf_row(info: LeafInfo) -> JSON:
    """A leaf in the manifest; `leaf_info` is the inverse."""
    row: dict[str, JSON] = {"path": info.path, "type": info.python_type}
    if info.kind in ("array", "prng_key", "scalar"):
        row |= {"dtype": info.dtype, "shape": info.shape, "chunks": info.chunk_shape}
    if info.weak_type and info.kind == "array":
        row["weak_type"] = True
    if info.prng_impl:
        row["prng_impl"] = info.prng_impl
    if info.spec is not None:
        row["spec"] = [
            list(part) if isinstance(part, tuple) else part for part in info.spec
        ]
    if info.shard_shape is not None:
        row["shard"] = info.shard_shape
    if info.role is not None:
        row["role"] = info.role
    return row


def leaf_info(row: Any, keys: Mapping[LeafPath, tuple[_tree.Key, ...]]) -> LeafInfo:
    """Reads what `leaf_row` wrote.

    Raises:
        ValueError, KeyError: The row is not one.
    """
    path, python_type = row["path"], row["type"]
    impl = row.get("prng_impl")
    if python_type in _EMPTIES:
        return LeafInfo(path, keys[path], "empty", python_type)
    if python_type == "str":
        return LeafInfo(path, keys[path], "string", "str")
    dtype = _dtype(row["dtype"])
    is_scalar = python_type in _SCALARS
    if not is_scalar and python_type not in ("jax.Array", "numpy.ndarray"):
        raise ValueError(f"{path} has the unknown type {python_type!r}")
    shape, chunk_shape = sizes(row["shape"]), sizes(row["chunks"])
    if (
        len(chunk_shape) != len(shape) + bool(impl)
        or 0 in chunk_shape
        or _chunks.chunk_count(shape, chunk_shape[: len(shape)]) > _MAX_CHUNKS
    ):
        raise ValueError(f"{path} has chunks {chunk_shape} of an array {shape}")
    if impl:
        check_keys(impl, (*shape, _layout.key_words(impl)), dtype)
    return LeafInfo(
        path,
        keys[path],
        "prng_key" if impl else "scalar" if is_scalar else "array",
        python_type,
        shape,
        dtype,
        chunk_shape=chunk_shape,
        weak_type=bool(row.get("weak_type", False))
        or (is_scalar and python_type != "numpy.generic"),
        prng_impl=impl,
        spec=_spec(row["spec"]) if "spec" in row else None,
        shard_shape=sizes(row["shard"]) if "shard" in row else None,
        role=_role(row["role"]) if "role" in row else None,
    )


def check_keys(impl: str, shape: Shape, dtype: str) -> None:
    """Asserts that an array can be PRNG keys of the implementation `impl`.

    Raises:
        ValueError: It cannot, or there is no such implementation.
    """
    words = _layout.key_words(impl)
    if dtype != "uint32" or shape[-1:] != (words,):
        raise ValueError(f"{dtype}{list(shape)} is no array of {impl[:40]} keys")


def encoding(manifest: Mapping[str, Any]) -> _zarr.Encoding | None:
    """How the chunks of all arrays are encoded; None in manifests that do not say.

    Raises:
        ValueError, KeyError, TypeError: They say it wrongly.
    """
    if "encoding" not in manifest:
        return None
    row = manifest["encoding"]
    version = row.get("zarr_version", 3)
    if version not in (2, 3):
        raise ValueError(f"its arrays are of zarr {str(version)[:20]}")
    if row["codec"] not in _zarr.CODECS or type(row["checksum"]) is not bool:
        raise ValueError(f"its arrays are encoded as {str(row)[:80]}")
    return _zarr.Encoding(row["codec"], row["checksum"], int(version))


def encoding_row(encoding: _zarr.Encoding) -> JSON:
    """What `encoding` reads."""
    row: dict[str, JSON] = {"codec": encoding.codec, "checksum": encoding.checksum}
    return row if encoding.version == 3 else {**row, "zarr_version": encoding.version}


def digests(found: Any) -> dict[str, str]:
    """File name -> digest, from the manifest.

    Raises:
        ValueError: They are something else, or of files elsewhere.
    """
    if not isinstance(found, dict):
        raise ValueError(f"{str(found)[:80]} are no digests")
    for name in found:
        if UNSAFE.search(name):
            raise ValueError(f"it has the digest of {name[:80]!r}")
    return dict(found)


def key_paths(
    structure: _tree.Node | LeafPath,
) -> dict[LeafPath, tuple[_tree.Key, ...]]:
    """The leaves of a structure that was read, each with its keys.

    Raises:
        ValueError: One is there twice, or not where its name says.
    """
    places = list(_tree.key_paths(structure))
    keys = dict(places)
    names = _names(structure)
    if len(keys) != len(places) or not all(
        name in (None, path) for name, (path, _) in zip(names, places, strict=True)
    ):
        raise ValueError("its structure has leaves in places that are not theirs")
    return keys


def _names(structure: _tree.Node | LeafPath) -> Iterator[LeafPath | None]:
    """The names of the leaves in a structure; None for each empty container."""
    if isinstance(structure, str) or not structure.children:
        yield structure if isinstance(structure, str) else None
        return
    for child in structure.children:
        yield from _names(child)


def check_leaves(
    infos: Sequence[LeafInfo],
    keys: Mapping[LeafPath, object],
    structure: _tree.Node | LeafPath,
) -> None:
    """Asserts that leaves are those of a structure, each of them once.

    Raises:
        ValueError: They are not.
    """
    paths = {info.path for info in infos}
    leaves = {name for name in _names(structure) if name is not None}
    full = {info.path for info in infos if info.kind != "empty"}
    if len(paths) != len(infos) or paths != keys.keys() or full != leaves:
        raise ValueError("its leaves and its structure do not agree")


def lineage_row(lineage: Lineage) -> JSON:
    """One origin in the manifest; `lineage` is the inverse."""
    return lineage._asdict()


def lineage(manifest: Mapping[str, Any]) -> tuple[Lineage, ...]:
    """What the run began from.

    Raises:
        ValueError, KeyError, TypeError: The manifest says it wrongly.
    """
    found = []
    for row in manifest.get("lineage", []):
        path, step, digest = row["path"], row["step"], row["digest"]
        if type(step) not in (int, type(None)) or type(digest) not in (str, type(None)):
            raise ValueError(f"{str(row)[:80]} is no lineage")
        found.append(Lineage(str(path), step, digest, texts(row["transforms"])))
    return tuple(found)


def step(manifest: Mapping[str, Any]) -> int | None:
    """The number of the step; None of a checkpoint that was none.

    Raises:
        ValueError: The manifest says something else.
    """
    found = manifest.get("step")
    if type(found) not in (int, type(None)):
        raise ValueError(f"{str(found)[:80]} is no step")
    return found


def texts(value: Any) -> tuple[str, ...]:
    """A list of strings.

    Raises:
        ValueError: It is none.
    """
    if not isinstance(value, list) or not all(type(text) is str for text in value):
        raise ValueError(f"{str(value)[:80]} is no list of texts")
    return tuple(value)


@functools.cache
def _dtype(name: str) -> str:
    return _dtypes.name(_dtypes.to_numpy(name))


def _spec(parts: Any) -> PartitionSpec:
    if not isinstance(parts, list):
        raise ValueError(f"{str(parts)[:80]} is no partition spec")
    return PartitionSpec(
        *(tuple(part) if isinstance(part, list) else part for part in parts)
    )


def _role(row: Any) -> Role:
    is_role = isinstance(row, list) and len(row) == 4
    for part in row if is_role else ():
        is_role = is_role and type(part) is str
    if not is_role:
        raise ValueError(f"{str(row)[:80]} is no role")
    return Role(*row)


def sizes(value: Any) -> tuple[int, ...]:
    """A shape from JSON.

    Raises:
        ValueError: It is none.
    """
    is_shape = isinstance(value, list) and len(value) <= 32
    for size in value if is_shape else ():
        is_shape = is_shape and type(size) is int and 0 <= size < 2**48
    if not is_shape:
        raise ValueError(f"{str(value)[:80]} is no shape")
    return tuple(value)
