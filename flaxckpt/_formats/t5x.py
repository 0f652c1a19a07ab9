"""Reader of T5X checkpoints: a msgpack file, and a zarr 2 directory for each array.

The file describes such an array by a TensorStore spec, which is never opened: only the
shape, the dtype and the name of the directory are used, if it is as T5X writes it.

Source: `t5x/checkpoints.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flaxckpt import _state, _storage, _zarr, errors
from flaxckpt._formats import orbax_aggregate, plain, recognise, zarr2
from flaxckpt._formats.msgpack import leaves
from flaxckpt._formats.reader import Stored
from flaxckpt._types import LeafPath

_VERSIONS = (2, 3)
_SPEC_KEYS = frozenset(("driver", "dtype", "kvstore", "metadata", "path", "transform"))
_KVSTORE_KEYS = frozenset(("driver", "path", "bucket"))
_METADATA_KEYS = frozenset(
    (
        "chunks",
        "compressor",
        "dimension_separator",
        "dtype",
        "fill_value",
        "filters",
        "order",
        "shape",
        "zarr_format",
    )
)
_TRANSFORM_KEYS = frozenset(
    ("input_exclusive_max", "input_inclusive_min", "input_rank", "output")
)
_STORES = ("file", "gfile", "gcs")


def read(path: Path, *, step: int | None, resolve: _state.treedef.Resolve) -> Stored:
    file = path / recognise.T5X_FILE if path.is_dir() else path.resolve()
    stamp = _storage.stamp(file)
    tree = orbax_aggregate.read_tree(file)
    version = tree["version"]
    if (
        type(version) is not int
        or version not in _VERSIONS
        or set(tree) != recognise.T5X_KEYS
    ):
        raise errors.CheckpointFormatError(
            f"{file} has version {str(version)[:40]} of T5X's format and the keys"
            f" {', '.join(sorted(tree)[:5])}; wanted version 2 or 3 and the keys"
            " 'version' and 'optimizer'. Restore it with T5X, and save it again."
        )
    replacer = _SpecReplacer(file.parent, version)
    state = replacer.replace(tree["optimizer"], ())
    if replacer.faults:
        raise plain.unreadable_error(path, replacer.faults)
    return leaves.make_stored(
        path, file, leaves.walk(state), format_name="t5x", step=step, stamp=stamp
    )


class _SpecReplacer:
    """Replaces TensorStore specs by arrays; `faults` are of unreadable directories."""

    def __init__(self, root: Path, version: int) -> None:
        self.faults: dict[LeafPath, str] = {}
        self._root = root
        self._version = version
        self._leaves: dict[str, LeafPath] = {}

    def replace(self, value: Any, keys: tuple[str, ...]) -> Any:
        """Returns `value` with each TensorStore spec replaced by the array."""
        if not isinstance(value, dict):
            return value
        if not _is_spec(value):
            return {
                key: self.replace(child, (*keys, key)) for key, child in value.items()
            }
        leaf = _state.tree.join([_state.tree.Key(key, "key") for key in keys])
        array = None
        with plain.fault_recorded(self.faults, leaf):
            array = self._array(value, leaf)
        return array  # noqa: RET504

    def _array(self, spec: dict[str, Any], leaf: LeafPath) -> plain.Opened:
        name = _directory(spec)
        if other := self._leaves.get(name):
            raise ValueError(f"shares the directory {name} with {other}")
        self._leaves[name] = leaf
        array = zarr2.find_array(self._root, name)
        shape = _zarr.metadata.sizes(spec["metadata"].get("shape"))
        dtype = spec.get("dtype", array.dtype)
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"wanted {str(dtype)[:40]}{list(shape)}, as {recognise.T5X_FILE!r} has"
                f" it, found {array.dtype}{list(array.shape)} in {name}/.zarray"
            )
        _check_transform(spec.get("transform"), shape)
        if self._version == 2 and array.dtype == "uint16":
            raise ValueError(
                "uint16 in version 2 of the format may stand for bfloat16;"
                " restore it with T5X, and save it again"
            )
        return array


def _is_spec(value: dict[str, Any]) -> bool:
    """Returns True if a map is a TensorStore spec, not parameters of the same names."""
    return (
        isinstance(value.get("driver"), str)
        and isinstance(value.get("kvstore"), dict | str)
        and isinstance(value.get("metadata"), dict)
    )


def _directory(spec: dict[str, Any]) -> str:
    """Returns the name of the array directory in a TensorStore spec like T5X's."""
    kvstore, metadata = spec["kvstore"], spec["metadata"]
    if not isinstance(kvstore, dict):
        raise ValueError(f"its specification is the URL {kvstore[:40]!r}, unlike T5X")
    for part, allowed in (
        (spec, _SPEC_KEYS),
        (kvstore, _KVSTORE_KEYS),
        (metadata, _METADATA_KEYS),
    ):
        if unknown := sorted(set(part) - allowed):
            raise ValueError(f"its specification has {unknown[0][:40]!r}, unlike T5X")
    if spec["driver"] != "zarr" or kvstore.get("driver") not in _STORES:
        raise ValueError(
            f"wanted the driver zarr in files, found {spec['driver'][:40]!r} in"
            f" {str(kvstore.get('driver'))[:40]!r}"
        )
    if ("path" in spec) == ("path" in kvstore):
        raise ValueError("its specification has no path, or two")
    path = spec.get("path", kvstore.get("path"))
    if not isinstance(path, str):
        raise ValueError("its specification has a path that is not a string")
    return zarr2.check_name(path.removesuffix("/"))


def _check_transform(transform: Any, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless the transform of a spec is the identity."""
    if transform is None:
        return
    axes = [{"input_dimension": axis} for axis in range(len(shape))]
    is_identity = (
        isinstance(transform, dict)
        and set(transform) <= _TRANSFORM_KEYS
        and transform.get("input_rank", len(shape)) == len(shape)
        and transform.get("input_inclusive_min", [0] * len(shape)) == [0] * len(shape)
        and transform.get("output", axes) == axes
        and _bounds(transform.get("input_exclusive_max", list(shape))) == list(shape)
    )
    if not is_identity:
        raise ValueError("its specification has a transform")


def _bounds(bounds: Any) -> Any:
    """Replaces TensorStore's notation for a resizable bound, `[8]`, by 8."""
    if not isinstance(bounds, list):
        return bounds
    return [b[0] if isinstance(b, list) and len(b) == 1 else b for b in bounds]
