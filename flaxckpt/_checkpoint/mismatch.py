"""Comparison of stored with wanted leaves."""

from __future__ import annotations

import dataclasses
import difflib

import jax

from flaxckpt import _state, errors
from flaxckpt._state.leaf import Leaf, LeafInfo, LeafTable
from flaxckpt.errors import Mismatch

RESUME_ADVICE = (
    "Add these places to the state with which the run begins, which should have the"
    " types of the state after a step (jax.eval_shape(step, state) shows them), or pass"
    ' unused="ignore" to go on without these leaves.'
)
"""What to do about leaves that a resumed run would lose."""

_NEAREST_AMONG = 5_000
_X64 = "jax_enable_x64"

_ADVICE_ON_SHARDING = (
    "Give the state shardings whose mesh axes divide the shapes; PartitionSpec() copies"
    " a leaf to each device."
)


def describe_missing(
    wanted: LeafInfo, table: LeafTable, *, nearest: bool = True
) -> Mismatch:
    """Returns the problem of a missing leaf; `nearest` adds leaves inside or alike."""
    if wanted.path in table:
        return Mismatch(wanted.path, str(wanted), str(table[wanted.path].info))
    found = "nothing"
    outer = f"{wanted.path}/" if wanted.path else ""
    inner = [path for path in table if path.startswith(outer)] if nearest else []
    if inner:
        found = f"a container with {errors.first_few(inner, 2)}"
    elif nearest and len(table) <= _NEAREST_AMONG:
        near = difflib.get_close_matches(wanted.path, table, n=1)
        found = f"nothing (nearest: {near[0]})" if near else found
    return Mismatch(wanted.path, str(wanted), found, "missing")


def find_misfit(wanted: LeafInfo, found: LeafInfo) -> Mismatch | None:
    """Returns the problem of restoring `found` as `wanted`, or None."""
    if not _fits(wanted, found):
        advice = _advise_on_keys(wanted, found) or _advise_on_x64(wanted, found)
        return Mismatch(wanted.path, str(wanted), str(found), advice=advice)
    sharding = wanted.sharding
    if sharding is None:
        return None
    try:
        sharding.shard_shape(wanted.shape)
    except ValueError:
        text = f"{wanted} sharded as {wanted.spec}, which does not divide it"
        return Mismatch(wanted.path, text, str(found), advice=_ADVICE_ON_SHARDING)
    return None


def fits_reshaped(wanted: LeafInfo, found: LeafInfo) -> bool:
    """Returns True if only axes of size 1 keep `found` from being restored."""
    both = (wanted, found)
    if not all(info.kind in ("array", "scalar") for info in both):
        return False
    shapes = {tuple(size for size in info.shape if size != 1) for info in both}
    reshaped = dataclasses.replace(found, shape=wanted.shape, kind="array")
    return len(shapes) == 1 and _fits(wanted, reshaped)


def find_lack_of_devices(wanted: LeafInfo, found: LeafInfo | None) -> Mismatch | None:
    """Returns the problem of a wanted leaf on a mesh without devices, or None.

    `found` is the stored leaf to restore; None to initialize the leaf.
    """
    if not _state.meshes.lacks_devices(wanted.sharding):
        return None
    text, advice = _state.meshes.explain(wanted)
    stored = "nothing" if found is None else str(found)
    return Mismatch(wanted.path, text, stored, advice=advice)


def find_excess_width(wanted: LeafInfo, found: LeafInfo | None) -> Mismatch | None:
    """Returns the problem of a wanted 64-bit jax array while x64 is off, or None.

    Without `jax_enable_x64`, jax cuts 64-bit values to 32 bits without an error.
    `found` is the stored leaf to restore; None to initialize the leaf.
    """
    if wanted.python_type != "jax.Array" or wanted.dtype not in _state.dtypes.WIDE:
        return None
    widest = widest_dtype(wanted)
    if widest == wanted.dtype:
        return None
    text = f"{wanted}, but jax without {_X64} has at most {widest}"
    stored = "nothing" if found is None else str(found)
    return Mismatch(wanted.path, text, stored, "too_wide")


def find_unreadable(wanted: LeafInfo, found: Leaf) -> Mismatch | None:
    """Returns the problem of a stored leaf that cannot be read as `wanted`, or None."""
    if found.unsupported is None:
        return find_excess_width(wanted, found.info)
    form, advice = found.unsupported
    text = f"{found.info} {form}, which is not read"
    return Mismatch(wanted.path, str(wanted), text, "unsupported", advice)


def widest_dtype(wanted: LeafInfo) -> str:
    """Returns jax's type for the wanted type, as configured by `jax_enable_x64`."""
    return _state.numpy_dtypes.name(jax.dtypes.canonicalize_dtype(wanted.dtype))


def _fits(wanted: LeafInfo, found: LeafInfo) -> bool:
    if wanted.kind == "string" or found.kind == "string":
        return wanted.kind == found.kind
    kinds = {wanted.kind, found.kind}
    if kinds == {"prng_key"}:
        return wanted.shape == found.shape and wanted.prng_impl == found.prng_impl
    if "prng_key" in kinds:
        # The data of keys, as of jax.random.PRNGKey, and in Orbax checkpoints without
        # array_metadatas.
        return (
            kinds == {"prng_key", "array"}
            and wanted.stored_shape == found.stored_shape
            and wanted.stored_dtype == found.stored_dtype
        )
    if wanted.shape != found.shape:
        return False
    if wanted.dtype == found.dtype:
        return True
    assert wanted.dtype is not None
    assert found.dtype is not None
    if wanted.is_python_number or found.is_python_number:
        # A Python number has no width; reading it checks the range.
        return _number_kind(wanted.dtype) == _number_kind(found.dtype)
    return _state.dtypes.restores_as(found.dtype, wanted.dtype)


def _number_kind(dtype: str) -> str:
    return _state.dtypes.kind(dtype).removeprefix("u")


def _advise_on_keys(wanted: LeafInfo, found: LeafInfo) -> str:
    """Returns advice on keys that are stored otherwise; empty for other leaves."""
    if wanted.kind == found.kind == "prng_key" and wanted.prng_impl != found.prng_impl:
        return (
            f"Keys of {found.prng_impl} are restored into keys of {found.prng_impl}:"
            f" jax.random.key(0, impl={found.prng_impl!r})."
        )
    if "prng_key" not in (wanted.kind, found.kind) or wanted.shape == found.shape == ():
        return ""
    return (
        "Random keys fit the uint32 array of their data, and the reverse:"
        " jax.random.key_data(keys) and jax.random.wrap_key_data(data, impl=...) of the"
        " state show which shape belongs to which keys."
    )


def _advise_on_x64(wanted: LeafInfo, found: LeafInfo) -> str:
    """Returns advice on 64-bit integers of jax while x64 is off; empty for others."""
    are_arrays = wanted.python_type == found.python_type == "jax.Array"
    if not are_arrays or wanted.shape != found.shape:
        return ""
    if found.dtype not in _state.dtypes.WIDE or widest_dtype(found) != wanted.dtype:
        return ""
    return (
        f"Set {_X64}, as when these values were saved; load, and a new run, may narrow"
        " them by the transform cast(pattern, dtype, lossy=True)."
    )
