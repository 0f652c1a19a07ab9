"""Which steps are there, and which ones were: a mark for each on a line."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from flaxckpt import _wording
from flaxckpt._drawing import _markup, _scales
from flaxckpt._drawing._markup import Markup

_HEIGHT, _LEFT, _RIGHT = 62, 14, 14
_MOST_GONE = 600


def strip(
    kept: Mapping[int, str], gone: Sequence[int], best: Collection[int], width: float
) -> Markup:
    """A line with a mark for each step.

    Args:
        kept: Step -> what is said of it, of those that are there; at least one.
        gone: Those that were deleted.
        best: Those that are the best of something.
        width: Of the picture.
    """
    steps = [*kept, *gone]
    x = _scales.Scale(min(steps), max(steps), _LEFT, width - _RIGHT)
    middle = 22.0
    parts = [_markup.line(_LEFT, middle, width - _RIGHT, middle, "baseline")]
    places = {_markup.px(x(step)) for step in sorted(gone)[-_MOST_GONE:]}
    parts += [
        _markup.element(
            "line", x1=at, x2=at, y1=middle - 5, y2=middle + 5, class_="gone"
        )
        for at in sorted(places, key=float)
    ]
    for step, said in kept.items():
        told = _markup.element("title", f"step {step}: {said}")
        parts.append(_mark(x(step), middle, step in best, told))
    for step in _scales.whole_ticks(x.low, x.high, max(2, int(width / 90))):
        shown = _scales.short(step)
        parts.append(_markup.label(x(step), middle + 28, shown, class_="tick middle"))
    return _markup.picture(
        "Steps that stay",
        f"{_wording.count(len(kept), 'step')} there, {len(gone)} deleted, from step"
        f" {min(steps)} to {max(steps)}.",
        (width, _HEIGHT),
        *parts,
    )


def _mark(x: float, y: float, is_best: bool, told: Markup) -> Markup:
    if is_best:
        places = (
            f"{x:.1f},{y - 8:.1f} {x + 8:.1f},{y} {x:.1f},{y + 8:.1f} {x - 8:.1f},{y}"
        )
        return _markup.element("polygon", told, points=places, class_="point best")
    at = _markup.px(x), _markup.px(y)
    return _markup.element("circle", told, cx=at[0], cy=at[1], r=5, class_="point kept")
