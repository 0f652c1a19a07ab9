"""The target state of a restore plan: from a checkpoint or a JSON file.

```json
{"params": {"dense": {"kernel": "float32[8, 4]", "bias": "float32[4]"}}, "step": "int"}
```
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxckpt import _formats, _state, _steps, _storage, errors
from flaxckpt._formats import locate
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._transforms import mirrors
from flaxckpt._types import JSON, PathLike, PyTree

_MAX_FILE_BYTES = 2**28
_ARRAY = re.compile(r"([a-z][a-z0-9_]*)\[([0-9, ]*)\]")
_KEYS = re.compile(r"([a-z][a-z0-9_]*) keys \[([0-9, ]*)\]")
_VALUES: Mapping[str, Any] = {
    "bool": False,
    "int": 0,
    "float": 0.0,
    "complex": 0j,
    "str": "",
}


class TargetState(NamedTuple):
    """The target state of a restore: abstract leaves; numbers and texts have values.

    `has_roles` and `has_classes` say what it knows of optimizers and containers; `run`
    is the checkpoint or its run directory, None for a file.
    """

    state: PyTree
    has_roles: bool
    has_classes: bool = True
    run: Path | None = None

    def may_begin_from(self, path: PathLike) -> bool:
        """Returns True for a state with an optimizer, which a run may begin from."""
        if self.run == _run_directory(_storage.paths.resolve(path)):
            return False
        leaves = _state.flax_state.leaves_by_path(self.state)
        return self.has_classes and any(map(mirrors.is_in_optimizer, leaves))

    def check_source(self, name: str) -> None:
        """Raises OptionError for optimizer leaves of a new run without any classes."""
        if self.has_classes:
            return
        leaves = _state.flax_state.leaves_by_path(self.state)
        if found := [path for path in leaves if mirrors.is_in_optimizer(path)]:
            raise errors.OptionError(
                f"a new run begins its optimizer anew, but {name} names no classes, so"
                f" that {errors.first_few(found, 1)} would be planned as any other"
                " leaf: take a run, a checkpoint, a file that flaxckpt show CHECKPOINT"
                " --json has written, or a file with only the parameters"
            )


def read_target(target: PathLike, *, step: int | None = None) -> TargetState:
    """Returns the target state: that of a checkpoint or step, or of a JSON file.

    A file has texts such as "float32[8, 4]", "int" and "str" for leaves, or `leaves`
    and `structure` as printed by `flaxckpt show --json`.
    """
    root = _storage.paths.resolve(target)
    if root.suffix == ".json" and root.is_file() and not _formats.recognises(root):
        return _read_file(root)
    stored = locate.open_checkpoint(root, step)
    stored.check_items(stored.items.trees)
    values = {path: _abstract(row.info) for path, row in stored.table.items()}
    has_roles = any(row.info.role is not None for row in stored.table.values())
    state = _state.tree.unflatten(stored.structure, values, _state.leaf_types.LeafParts)
    return TargetState(state, has_roles, run=_run_directory(root))


def _run_directory(root: Path) -> Path:
    """Returns the parent of a checkpoint with the name of a step; else `root`."""
    is_step = _steps.names.is_usual(root.name) and _formats.recognises(root)
    return root.parent if is_step else root


def _read_file(file: Path) -> TargetState:
    raw = _storage.of(file).read(file, max_bytes=_MAX_FILE_BYTES)
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise errors.OptionError(f"{file} is not valid JSON: {error}") from None
    shown = content.get("leaves") if isinstance(content, dict) else None
    if isinstance(shown, dict) and "format" in content:
        leaves = {
            path: _parse_leaf(
                file, path, leaf.get("type") if isinstance(leaf, dict) else leaf
            )
            for path, leaf in shown.items()
        }
        if "structure" not in content:  # printed by flaxckpt 0.1.0
            return TargetState(_nest(leaves), has_roles=False, has_classes=False)
        has_roles = any(
            isinstance(leaf, dict) and leaf.get("role") is not None
            for leaf in shown.values()
        )
        state = _build(file, content["structure"], leaves)
        return TargetState(state, has_roles)
    tree = _parse_tree(file, content, ())
    return TargetState(tree, has_roles=False, has_classes=False)


def _build(file: Path, structure: JSON, leaves: Mapping[str, Any]) -> PyTree:
    """Builds the containers, of flax and optax classes as those of a checkpoint."""
    try:
        found = _state.treedef.from_json(
            structure, _state.classes.resolver(), unknown=set()
        )
        return _state.tree.unflatten(found, leaves, _state.leaf_types.LeafParts)
    except KeyError as error:
        why = f"it has a leaf {error.args[0]!r:.80} that leaves lacks"
    except (TypeError, ValueError) as error:
        why = str(error)
    raise errors.OptionError(
        f"{file}: structure is not as flaxckpt show --json prints it: {why}; without"
        " structure, the leaves are read into dicts"
    )


def _nest(leaves: Mapping[str, Any]) -> PyTree:
    if leaves.keys() == {""}:
        return leaves[""]
    return _state.tree.nest_values(
        (_state.tree.split(path), leaf) for path, leaf in leaves.items()
    )


def _parse_tree(file: Path, tree: Any, above: tuple[str, ...]) -> PyTree:
    if len(above) > _state.tree.MAX_DEPTH:
        raise errors.OptionError(f"{file} is nested too deeply")
    if isinstance(tree, dict):
        return {k: _parse_tree(file, v, (*above, k)) for k, v in tree.items()}
    if isinstance(tree, list):
        return [_parse_tree(file, v, (*above, str(i))) for i, v in enumerate(tree)]
    return _parse_leaf(file, "/".join(above), tree)


def _parse_leaf(file: Path, path: str, leaf: object) -> Any:
    """Parses a leaf's type, such as "float32[8, 4]", also as messages print it."""
    if leaf is None or leaf == "None":
        return None
    text = str(leaf)
    if text in _EMPTY:
        return _EMPTY[text]()
    text = text.removeprefix("a ").removeprefix("Python ")
    if text in _VALUES:
        return _VALUES[text]
    if text.startswith("numpy "):
        text = f"{text.removeprefix('numpy ')}[]"
    try:
        if array := _ARRAY.fullmatch(text):
            dtype = _state.numpy_dtypes.to_numpy(array[1])
            return jax.ShapeDtypeStruct(_parse_shape(array[2]), dtype)
        if keys := _KEYS.fullmatch(text):
            return _abstract_keys(_parse_shape(keys[2]), keys[1])
    except (TypeError, ValueError, AttributeError):
        pass  # not a valid type
    raise errors.OptionError(
        f"{file}: {path or 'the file'} must be a string such as 'float32[8, 4]', 'int'"
        f" or 'str', found {leaf!r:.80}"
    )


_EMPTY: Mapping[str, Callable[[], Any]] = {
    "an empty dict": dict,
    "an empty list": list,
    "an empty tuple": tuple,
}


def _parse_shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size.strip())


def _abstract(info: LeafInfo) -> Any:
    """Returns a value with the type of a leaf, without memory for its elements."""
    if info.kind == "prng_key":
        return _abstract_keys(info.shape, info.prng_impl or "")
    if info.dtype is None:
        return _VALUES.get(info.python_type)
    dtype = _state.numpy_dtypes.to_numpy(info.dtype)
    if info.kind == "scalar":
        value = _VALUES.get(info.python_type)
        return np.zeros((), dtype)[()] if value is None else value
    if info.python_type == "numpy.ndarray":  # 64 bits also without jax_enable_x64
        return np.broadcast_to(np.zeros((), dtype), info.shape)
    return jax.ShapeDtypeStruct(info.shape, dtype)


def _abstract_keys(shape: tuple[int, ...], impl: str) -> jax.ShapeDtypeStruct:
    one = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    assert math.prod(one.shape) == 1
    return jax.ShapeDtypeStruct(shape, one.dtype)
