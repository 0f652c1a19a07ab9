"""The geometry of treemaps: areas show the sizes of subtrees, grouped by container."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flaxckpt._report.data import Part
from flaxckpt._util import humanize

_SIZES = {"wide": (960, 300), "narrow": (340, 380)}
"""The pictures for screens and for phones; CSS hides one."""

_HEAD, _PAD = 20.0, 3.0
_LETTER, _BOLD = 7.2, 8.2
"""Approximate width of a letter in the widest common font."""

_COLOURS = 6


class Rectangle(NamedTuple):
    """A rectangle in a picture."""

    x: float
    y: float
    width: float
    height: float


class Tile(NamedTuple):
    """A part of the state in its place, with name and size as far as they fit."""

    part: Part
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
    tiles: list[Tile]


def draw(parts: Sequence[Part]) -> list[Picture]:
    """Returns the pictures of the parts of a state, for screens and for phones."""
    groups: dict[str, list[Part]] = {}
    for part in sorted(parts, key=lambda part: -part.bytes):
        groups.setdefault(part.group, []).append(part)
    return [_draw(groups, name, size) for name, size in _SIZES.items()]


def _draw(
    groups: Mapping[str, Sequence[Part]], name: str, size: tuple[float, float]
) -> Picture:
    sizes = {
        name: sum(part.bytes for part in inside) for name, inside in groups.items()
    }
    order = sorted(sizes, key=lambda name: -sizes[name])
    total = sum(sizes.values())
    boxes = squarify([sizes[name] for name in order], Rectangle(0, 0, *size))
    largest = ", ".join(f"{name} {humanize.size(sizes[name])}" for name in order[:6])
    picture = Picture(name, size, largest, [], [])
    for n, (group, box) in enumerate(zip(order, boxes, strict=True)):
        x, y, width, height = box
        x, y, width, height = x + _PAD / 2, y + _PAD / 2, width - _PAD, height - _PAD
        if height > 2.4 * _HEAD and width > 50:
            size_text = humanize.size(sizes[group])
            share = f"{size_text}, {sizes[group] / total:.0%}"
            texts = (f"{group}  {share}", f"{group}  {size_text}")
            whole = (text for text in texts if len(text) * _BOLD <= width - 2)
            head = next(whole, _fitting(group, width - 2, _BOLD) or "…")
            picture.heads.append((x + 2, y + 14, head))
            y, height = y + _HEAD, height - _HEAD
        parts = [part for part in groups[group] if part.bytes]
        colour = min(n, _COLOURS - 1)
        places = squarify([p.bytes for p in parts], Rectangle(x, y, width, height))
        picture.tiles.extend(
            Tile(part, part.bytes / total, place, colour, _labels(part, place))
            for part, place in zip(parts, places, strict=True)
        )
    return picture


def _labels(part: Part, box: Rectangle) -> list[str]:
    inside = part.name.removeprefix(f"{part.group}/")
    name = _tail(inside, box.width - 8) if box.height > 20 else ""
    size = _fitting(humanize.size(part.bytes), box.width - 8) if box.height > 36 else ""
    return [name, size] if name and size else [name] if name else []


def _tail(path: str, width: float) -> str:
    """Returns the last keys of a path that fit, or the start of the last key."""
    keys = path.split("/")
    ends = ("/".join(keys[n:]) for n in range(len(keys)))
    fitting = (end for end in ends if len(end) * _LETTER <= width)
    return next(fitting, _fitting(keys[-1], width))


def _fitting(text: str, width: float, letter: float = _LETTER) -> str:
    """Returns the start of a text that fits; empty if too little fits."""
    letters = int(width / letter)
    if len(text) <= letters:
        return text
    return f"{text[: letters - 1]}…" if letters >= 5 else ""


def squarify(sizes: Sequence[float], box: Rectangle) -> list[Rectangle]:
    """Divides `box` into rectangles in the ratio of `sizes`, the largest first.

    They are as square as rows allow (Bruls, Huizing and van Wijk).
    """
    x, y, width, height = box
    if not sum(sizes) or width <= 0 or height <= 0:
        return [Rectangle(x, y, 0, 0) for _ in sizes]
    unit = width * height / sum(sizes)
    boxes: list[Rectangle] = []
    while rest := sizes[len(boxes) :]:
        side = min(width, height)  # rows are along the shorter side

        def worst(row: Sequence[float], side: float = side) -> float:
            """Returns the largest aspect ratio in a row."""
            square = (sum(row) * unit / side) ** 2 if side > 0 else 0.0
            if not square or not row[-1]:
                return float("inf")
            return max(row[0] * unit / square, square / (row[-1] * unit))

        count = 1
        while count < len(rest) and worst(rest[: count + 1]) <= worst(rest[:count]):
            count += 1
        total, at = sum(rest[:count]), 0.0
        across = min(total * unit / side, max(width, height)) if side > 0 else 0.0
        for size in rest[:count]:
            along = size / total * side if total else 0.0
            place = (
                (x + at, y, along, across)
                if width < height
                else (x, y + at, across, along)
            )
            boxes.append(Rectangle(*place))
            at += along
        if width < height:
            y, height = y + across, height - across
        else:
            x, width = x + across, width - across
    return boxes
