"""What Orbax says of a leaf: rows of `_METADATA`, and the metadata of its array.

Pure, and never trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flaxckpt import _dtypes, _tree, errors
from flaxckpt.formats import _orbax_json


def keys(row: Any) -> tuple[_tree.Key, ...]:
    """The keys of one entry of `_METADATA`.

    Raises:
        ValueError, KeyError, TypeError: The entry is not one.
    """
    keys = []
    for key in row["key_metadata"]:
        if key["key_type"] == 1:
            keys.append(_tree.Key(int(key["key"]), "index"))
        else:
            keys.append(_tree.Key(str(key["key"]), "key"))
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
    if not isinstance(dtype, str):
        raise ValueError(f"element type {str(dtype)[:80]} is not read")
    try:
        name = _dtypes.name(_dtypes.to_numpy(dtype))
    except errors.OptionError:
        name = _dtypes.name(np.dtype(dtype))
        _dtypes.to_numpy(name)
    return _orbax_json.sizes(metadata["shape"]), name, _orbax_json.sizes(chunks)
