"""The geometry of treemaps: areas show the sizes of subtrees, grouped by container."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flaxckpt._util import humanize

_SIZES = {"wide": (960, 300), "narrow": (340, 380)}
"""The pictures for screens and for phones; CSS hides one."""

_HEAD, _PAD = 20.0, 3.0
_LETTER, _BOLD = 7.2, 8.2
"""Approximate width of a letter in the widest common font."""

_COLOURS = 6


class Tile(NamedTuple):
    """A subtree to draw.

    Attributes:
        name: The label.
        path: The path of the subtree.
        leaves: The number of its leaves.
        bytes: Its size; at least 0.
    """

    name: str
    path: str
    leaves: int
    bytes: int


class Rectangle(NamedTuple):
    """A rectangle in a picture."""

    x: float
    y: float
    width: float
    height: float


class DrawnTile(NamedTuple):
    """A tile in its place.

    Attributes:
        tile: The subtree.
        share: Its part of the whole.
        box: The rectangle.
        colour: The number of the colour.
        labels: The name, and the size, as far as they fit.
    """

    tile: Tile
    share: float
    box: Rectangle
    colour: int
    labels: Sequence[str]


class Picture(NamedTuple):
    """A treemap.

    Attributes:
        name: `wide` or `narrow`.
        size: The width and the height.
        largest: The names and sizes of the largest groups.
        heads: The labels of groups: `x`, `y` and the text.
        tiles: The tiles of nonzero size.
    """

    name: str
    size: tuple[float, float]
    largest: str
    heads: list[tuple[float, float, str]]
    tiles: list[DrawnTile]


def draw(groups: Mapping[str, Sequence[Tile]]) -> list[Picture]:
    """Returns the pictures of groups of tiles, for screens and for phones."""
    return [_draw(groups, name, size) for name, size in _SIZES.items()]


def _draw(
    groups: Mapping[str, Sequence[Tile]], name: str, size: tuple[float, float]
) -> Picture:
    sizes = {name: sum(tile.bytes for tile in tiles) for name, tiles in groups.items()}
    order = sorted(sizes, key=lambda name: -sizes[name])
    total = sum(sizes.values())
    boxes = squarify([sizes[name] for name in order], Rectangle(0, 0, *size))
    largest = ", ".join(f"{name} {humanize.size(sizes[name])}" for name in order[:6])
    picture = Picture(name, size, largest, [], [])
    for n, (group, box) in enumerate(zip(order, boxes, strict=True)):
        if not sizes[group]:
            continue
        x, y, width, height = box
        x, y, width, height = x + _PAD / 2, y + _PAD / 2, width - _PAD, height - _PAD
        if height > 2.4 * _HEAD and width > 50:
            share = f"{humanize.size(sizes[group])}, {sizes[group] / total:.0%}"
            head = _fitting(f"{group}  {share}", width - 2, _BOLD) or "…"
            picture.heads.append((x + 2, y + 14, head))
            y, height = y + _HEAD, height - _HEAD
        tiles = sorted(groups[group], key=lambda tile: -tile.bytes)
        places = squarify(
            [tile.bytes for tile in tiles], Rectangle(x, y, width, height)
        )
        picture.tiles.extend(
            DrawnTile(
                tile,
                tile.bytes / total,
                place,
                min(n, _COLOURS - 1),
                _labels(tile, place),
            )
            for tile, place in zip(tiles, places, strict=True)
            if tile.bytes
        )
    return picture


def _labels(tile: Tile, box: Rectangle) -> list[str]:
    name = _tail(tile.name, box.width - 8) if box.height > 20 else ""
    size = _fitting(humanize.size(tile.bytes), box.width - 8) if box.height > 36 else ""
    return [name, size] if name and size else [name] if name else []


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
    if box.width < box.height:  # the same, with the axes exchanged
        row, rest = _row(areas, _flip(box))
        return [_flip(each) for each in row], _flip(rest)
    total = sum(areas)
    width = min(total / box.height, box.width) if box.height else 0.0
    y, row = box.y, []
    for area in areas:
        height = area / total * box.height if total else 0.0
        row.append(Rectangle(box.x, y, width, height))
        y += height
    return row, Rectangle(box.x + width, box.y, box.width - width, box.height)


def _flip(box: Rectangle) -> Rectangle:
    return Rectangle(box.y, box.x, box.height, box.width)
