"""HTML and SVG in which every name is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable

from flaxckpt import errors


class Markup(str):
    """HTML text; elements escape any other text, and so do templates."""

    __slots__ = ()

    def __html__(self) -> str:
        """Returns the text itself, for templates."""
        return self


NOTHING = Markup("")


def element(name: str, *children: object, **attributes: object) -> Markup:
    """Returns an element with children: markup, or values to escape.

    In names of attributes, `_` becomes `-`, but not at the end; None omits one.
    """
    markup = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{markup}>")
    return Markup(f"<{name}{markup}>{join(children)}</{name}>")


_VOID = frozenset(("meta", "link", "br", "wbr", "input"))


def join(parts: Iterable[object]) -> Markup:
    """Concatenates `parts`, escaping text."""
    return Markup("".join(text(part) for part in parts))


def text(value: object) -> Markup:
    """Escapes and shortens `value` to a single line; returns markup unchanged."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(errors.printable(str(value))))


def px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def percent(value: float) -> str:
    """Formats a coordinate of a plot."""
    return f"{value:.2f}".rstrip("0").rstrip(".") + "%"
