"""What Orbax says of a leaf: rows of `_METADATA`, and the metadata of its array.

Pure, and never trusted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from flaxckpt import _dtypes, _tree
from flaxckpt.formats import _orbax_json, _zarr_codecs

ZARR_2_NUMBER = re.compile(r"[<>|][biufc][0-9]{1,2}")


def keys(row: Any) -> tuple[_tree.Key, ...]:
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
            keys.append(_tree.Key(int(name), "index"))
        else:
            keys.append(_tree.Key(str(name), "key"))
    if len(keys) > _tree.MAX_DEPTH:
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
            return _orbax_json.PYTHON_OF_KIND[_dtypes.kind(dtype)]
        case _:
            raise ValueError(f"value type {value_type!r} is not known")


def empty(value_type: str) -> str | None:
    """Our name of an empty container in `_METADATA`; None if it is a leaf."""
    return {"Dict": "dict", "List": "list", "Tuple": "tuple"}.get(
        value_type, "None" if value_type in ("None", "NamedTuple") else None
    )


def array(
    metadata: Mapping[str, Any],
) -> tuple[tuple[int, ...], str, tuple[int, ...]]:
    """Shape, dtype and chunk shape from a `zarr.json` or a `.zarray`.

    Raises:
        ValueError, KeyError, TypeError: It is neither, or holds what is not read.
    """
    if metadata["zarr_format"] == 3:
        dtype = metadata["data_type"]
        chunks = metadata["chunk_grid"]["configuration"]["chunk_shape"]
    else:
        dtype, chunks = metadata["dtype"], metadata["chunks"]
    shape, chunk_shape = _orbax_json.sizes(metadata["shape"]), _orbax_json.sizes(chunks)
    _zarr_codecs.check(metadata, chunk_shape)
    return shape, _element_type(dtype), chunk_shape


def _element_type(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"element type {str(name)[:80]} is not read")
    if ZARR_2_NUMBER.fullmatch(name):  # of any other text numpy makes what it likes
        return _dtypes.name(_dtypes.to_numpy(np.dtype(name).name))
    return _dtypes.name(_dtypes.to_numpy(name))
