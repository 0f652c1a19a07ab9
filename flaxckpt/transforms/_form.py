"""Forms: the old and the new axes of an array in the notation of einops."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import jax

from flaxckpt import _util, errors

_Axis: TypeAlias = tuple[str, ...]
"""Names of the axes that make up one axis of the array; empty for an axis of size 1."""

_TOKEN = re.compile(
    r"\s*(?:(?P<open>\()|(?P<close>\))|(?P<name>[A-Za-z](?:\w*[A-Za-z0-9])?|\.\.\.)"
    r"|(?P<one>1)(?!\w))",
    re.ASCII,
)


@dataclasses.dataclass(frozen=True)
class Form:
    """A rearrangement of axes, such as `(h d) e -> e h d`.

    Calling it rearranges an array.

    Attributes:
        text: The form in the notation of einops.
        sizes: Sizes of named axes.
        old: The axes of the array.
        new: The axes of the result.
    """

    text: str
    sizes: Mapping[str, int]
    old: tuple[_Axis, ...]
    new: tuple[_Axis, ...]

    @classmethod
    def parse(cls, text: str, sizes: Mapping[str, int]) -> Form:
        """Returns the form that `text` describes.

        Args:
            text: The old axes, an arrow, and the new axes.
            sizes: Sizes of named axes; names that the form lacks are an error.

        Raises:
            OptionError: `text` is not in einops notation, or a size is wrong.
        """
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
        """Checks that the sizes of all axes follow from the shape of an array.

        Raises:
            OptionError: Two axes that make up one axis have no size.
        """
        for axis in self.old:
            lacking = [name for name in axis if name not in self.sizes]
            if len(lacking) > 1:
                raise errors.OptionError(
                    f"the sizes of ({' '.join(axis)}) in {self.text!r} are unknown:"
                    f" pass {' or '.join(f'{name}=' for name in lacking)}"
                    + (", all but one" if len(lacking) > 2 else "")
                )

    def inverse(self) -> Form:
        """Returns the form from the new axes to the old axes."""
        old, new = self.text.split(" -> ")
        return Form(f"{new} -> {old}", self.sizes, self.new, self.old)

    @property
    def order(self) -> tuple[int, ...] | None:
        """For each new axis the old axis; None if axes are split or joined as well."""
        plain = all(len(axis) == 1 and axis != ("...",) for axis in self.old)
        if not plain or sorted(self.old) != sorted(self.new):
            return None
        return tuple(self.old.index(axis) for axis in self.new)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the array with its axes rearranged.

        Raises:
            ValueError: The array has other axes or sizes.
        """
        import einops

        try:
            return einops.rearrange(x, self.text, **self.sizes)
        except einops.EinopsError as error:
            why = str(error).strip().rpartition("\n")[2].strip()
            raise ValueError(f"{self.text!r} does not fit: {why}") from None


def _axes(side: str, text: str) -> Iterator[_Axis]:
    """Yields the axes on one side of a form."""
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


def _bad_form(text: str, why: str) -> errors.OptionError:
    return errors.OptionError(
        f"{text!r:.80} is not a form in einops notation, such as '(h d) e -> e h d':"
        f" {why}"
    )
