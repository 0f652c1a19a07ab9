"""Whether a stored leaf can be had as a wanted one, and what to do if not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

import jax
from jax.sharding import Mesh, NamedSharding

from flaxckpt import (
    _derive,
    _dtypes,
    _layout,
)
from flaxckpt._info import LeafInfo, LeafTable
from flaxckpt._types import LeafPath, PyTree
from flaxckpt.errors import Mismatch

_NEAREST_AMONG = 5_000
_X64 = "jax_enable_x64"


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


def too_wide(wanted: LeafInfo, found: LeafInfo | None) -> Mismatch | None:
    """Says that jax, as it is configured now, cannot hold a wanted jax array.

    Without `jax_enable_x64`, jax cuts 64-bit values to 32 bits without an error.

    Args:
        wanted: The leaf that the caller asks for.
        found: The leaf that would fill it; None if it is to be made anew.
    """
    if wanted.python_type != "jax.Array" or not _derive.needs_64_bits(wanted):
        return None
    widest = _dtypes.name(jax.dtypes.canonicalize_dtype(wanted.dtype))
    if widest == wanted.dtype:
        return None
    asked = f"{wanted}, where jax without {_X64} has at most {widest}"
    return Mismatch(wanted.path, asked, "nothing" if found is None else str(found))


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
    if wanted.is_python_number or found.is_python_number:
        # It has no width; whether it fits is seen when it is read.
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
    wide = [m for m in found if _X64 in m.wanted]
    if wide:
        return _advice_on_width(wide, is_alone=abstract_state is None)
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
        " rename, drop, grow, slice and map leaves. Floating types are cast; integers"
        " are only widened, unless cast(pattern, dtype, lossy=True) narrows them."
    )


def _advice_on_width(problems: Sequence[Mismatch], *, is_alone: bool) -> str:
    """How to get 64-bit values, or fewer bits of them."""
    first: dict[str, LeafPath] = {}
    for problem in problems:
        first.setdefault(problem.wanted.rsplit(" ", maxsplit=1)[-1], problem.leaf)
    casts = ", ".join(
        f'cast("{path}", "{dtype}"{"" if dtype == "float32" else ", lossy=True"})'
        for dtype, path in first.items()
    )
    if is_alone:
        return (
            f"To keep all bits, set {_X64}, or pass a state with numpy arrays there;"
            f" for 32 bits, pass transforms=[{casts}]."
        )
    return (
        f"To keep all bits, set {_X64}, or put numpy arrays there in the state; for 32"
        f" bits, ask for {' and '.join(first)} there, and pass transforms=[{casts}]."
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
