"""Defines computed leaves: functions of other leaves, traced before any is read."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from flaxckpt import _state, errors
from flaxckpt._state.leaf import Leaf, LeafInfo
from flaxckpt._types import LeafPath

Fn: TypeAlias = Callable[..., jax.Array]

Precision: TypeAlias = Literal["carried", "wide", "own"]
"""How the function of a computed leaf gets the floats of other leaves.

`carried`, for functions that only move values: as computed so far. `wide`, for our
functions that compute: likewise, and at least as float32. A computed float is rounded
once, to the type that is stored or restored, however many functions have computed it.
`own`, for functions of the user: rounded to the type of the leaf.
"""


class Deriver:
    """Creates computed leaves for a transform, in `with` blocks.

    The end of a block raises one error for all leaves that cannot be computed.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._shapes: dict[Hashable, Any] = {}
        self._faults: dict[str, None] = {}  # a leaf may be the source of several

    def __enter__(self) -> Deriver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._faults:
            raise errors.OptionError(
                f"{self._what:.200} cannot be applied to"
                f" {errors.one_or_rows(list(self._faults))}"
            )

    def __call__(
        self,
        leaves: Sequence[Leaf],
        fn: Fn,
        *,
        base: LeafInfo | None = None,
        is_wide: bool | None = None,
        precision: Precision = "carried",
    ) -> Leaf:
        """Returns the leaf computed by `fn` from the values of `leaves`.

        Args:
            leaves: Arrays, numbers or PRNG keys.
            fn: Traced function from the values to the new value.
            base: Leaf with the path, the kind of value and the role of the new leaf; by
                default the first of `leaves`.
            is_wide: True if jax may compute in 64 bits; by default if any of `leaves`
                has 64 bits.
            precision: How `fn` gets floats. With `wide`, the new leaf has the type of
                the first of `leaves`, whatever `fn` returns.
        """
        base = base or leaves[0].info
        infos = [leaf.info for leaf in leaves]
        if is_wide is None:
            is_wide = any(map(_is_wide, leaves))
        try:
            _check_computed(leaves)
            info = _result_info(base, self._shape(fn, infos, is_wide, precision))
        except errors.CheckpointError:
            raise
        except Exception as error:
            forms = ", ".join(str(info) for info in infos[:3])
            path = errors.name_leaf(base.path)
            self._faults[f"{path}, {forms}: {_reason(error)}"] = None
            return Leaf(base, ())
        sources = tuple(source for leaf in leaves for source in leaf.sources)
        computation = _Computation(tuple(leaves), fn, is_wide, precision)
        return Leaf(info, sources, computation, _joined_transforms(leaves))

    def _shape(
        self, fn: Fn, infos: Sequence[LeafInfo], is_wide: bool, precision: Precision
    ) -> Any:
        form = tuple((info.shape, info.dtype, info.prng_impl) for info in infos)
        key = (fn, form, is_wide, precision)
        if key not in self._shapes:
            with x64(is_wide):
                args = [to_abstract(info) for info in infos]
                if precision == "wide":
                    wide = [jax.eval_shape(_widen, arg) for arg in args]
                    result = jax.eval_shape(fn, *wide)
                    result = jax.ShapeDtypeStruct(result.shape, args[0].dtype)
                else:
                    result = jax.eval_shape(fn, *args)
            self._shapes[key] = result
        return self._shapes[key]


def _check_computed(leaves: Sequence[Leaf]) -> None:
    """Raises ValueError for values that jax compiles no function of."""
    infos = [leaf.info for leaf in leaves]
    infos += [source.info for leaf in leaves for source in leaf.stored]
    for info in infos:
        if info.dtype in _state.dtypes.NOT_COMPUTED:
            raise ValueError(
                f"jax does not compute with {info.dtype}: restore it without this"
                " transform, and change the array with numpy"
            )


def _joined_transforms(leaves: Sequence[Leaf]) -> tuple[str, ...]:
    """Returns the transforms of leaves that are joined; in brackets if they differ."""
    chains = dict.fromkeys(leaf.transforms for leaf in leaves)
    if len(chains) == 1:
        return leaves[0].transforms
    return (f"({' | '.join(' > '.join(chain) or 'none' for chain in chains)})",)


class Equality(NamedTuple):
    """A condition for the value of a computed leaf: two of its sources are equal.

    `count_differing` maps the sources to the number of elements that differ.
    """

    path: LeafPath
    other: LeafPath
    size: int
    count_differing: Fn
    advice: str


_ADVICE_SHOWN = 3

_ADVICE = (
    "Keep both: leave out the tie, and export the model as one with untied weights:"
    " tie_word_embeddings is False in its config. Or"
    " drop the leaf that is not used first."
)


