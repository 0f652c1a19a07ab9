"""A treemap: areas show the sizes of subtrees, grouped by container."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flaxckpt._util import html, humanize

_HEAD = 20.0
_PAD = 3.0
_LETTER, _BOLD = 7.2, 8.2
"""Approximate width of a letter in the widest common font."""

COLOURS = 6


class Tile(NamedTuple):
    """A rectangle to draw.

    Attributes:
        name: The label.
        description: A sentence for readers of the picture.
        path: The path of the subtree.
        bytes: The size of the subtree; at least 0.
    """

    name: str
    description: str
    path: str
    bytes: int


class TileGroup(NamedTuple):
    """Tiles in a common frame."""

    name: str
    tiles: Sequence[Tile]

    @property
    def bytes(self) -> int:
        """The total size of the tiles."""
        return sum(tile.bytes for tile in self.tiles)


class Rectangle(NamedTuple):
    """A rectangle in a picture."""

    x: float
    y: float
    width: float
    height: float


def treemap(groups: Sequence[TileGroup], width: float, height: float) -> html.Markup:
    """Draws all tiles of nonzero size."""
    total = sum(group.bytes for group in groups)
    order = sorted(range(len(groups)), key=lambda n: -groups[n].bytes)
    boxes = squarify([groups[n].bytes for n in order], Rectangle(0, 0, width, height))
    parts: list[html.Markup] = []
    for colour, (n, box) in enumerate(zip(order, boxes, strict=True)):
        if groups[n].bytes:
            parts += _group(groups[n], box, min(colour, COLOURS - 1), total)
    largest = ", ".join(
        f"{groups[n].name} {humanize.size(groups[n].bytes)}" for n in order[:6]
    )
    return html.picture(
        "Sizes by subtree",
        f"Areas are bytes of arrays: {largest}.",
        (width, height),
        *parts,
        class_="treemap",
    )


def _group(
    group: TileGroup, box: Rectangle, colour: int, total: int
) -> list[html.Markup]:
    inner = Rectangle(
        box.x + _PAD / 2, box.y + _PAD / 2, box.width - _PAD, box.height - _PAD
    )
    parts = []
    has_head = inner.height > 2.4 * _HEAD and inner.width > 50
    if has_head:
        share = f"{humanize.size(group.bytes)}, {group.bytes / total:.0%}"
        head = _fitting(f"{group.name}  {share}", inner.width - 2, _BOLD)
        parts.append(
            html.label(inner.x + 2, inner.y + 14, head or "…", class_="group-name")
        )
        inner = Rectangle(inner.x, inner.y + _HEAD, inner.width, inner.height - _HEAD)
    tiles = sorted(group.tiles, key=lambda tile: -tile.bytes)
    boxes = squarify([tile.bytes for tile in tiles], inner)
    parts += [
        _tile(tile, place, colour, total)
        for tile, place in zip(tiles, boxes, strict=True)
        if tile.bytes
    ]
    return parts


def _tile(tile: Tile, box: Rectangle, colour: int, total: int) -> html.Markup:
    share = f"{humanize.size(tile.bytes)}, {tile.bytes / total:.1%}"
    rectangle = html.element(
        "rect",
        x=html.px(box.x + 0.8),
        y=html.px(box.y + 0.8),
        width=html.px(max(box.width - 1.6, 0.4)),
        height=html.px(max(box.height - 1.6, 0.4)),
        rx=2.5,
        class_=f"tile c{colour}",
    )
    texts = []
    name = _tail(tile.name, box.width - 8)
    if name and box.height > 20:
        texts.append(html.label(box.x + 6, box.y + 16, name, class_="tile-name"))
        size = _fitting(humanize.size(tile.bytes), box.width - 8)
        if size and box.height > 36:
            texts.append(html.label(box.x + 6, box.y + 31, size, class_="tile-size"))
    return html.element(
        "g",
        html.element("title", f"{tile.description}: {share}"),
        rectangle,
        *texts,
        data_path=tile.path,
        data_bytes=tile.bytes,
    )


def _tail(path: str, width: float) -> str:
    """Returns the last keys of a path that fit, or the start of the last key."""
    keys = path.split("/")
    for n in range(len(keys)):
        shown = "/".join(keys[n:])
        if len(shown) * _LETTER <= width:
            return shown
    return _fitting(keys[-1], width)


def _fitting(text: str, width: float, letter: float = _LETTER) -> str:
    """Returns the start of a text that fits; empty if too little fits."""
    letters = int(width / letter)
    if len(text) <= letters:
        return text
    return f"{text[: letters - 1]}…" if letters >= 5 else ""


# ---- layout -----------------------------------------------------------------------


def squarify(sizes: Sequence[float], box: Rectangle) -> list[Rectangle]:
    """Divides `box` into rectangles with areas in the ratio of `sizes`.

    The rectangles are as square as rows allow (Bruls, Huizing and van Wijk).

    Args:
        sizes: At least 0 each, the largest first.
        box: The rectangle to fill.
    """
    total = sum(sizes)
    if not total or box.width <= 0 or box.height <= 0:
        return [Rectangle(box.x, box.y, 0, 0) for _ in sizes]
    areas = [size / total * box.width * box.height for size in sizes]
    boxes: list[Rectangle] = []
    while len(boxes) < len(areas):
        rest = areas[len(boxes) :]
        side = min(box.width, box.height)
        count = 1
        while count < len(rest) and _worst(rest[: count + 1], side) <= _worst(
            rest[:count], side
        ):
            count += 1
        row, box = _row(rest[:count], box)
        boxes += row
    return boxes


def _worst(areas: Sequence[float], side: float) -> float:
    """Returns the largest aspect ratio in a row."""
    total = sum(areas)
    if not total or not side or not areas[-1]:
        return 0.0 if not total else float("inf")
    square = (total / side) ** 2
    return max(areas[0] / square, square / areas[-1])


def _row(areas: Sequence[float], box: Rectangle) -> tuple[list[Rectangle], Rectangle]:
    """Returns rectangles along the shorter side, and the rest of the box."""
    total = sum(areas)
    if box.width >= box.height:
        width = min(total / box.height, box.width) if box.height else 0.0
        y, row = box.y, []
        for area in areas:
            height = area / total * box.height if total else 0.0
            row.append(Rectangle(box.x, y, width, height))
            y += height
        return row, Rectangle(box.x + width, box.y, box.width - width, box.height)
    height = min(total / box.width, box.height) if box.width else 0.0
    x, row = box.x, []
    for area in areas:
        width = area / total * box.width if total else 0.0
        row.append(Rectangle(x, box.y, width, height))
        x += width
    return row, Rectangle(box.x, box.y + height, box.width, box.height - height)
