"""Meshes of wanted states: devices for shardings over an `AbstractMesh`.

`jax.eval_shape` and `nnx.eval_shape` under `jax.set_mesh` return such shardings.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from flaxckpt._state.leaf import LeafInfo, LeafTable

_NONE = Mesh(np.empty((), dtype=object), ())
"""What `jax.set_mesh` takes for no mesh, in all versions."""


def current() -> Mesh | None:
    """Returns the mesh of `jax.set_mesh`, or None; each thread has its own."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # inside jit, where arrays have no devices
        return None
    return None if mesh.empty else mesh


def use(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Returns a context in which this thread has the current mesh `mesh`, or none."""
    if mesh is current():
        return nullcontext()
    return jax.set_mesh(_NONE if mesh is None else mesh)


def with_devices(table: LeafTable) -> LeafTable:
    """Returns a leaf table with the current mesh in place of meshes without devices.

    Shardings stay as they are if the current mesh has other axes, or there is none.
    """
    if not any(lacks_devices(leaf.info.sharding) for leaf in table.values()):
        return table
    mesh = current()
    if mesh is None:
        return table
    return {
        path: dataclasses.replace(leaf, info=_on(mesh, leaf.info))
        for path, leaf in table.items()
    }


def lacks_devices(sharding: Sharding | None) -> bool:
    """Returns True for a sharding over axes without devices."""
    if not isinstance(sharding, NamedSharding):
        return False
    return isinstance(sharding.mesh, AbstractMesh)


def explain(info: LeafInfo) -> tuple[str, str]:
    """Returns the fault of a leaf on a mesh without devices, and advice."""
    assert isinstance(info.sharding, NamedSharding)
    text = f"{info} on the mesh {_axes(info.sharding.mesh)} without devices"
    mesh = current()
    if mesh is not None:
        text += f", while the current mesh is {_axes(mesh)}"
    advice = (
        "Load inside `with jax.set_mesh(mesh):`, with a mesh of these axes and sizes,"
        " or pass abstract_state(state, mesh=mesh) as the state."
    )
    return text, advice


def _on(mesh: Mesh, info: LeafInfo) -> LeafInfo:
    sharding = info.sharding
    if not isinstance(sharding, NamedSharding) or not lacks_devices(sharding):
        return info
    if _axes(sharding.mesh) != _axes(mesh):
        return info
    placed = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return dataclasses.replace(info, sharding=placed)


def _axes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    return dict(mesh.shape)