class _Computation:
    """Function from the sources of several leaves to a leaf, in 64 bits if `is_wide`.

    With `advice`, all leaves must have equal values; it says what to do if not.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        fn: Fn,
        is_wide: bool,
        precision: Precision = "carried",
        *,
        advice: str = "",
    ) -> None:
        self.is_wide = is_wide
        self._leaves = tuple(leaves)
        self._fn = fn
        self._precision = precision
        self.equalities: list[Equality] = []
        start = 0
        for number, leaf in enumerate(leaves):
            stop = start + len(leaf.sources)
            for equality in equalities(leaf):
                count = _of_sources(equality.count_differing, start, stop)
                self.equalities.append(equality._replace(count_differing=count))
            if advice and number:
                self.equalities.append(self._equality(leaves, number, advice))
            start = stop

    @property
    def key(self) -> Hashable:
        """Equal for computations with equal functions of leaves of the same form."""
        return (
            self._fn,
            self.is_wide,
            self._precision,
            tuple(_form_key(leaf) for leaf in self._leaves),
        )

    def _equality(self, leaves: Sequence[Leaf], number: int, advice: str) -> Equality:
        """Returns the condition that a leaf equals the first leaf."""

        def count_differing(*args: jax.Array) -> jax.Array:
            values = _values(self._leaves, args, value_fn)
            return _count_differing(values[0], values[number])

        info, size = leaves[0].info, math.prod(leaves[0].info.shape)
        other = leaves[number].info.path
        return Equality(info.path, other, size, count_differing, advice)

    def __call__(self, *args: jax.Array) -> jax.Array:
        if self._precision == "own":
            return self._fn(*_values(self._leaves, args, value_fn))
        values = _values(self._leaves, args, _carried_fn)
        if self._precision == "wide":
            values = [_widen(value) for value in values]
        return self._fn(*_with_common_type(values))


def _values(
    leaves: Sequence[Leaf], args: Sequence[jax.Array], fn_of: Callable[[Leaf], Fn]
) -> list[jax.Array]:
    """Returns the values of leaves, from the values of all their sources."""
    values, start = [], 0
    for leaf in leaves:
        stop = start + len(leaf.sources)
        values.append(fn_of(leaf)(*args[start:stop]))
        start = stop
    return values


def _of_sources(fn: Fn, start: int, stop: int) -> Fn:
    return lambda *args: fn(*args[start:stop])


def _count_differing(x: jax.Array, y: jax.Array) -> jax.Array:
    differ = x != y
    if jnp.issubdtype(x.dtype, jnp.inexact):
        differ &= ~(jnp.isnan(x) & jnp.isnan(y))
    return jnp.sum(differ)


def require_equal(leaf: Leaf, others: Sequence[Leaf], advice: str = _ADVICE) -> Leaf:
    """Returns `leaf`, whose computation fails if equally typed `others` differ."""
    if all(other.fn is leaf.fn and _have_same_sources(leaf, other) for other in others):
        return leaf
    leaves = [leaf, *others]
    is_wide = any(map(_is_wide, leaves))
    return dataclasses.replace(
        leaf,
        sources=tuple(source for leaf in leaves for source in leaf.sources),
        fn=_Computation(leaves, lambda first, *_: first, is_wide, advice=advice),
    )


def _is_wide(leaf: Leaf) -> bool:
    return leaf.info.dtype in _state.dtypes.WIDE or has_wide_fn(leaf)


def _have_same_sources(leaf: Leaf, other: Leaf) -> bool:
    return len(leaf.sources) == len(other.sources) and all(
        one is two for one, two in zip(leaf.sources, other.sources, strict=True)
    )


def equalities(leaf: Leaf) -> Sequence[Equality]:
    return leaf.fn.equalities if isinstance(leaf.fn, _Computation) else ()


def unequal(differences: Iterable[tuple[Equality, int]]) -> errors.OptionError | None:
    """Returns an error for conditions with elements that differ, or None."""
    faults = {
        (equality.path, equality.other): (
            f"{count:,} of {equality.size:,} elements",
            equality.advice,
        )
        for equality, count in differences
        if count
    }
    if not faults:
        return None
    advice = dict.fromkeys(advice for _, advice in faults.values())
    return errors.OptionError(
        f"{len(faults)} pairs of tied leaves have different values, and only one leaf"
        " of each pair can be kept:\n"
        + errors.rows(
            f"{path} and {other} differ in {how}"
            for (path, other), (how, _) in faults.items()
        )
        + "".join(f"\n{text}" for text in itertools.islice(advice, _ADVICE_SHOWN))
    )


def _form_key(leaf: Leaf) -> Hashable:
    info, fn = leaf.info, leaf.fn
    inner = fn.key if isinstance(fn, _Computation) else id(fn)
    return info.shape, info.dtype, info.prng_impl, inner


class Programs:
    """The programs of computed leaves, as text: equal programs give equal results."""

    def __init__(self) -> None:
        self._texts: dict[Hashable, str] = {}

    def __call__(self, leaf: Leaf, sources: Sequence[LeafInfo]) -> str:
        assert leaf.fn is not None, leaf.info.path
        forms = tuple((info.shape, info.dtype, info.prng_impl) for info in sources)
        key = _form_key(leaf), forms
        if key not in self._texts:
            with x64(has_wide_fn(leaf)):
                lowered = jax.jit(value_fn(leaf)).lower(*map(to_abstract, sources))
            self._texts[key] = lowered.as_text()
        return self._texts[key]


def has_wide_fn(leaf: Leaf) -> bool:
    return isinstance(leaf.fn, _Computation) and leaf.fn.is_wide


def _reason(error: Exception) -> str:
    """Returns the reason why a function cannot be applied, in one line."""
    first_line = str(error).strip().split("\n", maxsplit=1)[0][:200]
    if isinstance(error, jax.errors.JAXTypeError):
        return (
            "it cannot be traced: use jax.numpy, which works on arrays before they are"
            f" read ({first_line})"
        )
    return first_line


def value_fn(leaf: Leaf) -> Fn:
    """Returns the function from the sources of a leaf to a value of its type."""
    carried = _carried_fn(leaf)

    def value(*args: jax.Array) -> jax.Array:
        array = carried(*args)
        if leaf.info.kind == "prng_key":
            return array
        return jnp.asarray(array, to_abstract(leaf.info).dtype)

    return value


def _carried_fn(leaf: Leaf) -> Fn:
    """Returns the function from a leaf's sources to values that are not yet rounded."""
    fn, info = leaf.fn, leaf.info

    def value(*args: jax.Array) -> jax.Array:
        array = args[0] if fn is None else fn(*args)
        if info.kind == "prng_key":
            return array
        is_float = _state.dtypes.kind(info.dtype or "") == "float" and _is_float(array)
        size = _state.dtypes.item_size(info.dtype or "")
        if is_float and array.dtype.itemsize >= size:
            return array
        return jnp.asarray(array, to_abstract(info).dtype)

    return value


