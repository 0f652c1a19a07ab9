"""Transforms that add to the values of leaves, or multiply them: `offset`, `scale`."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from typing import Literal

import jax
import jax.numpy as jnp

from flaxckpt import _util, errors
from flaxckpt._state.leaf import Leaf, LeafTable
from flaxckpt._transforms import base, mirrors
from flaxckpt._transforms.base import TableTransform, Transform
from flaxckpt._transforms.map_values import ArrayFn
from flaxckpt._transforms.patterns import compile_pattern
from flaxckpt._transforms.rows import LeafRow, ValueMap, apply_rows
from flaxckpt._types import LeafPath

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Affine(TableTransform):
    """Implements `offset` and `scale`; `number` is the number to add, or the factor."""

    verb: Literal["offset", "scale"]
    pattern: re.Pattern[str]
    number: float
    nu: Literal["squares", "norms"] | None = None

    def __call__(self, table: LeafTable) -> LeafTable:
        chosen = base.match_arrays(self.pattern, table, str(self))
        fn = ValueMap(add(self.number), "wide")
        if self.verb == "scale":
            fn = _Scaling(multiply_by(self.number), "wide", of=self, table=table)
        rows = [LeafRow([path], [(path, fn)]) for path in chosen]
        new = apply_rows(table, rows, str(self), moves=False)
        if isinstance(fn, _Scaling):
            fn.warn()
        return new

    def __str__(self) -> str:
        return base.call(self.verb, self.pattern.pattern, self.number, nu=self.nu)

    def inverse(self) -> Transform:
        number = -self.number if self.verb == "offset" else 1 / self.number
        return dataclasses.replace(self, number=number)


@dataclasses.dataclass(frozen=True)
class _Scaling(ValueMap):
    """Multiplies parameters by a factor, and their moments by a power of it.

    `guessed` moments have another power with Adamax; `left_out` have an unknown one.
    """

    of: Affine = dataclasses.field(kw_only=True)
    table: LeafTable = dataclasses.field(kw_only=True)
    guessed: list[LeafPath] = dataclasses.field(default_factory=list)
    left_out: list[LeafPath] = dataclasses.field(default_factory=list)
    _fns: dict[float, ArrayFn] = dataclasses.field(default_factory=dict)

    def of_mirror(self, mirror: Leaf, before: Leaf, after: Leaf) -> ArrayFn | None:
        power = _gradient_power(mirror, before.info.path, self.table)
        if power is None:
            self.left_out.append(mirror.info.path)
            return None
        factor = self.of.number**-power
        if _may_be_norm(mirror, power):
            if self.of.nu == "norms":
                factor = 1 / abs(self.of.number)
            if self.of.nu is None:
                self.guessed.append(mirror.info.path)
        return self._fns.setdefault(factor, multiply_by(factor))

    def warn(self) -> None:
        if self.guessed:
            _log.warning(
                "%s takes leaves for means of squared gradients, as of Adam: %s."
                " Pass nu='squares' if they are, or nu='norms' if they are of Adamax,"
                " whose state is of the same class",
                self.of,
                errors.first_few(self.guessed, 3),
            )
        if self.left_out:
            _log.warning(
                "%s leaves out %d moments, because nothing says how they depend on"
                " gradients; they are initialised again: %s",
                self.of,
                len(self.left_out),
                errors.first_few(self.left_out, 3),
            )


def offset(pattern: str, value: float) -> TableTransform:
    """Adds a number to all values of the matching leaves.

    ```python
    offset("params/.*/norm/scale", 1.0)  # Gemma stores its scales less 1
    ```

    Moments stay as they are, because gradients do; fields of optimizers that are copies
    of the parameters change as the parameters. Each leaf keeps its type. Floats are
    computed in float32 or wider and rounded once, to the type of the state if there is
    one. The inverse is exact only if the sums need no rounding.

    Args:
        pattern: Regular expression on the whole leaf path.
        value: The number to add.

    Raises:
        OptionError: `value` is not a finite number. When applied: nothing matches, or
            a leaf cannot hold the sum: an integer plus a fraction, a bool or PRNG keys.
    """
    return Affine("offset", compile_pattern(pattern), _check_finite("value", value))


def scale(
    pattern: str, factor: float, *, nu: Literal["squares", "norms"] | None = None
) -> TableTransform:
    """Multiplies all values of the matching leaves by a number.

    ```python
    scale("params/embed/embedding", 8.0)  # the model multiplies by sqrt(64) itself
    ```

    Gradients change by the inverse of the factor. So do means of gradients, such as
    Adam's `mu`; means of squared gradients, such as `nu`, change by its square. Copies
    of the parameters change as the parameters. All other moments are left out, with a
    warning, and initialised again. Types and rounding are those of `offset`. The
    inverse is exact if the factor is a power of two and no value overflows or becomes
    subnormal.

    Args:
        pattern: Regular expression on the whole leaf path.
        factor: The factor; not zero.
        nu: The meaning of `nu` where nothing tells Adam from Adamax: `"squares"`, means
            of squared gradients, or `"norms"`, weighted maxima of gradients, as Adamax
            keeps. By default squares, with a warning.

    Raises:
        OptionError: `factor` is not a finite number, or zero, or `nu` is another word.
            When applied: as for `offset`.
    """
    if _check_finite("factor", factor) == 0:
        raise errors.OptionError("factor must not be 0: all values would be lost")
    _util.arguments.check_choice("nu", nu, (None, "squares", "norms"))
    return Affine("scale", compile_pattern(pattern), factor, nu)


def _check_finite(name: str, value: float) -> float:
    _util.arguments.check_number(name, value)
    if not math.isfinite(value):
        raise errors.OptionError(f"{name} must be finite, got {value}")
    return value


def add(value: float) -> ArrayFn:
    return lambda x: x + _operand(x, value)


def multiply_by(factor: float) -> ArrayFn:
    return lambda x: x * _operand(x, factor)


def _operand(x: jax.Array, number: float) -> jax.Array | float:
    """Returns `number` for a computation with `x` that keeps the type of `x`."""
    if not jnp.issubdtype(x.dtype, jnp.number):
        raise ValueError("it does not hold numbers")
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return number
    if number != int(number):
        raise ValueError("integers need a whole number: cast it to a float first")
    return jnp.asarray(int(number), x.dtype)


# ---- moments ------------------------------------------------------------------------

_NAMES = {"mu": 1, "nu": 2}
"""`mirrors.held` for fields of checkpoints without roles."""

_OF_ADAMAX = "ScaleByAdamState", "nu"
"""Adam keeps means of squares here, and Adamax maxima: optax has one class for both."""


def _gradient_power(mirror: Leaf, param: LeafPath, table: LeafTable) -> int | None:
    """Returns the power of the gradient that a moment of `param` holds, or None."""
    role = mirror.info.role
    if role is not None and role.state_class:
        held = mirrors.held(mirror)
        return held if isinstance(held, int) else None
    own, of_param = mirror.info.path.split("/"), param.split("/")
    while own and of_param and own[-1] == of_param[-1]:
        own.pop()
        of_param.pop()
    field = own[-1] if own else ""
    if field not in _NAMES:
        return None
    # Novograd has a number beside each `mu`, and SM3 a list beside each `nu`.
    container, name = "/".join(own[:-1]), mirror.info.path[len("/".join(own)) :]
    other = f"{container}/{'nu' if field == 'mu' else 'mu'}"
    beside = table.get(f"{other}{name}")
    if beside is None:
        is_alone = not any(path.startswith(f"{other}/") for path in table)
    else:
        is_alone = beside.info.shape == table[param].info.shape
    is_like_param = mirror.info.shape == table[param].info.shape
    return _NAMES[field] if is_alone and is_like_param else None


def _may_be_norm(mirror: Leaf, power: int) -> bool:
    """Returns True for a moment that is of another power if the optimizer is Adamax."""
    role = mirror.info.role
    if role is not None and role.state_class:
        return (role.state_class, role.field) == _OF_ADAMAX
    return power == _NAMES["nu"]
