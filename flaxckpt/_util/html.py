"""HTML and SVG in which every name is escaped."""

from __future__ import annotations

import datetime
import html
from collections.abc import Iterable

from flaxckpt import errors
from flaxckpt._util import humanize


class Markup(str):
    """HTML text; elements escape any other text, and so do templates."""

    __slots__ = ()

    def __html__(self) -> str:
        """Returns the text itself, for templates."""
        return self


NOTHING = Markup("")


def element(name: str, *children: object, **attributes: object) -> Markup:
    """Returns an element with children.

    Args:
        name: The tag.
        *children: Markup, or values to escape.
        **attributes: Attributes by name: a trailing `_` is dropped, any other `_`
            becomes `-`. None omits the attribute.
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


_MINUTES = "%Y-%m-%d %H:%M"


def px(value: float) -> str:
    """Formats a coordinate."""
    return f"{value:.1f}".removesuffix(".0")


def moment(seconds: float | None, form: str = _MINUTES) -> Markup:
    """Returns a `time` element for seconds since 1970."""
    shown = humanize.when(seconds, form)
    if seconds is None or not shown:
        return NOTHING
    exact = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return element("time", shown, datetime=exact.isoformat(timespec="seconds"))


# ---- pictures ---------------------------------------------------------------------


def picture(
    title: str,
    description: str,
    size: tuple[float, float],
    *parts: object,
    class_: str | None = None,
) -> Markup:
    """Returns an SVG that grows and shrinks as a whole, texts included."""
    width, height = size
    return element(
        "svg",
        *parts,
        viewBox=f"0 0 {px(width)} {px(height)}",
        role="img",
        aria_label=f"{title}. {description}",
        class_=f"picture {class_}" if class_ else "picture",
    )


def plot(
    title: str, description: str, height: float, *parts: object, **attributes: object
) -> Markup:
    """Returns an SVG as wide as its place, whose texts and marks keep their sizes.

    The parts have horizontal coordinates in percent, and vertical ones in pixels.
    """
    return element(
        "svg",
        *parts,
        width="100%",
        height=px(height),
        role="img",
        aria_label=f"{title}. {description}",
        class_="picture plot",
        **attributes,
    )


def percent(value: float) -> str:
    """Formats a coordinate of a plot."""
    return f"{value:.2f}".rstrip("0").rstrip(".") + "%"


def label(x: float, y: float, value: object, **attributes: object) -> Markup:
    """Returns a text element of a picture."""
    return element("text", value, x=px(x), y=px(y), **attributes)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """Returns a straight line."""
    return element("line", x1=px(x1), y1=px(y1), x2=px(x2), y2=px(y2), class_=class_)


def both(wide: Markup, narrow: Markup) -> Markup:
    """Returns two pictures, for wide screens and for phones; CSS hides one."""
    return join(
        (element("div", wide, class_="wide"), element("div", narrow, class_="narrow"))
    )