def _is_float(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


def _widen(array: jax.Array) -> jax.Array:
    """Returns floats of fewer than 32 bits as float32, and other values unchanged."""
    if _is_float(array) and array.dtype.itemsize < 4:
        return jnp.asarray(array, jnp.float32)
    return array


def _with_common_type(values: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Returns floats in a type that holds all of them: jax does not mix small ones."""
    types = {value.dtype for value in values if _is_float(value)}
    if len(types) <= 1:
        return values
    widest = max(types, key=lambda dtype: dtype.itemsize)
    common = widest if widest.itemsize >= 4 else jnp.float32
    return [jnp.asarray(v, common) if _is_float(v) else v for v in values]


def to_abstract(info: LeafInfo) -> jax.ShapeDtypeStruct:
    if info.kind == "prng_key":
        key = jax.eval_shape(lambda: jax.random.key(0, impl=info.prng_impl))
        return jax.ShapeDtypeStruct(info.shape, key.dtype)
    dtype = jax.dtypes.canonicalize_dtype(
        _state.numpy_dtypes.to_numpy(info.dtype or "")
    )
    return jax.ShapeDtypeStruct(info.shape, dtype)


def _result_info(base: LeafInfo, result: Any) -> LeafInfo:
    info: LeafInfo | str = str(result)
    if isinstance(result, jax.ShapeDtypeStruct):
        leaf = _state.tree.TreeLeaf(base.keys, result, False)
        info = _state.describe.describe(base.path, leaf)
    if isinstance(info, str):
        raise ValueError(f"it must return one array, got {info[:80]}")
    is_number = base.kind == "scalar" and not info.shape
    if info.kind == "array" and (is_number or base.python_type == "numpy.ndarray"):
        info = dataclasses.replace(info, kind=base.kind, python_type=base.python_type)
    is_cut = info.dtype in _state.dtypes.WIDE and info.python_type == "jax.Array"
    if is_cut and base.kind == "scalar":  # an array of Python numbers
        info = dataclasses.replace(info, python_type="numpy.ndarray")
    return dataclasses.replace(info, weak_type=False, role=base.role, boxes=base.boxes)


def x64(is_wide: bool) -> AbstractContextManager[Any]:
    """Lets jax compute in 64 bits."""
    return jax.enable_x64(True) if is_wide else contextlib.nullcontext()
