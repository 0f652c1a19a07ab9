"""Registers leaf types of users; see `_state.leaf_types`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np

from flaxckpt import _util, errors
from flaxckpt._state import leaf_types

T = TypeVar("T")

_KNOWN = (
    *(dict, list, tuple, str, bool, int, float, complex, type(None)),
    *(np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct),
)
"""Classes of leaves and containers that are saved without registration."""


@_util.guessed_names.explain
def register_leaf(
    cls: type[T],
    *,
    to_arrays: Callable[[T], leaf_types.Parts],
    from_arrays: Callable[[leaf_types.Parts], T],
) -> None:
    """Registers a class of leaves that jax and flaxckpt do not know.

    A leaf of exactly this class is saved as a dict of its parts, which are leaves with
    paths of their own, `params/dense/kernel/scale`. A load without a template returns
    the class again; where the class is not registered, and in Orbax, the leaf is a
    dict. Register classes before the first save or load, in every program. A second
    registration of a class replaces the first.

    ```python
    flaxckpt.register_leaf(
        Quantized,
        to_arrays=lambda leaf: {"values": leaf.values, "scale": leaf.scale},
        from_arrays=lambda parts: Quantized(parts["values"], parts["scale"]),
    )
    ```

    Args:
        cls: The class. jax must not know it as a pytree: the children of a pytree are
            leaves already.
        to_arrays: Returns the parts of a leaf: name -> array, number, string, None, or
            a dict or list of these. Must not change the leaf, and must always return
            the same names. Called on the thread that calls `save`, and by a
            `CheckpointCallback` at each report.
        from_arrays: Returns the leaf from parts with the types that were saved, or with
            the types of the template. A ValueError says that the parts do not fit.

    Raises:
        OptionError: `cls` is no class, or needs no registration, or a function is
            missing.
    """
    if not isinstance(cls, type):
        raise errors.OptionError(
            f"cls must be a class, got {_util.arguments.describe(cls)}"
        )
    if cls is object or issubclass(cls, _KNOWN):
        raise errors.OptionError(
            f"{cls.__module__}.{cls.__qualname__} cannot be registered: it is, or is"
            " derived from, a class that is saved as it is; wrap the value in a class"
            " of your own"
        )
    for name, function in (("to_arrays", to_arrays), ("from_arrays", from_arrays)):
        _util.arguments.check_function(name, function)
    leaf_types.add(leaf_types.LeafType(cls, to_arrays, from_arrays))
