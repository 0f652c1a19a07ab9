"""States: pytrees, leaf paths, leaf tables, and the Flax and optax types in states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._state import (
        bits,
        boxes,
        classes,
        containers,
        describe,
        dtypes,
        flax_state,
        leaf,
        leaf_types,
        meshes,
        nnx_objects,
        numpy_dtypes,
        optax_containers,
        optimizer_roles,
        tree,
        treedef,
    )

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__)
