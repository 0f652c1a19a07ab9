"""Forms: the old and the new axes of an array in the notation of einops."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import jax

from flaxckpt import _util, errors
from flaxckpt._transforms.axis_maps import AxisMap, Origins
from flaxckpt._types import Shape

Axis: TypeAlias = tuple[str, ...]
"""Names of the axes that make up one axis of the array; empty for an axis of size 1."""

ELLIPSIS: Axis = ("...",)
"""All axes without a name."""

_TOKEN = re.compile(
    r"\s*(?:(?P<open>\()|(?P<close>\))|(?P<name>[A-Za-z](?:\w*[A-Za-z0-9])?|\.\.\.)"
    r"|(?P<one>1)(?!\w))",
    re.ASCII,
)


@dataclasses.dataclass(frozen=True)
class Form(AxisMap):
    """A rearrangement of axes, such as `(h d) e -> e h d`, with sizes of named axes."""

    text: str
    sizes: Mapping[str, int] = dataclasses.field(hash=False)
    old: tuple[Axis, ...]
    new: tuple[Axis, ...]

    @classmethod
    def of_axes(cls, old: Sequence[Axis], new: Sequence[Axis]) -> Form:
        return cls(f"{_format(old)} -> {_format(new)}", {}, tuple(old), tuple(new))

    @classmethod
    def parse(cls, text: str, sizes: Mapping[str, int]) -> Form:
        """Returns the form of a text, which must have the names in `sizes`."""
        sides = text.split("->")
        if len(sides) != 2:
            raise _bad_form(text, "it needs one arrow")
        old, new = (tuple(_axes(side, text)) for side in sides)
        for axes in (old, new):
            names = [name for axis in axes for name in axis]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise _bad_form(text, f"{', '.join(twice)} is twice on one side")
        known, wanted = (
            {name for axis in side for name in axis} for side in (old, new)
        )
        if once := sorted(known ^ wanted):
            raise _bad_form(text, f"{', '.join(once)} is on one side only")
        checked = {
            name: _util.arguments.check_int(name, size, least=1)
            for name, size in sizes.items()
        }
        if extra := [name for name in checked if name not in known]:
            raise errors.OptionError(
                f"the form {text!r} has no axis {', '.join(extra)}, but a size was"
                " passed: correct the name, or leave the size out"
            )
        return cls(" -> ".join(side.strip() for side in sides), checked, old, new)

    def check(self) -> None:
        """Raises OptionError unless the sizes of all axes follow from a shape."""
        for axis in self.old:
            lacking = [name for name in axis if name not in self.sizes]
            if len(lacking) > 1:
                raise errors.OptionError(
                    f"the sizes of ({' '.join(axis)}) in {self.text!r} are unknown:"
                    f" pass {' or '.join(f'{name}=' for name in lacking)}"
                    + (", all but one" if len(lacking) > 2 else "")
                )

    def with_sizes(self, sizes: Mapping[str, int]) -> Form:
        """Returns the form with the sizes of its names, and others left out."""
        known = {name: size for name, size in sizes.items() if name in self.names}
        return dataclasses.replace(self, sizes=known)

    def inverse(self) -> Form:
        old, new = self.text.split(" -> ")
        return Form(f"{new} -> {old}", self.sizes, self.new, self.old)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for axis in self.old for name in axis)

    def position(self, name: str) -> int:
        """Returns the axis of the array that `name` is; negative behind an ellipsis."""
        at = self.old.index((name,))
        return at - len(self.old) if ELLIPSIS in self.old[:at] else at

    def without(self, name: str) -> Form:
        old, new = (
            [axis for axis in side if axis != (name,)] for side in (self.old, self.new)
        )
        return Form.of_axes(old, new).with_sizes(self.sizes)

    def origins(self, ndim: int) -> Origins | None:
        plain = all(len(axis) == 1 and axis != ELLIPSIS for axis in self.old)
        if not plain or sorted(self.old) != sorted(self.new):
            return None
        return [self.old.index(axis) for axis in self.new]

    def __call__(self, *values: jax.Array) -> jax.Array:
        import einops

        try:
            return einops.rearrange(values[0], self.text, **self.sizes)
        except einops.EinopsError as error:
            why = str(error).strip().rpartition("\n")[2].strip()
            raise ValueError(f"{self.text!r} does not fit: {why}") from None


def _axes(side: str, text: str) -> Iterator[Axis]:
    inner: list[str] | None = None
    at, side = 0, side.rstrip()
    while at < len(side):
        token = _TOKEN.match(side, at)
        if token is None:
            raise _bad_form(text, f"{side[at:].strip()[:20]!r} is not an axis")
        at = token.end()
        is_nested = token["open"] and inner is not None
        if is_nested or (token["close"] and inner is None):
            raise _bad_form(text, "its parentheses do not match")
        if token["open"]:
            inner = []
        elif token["close"]:
            yield tuple(inner or ())
            inner = None
        elif inner is not None:
            inner += [token["name"]] if token["name"] else []
        else:
            yield (token["name"],) if token["name"] else ()
    if inner is not None:
        raise _bad_form(text, "its parentheses do not match")


def _format(axes: Sequence[Axis]) -> str:
    return " ".join(
        axis[0] if len(axis) == 1 else f"({' '.join(axis)})" if axis else "1"
        for axis in axes
    )


def solve_sizes(
    axes: Sequence[Axis], shape: Shape, known: Mapping[str, int]
) -> dict[str, int]:
    """Returns the sizes of all names in the axes of an array.

    An axis may have one unknown name. Raises ValueError if sizes do not agree.
    """
    rest = len(shape) - len(axes)
    if ELLIPSIS in axes and rest >= -1:
        at = axes.index(ELLIPSIS)
        shape = (*shape[:at], *shape[at + rest + 1 :])
        axes = (*axes[:at], *axes[at + 1 :])
    elif rest:
        raise ValueError(f"it has {len(shape)} axes, wanted {_format(axes)}")
    sizes = dict(known)
    for axis, size in zip(axes, shape, strict=True):
        unknown = [name for name in axis if name not in sizes]
        product = math.prod(sizes.get(name, 1) for name in axis)
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


def _bad_form(text: str, why: str) -> errors.OptionError:
    return errors.OptionError(
        f"{text!r:.80} is not a form in einops notation, such as '(h d) e -> e h d':"
        f" {why}"
    )
