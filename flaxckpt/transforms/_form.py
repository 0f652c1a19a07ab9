"""Forms in einops notation: how the axes of one array become those of another."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax

from flaxckpt import errors
from flaxckpt._types import Shape

ELLIPSIS = "..."

Axis: TypeAlias = tuple[str, ...]
"""An axis: the names that it is composed of, the slowest first; none for size 1."""

_AXES = re.compile(r"\(([^()]*)\)|([^()\s]+)")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*|\.\.\.")


class Form(NamedTuple):
    """A form, such as `(h d) e -> e h d`.

    Attributes:
        left: The axes of the array.
        right: The axes of the rearranged array.
    """

    left: tuple[Axis, ...]
    right: tuple[Axis, ...]

    def __str__(self) -> str:
        return f"{_text(self.left)} -> {_text(self.right)}"

    @property
    def names(self) -> frozenset[str]:
        """All names in the form."""
        return frozenset(name for axis in (*self.left, *self.right) for name in axis)

    def position(self, name: str) -> int:
        """Returns the axis of the array that `name` is; negative behind an ellipsis."""
        at = self.left.index((name,))
        return at - len(self.left) if (ELLIPSIS,) in self.left[:at] else at

    def without(self, name: str) -> Form:
        """Returns the form of the arrays along the axis `name`."""
        left, right = (tuple(axis for axis in side if axis != (name,)) for side in self)
        return Form(left, right)

    @property
    def order(self) -> tuple[int, ...] | None:
        """The new order of the axes, if the form only transposes; else None."""
        if any(len(axis) != 1 or axis == (ELLIPSIS,) for axis in self.left):
            return None
        if sorted(self.left) != sorted(self.right):
            return None
        return tuple(self.left.index(axis) for axis in self.right)

    @property
    def inverse(self) -> Form:
        """The form from the rearranged array back."""
        return Form(self.right, self.left)


def parse_form(text: str) -> Form:
    """Parses a form.

    Raises:
        OptionError: `text` is not a form, or its sides have different names.
    """
    if text.count("->") != 1:
        raise errors.OptionError(
            f"a form must be a str such as '(h d) e -> e h d', got {text!r:.80}"
        )
    left, right = (_parse_side(side, text) for side in text.split("->"))
    names = [sorted(name for axis in side for name in axis) for side in (left, right)]
    if names[0] != names[1] or len(set(names[0])) < len(names[0]):
        raise errors.OptionError(
            f"the form {text!r} must have each name once on each side, found"
            f" {' '.join(names[0])} and {' '.join(names[1])}"
        )
    return Form(left, right)


def _parse_side(side: str, text: str) -> tuple[Axis, ...]:
    axes: list[Axis] = []
    for inner, outer in _AXES.findall(side):
        names = tuple(name for name in (outer or inner).split() if name != "1")
        if not all(map(_NAME.fullmatch, names)) or (inner and ELLIPSIS in names):
            raise errors.OptionError(
                f"{outer or f'({inner})'} in the form {text!r} is not an axis: write a"
                " name, names in parentheses, 1 or ..."
            )
        axes.append(names)
    if re.sub(_AXES, "", side).strip():
        raise errors.OptionError(f"the parentheses of the form {text!r} do not match")
    return tuple(axes)


def _text(axes: Iterable[Axis]) -> str:
    return " ".join(
        axis[0] if len(axis) == 1 else f"({' '.join(axis)})" if axis else "1"
        for axis in axes
    )


def solve_sizes(
    axes: Sequence[Axis], shape: Shape, known: Mapping[str, int]
) -> dict[str, int]:
    """Returns the sizes of all names in the axes of an array.

    Args:
        axes: The axes, perhaps with an ellipsis.
        shape: The shape of the array.
        known: Name -> its size. At most one name of an axis may be unknown.

    Raises:
        ValueError: The shape does not have these axes, or sizes do not agree.
    """
    rest = len(shape) - len(axes)
    axes = list(axes)
    if (ELLIPSIS,) in axes:
        at = axes.index((ELLIPSIS,))
        if rest + 1 < 0:
            raise ValueError(f"it has {len(shape)} axes, the form {len(axes) - 1}")
        shape = (*shape[:at], *shape[at + rest + 1 :])
        del axes[at]
    elif rest:
        raise ValueError(f"it has {len(shape)} axes, wanted {_text(axes)}")
    sizes = dict(known)
    for axis, size in zip(axes, shape, strict=True):
        unknown = [name for name in axis if name not in sizes]
        product = 1
        for name in axis:
            product *= sizes.get(name, 1)
        if len(unknown) > 1:
            raise ValueError(f"pass the size of {' or '.join(unknown)}")
        if unknown and product and size % product == 0:
            sizes[unknown[0]] = size // product
        elif product != size:
            listed = ", ".join(f"{n}={sizes[n]}" for n in axis if n in sizes)
            raise ValueError(
                f"an axis of size {size} is not ({' '.join(axis)}) with {listed or '1'}"
            )
    return sizes


def rearrange(form: Form, sizes: Mapping[str, int]) -> Callable[[jax.Array], jax.Array]:
    """Returns the function that rearranges an array by a form."""
    import einops

    text = str(form)
    needed = {name: size for name, size in sizes.items() if name in form.names}
    return lambda x: einops.rearrange(x, text, **needed)
