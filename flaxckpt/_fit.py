"""Whether a stored leaf can be had as a wanted one, and what to do if not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from jax.sharding import Mesh, NamedSharding

from flaxckpt import (
    _dtypes,
    _layout,
)
from flaxckpt._info import LeafInfo, LeafTable
from flaxckpt._types import LeafPath, PyTree
from flaxckpt.errors import Mismatch

_NEAREST_AMONG = 5_000


def missing(wanted: LeafInfo, table: LeafTable, *, nearest: bool = True) -> Mismatch:
    """Says that `table` lacks a leaf, and which is called most alike."""
    found = "nothing"
    if wanted.path in table:
        found = str(table[wanted.path].info)
    elif nearest and len(table) <= _NEAREST_AMONG:
        near = difflib.get_close_matches(wanted.path, table, n=1)
        found = f"nothing (nearest: {near[0]})" if near else found
    return Mismatch(wanted.path, str(wanted), found)


def misfit(wanted: LeafInfo, found: LeafInfo) -> Mismatch | None:
    """Says how `found` does not fit `wanted`; None if it does."""
    if _fits(wanted, found):
        return _sharding_misfit(wanted, found)
    return Mismatch(wanted.path, str(wanted), str(found))


def _fits(wanted: LeafInfo, found: LeafInfo) -> bool:
    if wanted.kind == "string" or found.kind == "string":
        return wanted.kind == found.kind
    if wanted.kind == "prng_key":
        if found.kind == "prng_key":
            return wanted.shape == found.shape and wanted.prng_impl == found.prng_impl
        # Raw key data, as Orbax has it without its array_metadatas.
        shape, dtype = _layout.stored_form(wanted)
        return found.shape == shape and found.dtype == dtype
    if found.kind == "prng_key" or wanted.shape != found.shape:
        return False
    assert wanted.dtype is not None
    assert found.dtype is not None
    if wanted.kind == "scalar" or found.kind == "scalar":
        # A Python number has no width; whether it fits is seen when it is read.
        return _number_kind(wanted.dtype) == _number_kind(found.dtype)
    return _dtypes.restores_as(found.dtype, wanted.dtype)


def _number_kind(dtype: str) -> str:
    return _dtypes.kind(dtype).removeprefix("u")


def _sharding_misfit(wanted: LeafInfo, found: LeafInfo) -> Mismatch | None:
    """Says why the wanted sharding cannot be had; None if it can."""
    sharding = wanted.sharding
    if sharding is None:
        return None
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
        asked = f"{wanted} on the mesh {dict(sharding.mesh.shape)} without devices"
        return Mismatch(wanted.path, asked, str(found))
    try:
        sharding.shard_shape(wanted.shape)
    except ValueError:
        asked = f"{wanted} split as {wanted.spec}, which does not divide it"
        return Mismatch(wanted.path, asked, str(found))
    return None


def advice(
    problems: Iterable[Mismatch], abstract_state: PyTree, table: LeafTable
) -> str:
    """What to do about a plan that has `problems` with the leaves of `table`."""
    found = list(problems)
    if abstract_state is None:
        return "Set jax_enable_x64, or pass an abstract state with numpy leaves."
    if any(m.wanted == "nothing" for m in found):
        return 'Ask for these leaves too, or pass unused="ignore".'
    if any(m.found.startswith("several") for m in found):
        return (
            'Load into the old optimizer first, or start it afresh: optimizer="reinit".'
        )
    if all(m.found.startswith("nothing") for m in found):
        if above := _all_below([m.leaf for m in found], table):
            return (
                f"The checkpoint has all of them below {above}/: ask for them"
                f" there{_within(above)}."
            )
        return (
            "Ask only for leaves that the checkpoint has, or pass a state with values"
            ' and missing="init" to keep them.'
        )
    return (
        "Change the state to fit, or the checkpoint on the way: transforms=[...] can"
        " rename, drop, grow, slice and map leaves. Floating types are cast, integers"
        " only widened."
    )


def _all_below(leaves: Sequence[LeafPath], table: LeafTable) -> LeafPath | None:
    """The highest container of `table` with all of these leaves; None if none has."""
    ends = (path for path in table if path.endswith("/" + leaves[0]))
    above = [path.removesuffix("/" + leaves[0]) for path in ends]
    fits = (a for a in above if all(f"{a}/{leaf}" in table for leaf in leaves))
    return min(fits, key=lambda path: path.count("/"), default=None)


def _within(above: LeafPath) -> str:
    """How to write a state that stands below `above`, where that is short."""
    if above == "0":
        return ", as (state,)"
    return f', as {{"{above}": state}}' if above.isidentifier() else ""
