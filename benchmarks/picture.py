"""Results as bars: `python -m benchmarks.picture results.json picture.svg`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import report
from benchmarks.contenders import CONTENDERS
from benchmarks.machine import Machine
from benchmarks.samples import Results, Series


class Panel(NamedTuple):
    """One group of bars.

    Attributes:
        title: The title.
        case: The case of its series.
        figure: The figure of its series.
    """

    title: str
    case: str
    figure: str


PANELS = (
    Panel("GPT-2, AdamW: save blocks", "train_state", "blocking"),
    Panel("GPT-2, AdamW: save complete", "train_state", "commit"),
    Panel("GPT-2, AdamW: restore, first use", "train_state", "restore and use"),
    Panel("GPT-2, AdamW: memory for a save", "memory", "save"),
    Panel("2,000 tiny leaves: save complete", "tiny", "2,000 leaves: commit"),
    Panel("2,000 tiny leaves: restore", "tiny", "2,000 leaves: restore and use"),
    Panel("20,000 tiny leaves: save complete", "tiny", "20,000 leaves: commit"),
    Panel("20,000 tiny leaves: restore", "tiny", "20,000 leaves: restore and use"),
)
_OURS, _OTHERS, _TEXT = "#1f6f5c", "#a9b4be", "#22272b"
_COLUMNS = 2
_SHARE = 1.35
"""Width of a panel in units of its longest bar; the rest is for the number."""


def draw(data: dict[str, Any], path: Path) -> None:
    """Draws the medians of a run.

    Args:
        data: The output of `report.to_json`.
        path: The file to write; its suffix selects the format.
    """
    results = report.from_json(data)
    panels = [panel for panel in PANELS if _bars(panel, results)]
    rows = max(1, -(-len(panels) // _COLUMNS))
    with mpl.rc_context(
        {
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "svg.fonttype": "path",
            "svg.hashsalt": "flaxckpt",
            "text.color": _TEXT,
        }
    ):
        figure = Figure(figsize=(9.5, 2.1 * rows + 0.9), layout="constrained")
        figure.patch.set_facecolor("white")
        figure.suptitle(
            _caption(data, panels), fontsize=8, x=0.01, ha="left", color=_TEXT
        )
        grid = list(figure.subplots(rows, _COLUMNS, squeeze=False).flat)
        for axes in grid:
            axes.axis("off")
        for axes, panel in zip(grid, panels, strict=False):
            _draw_panel(axes, panel, results)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, facecolor="white", dpi=150, metadata=metadata)


def _bars(panel: Panel, results: Results) -> dict[str, float]:
    """Returns contender -> median, in the order of the contenders."""
    series = {name: Series(panel.case, panel.figure, name) for name in CONTENDERS}
    return {name: results[s].median for name, s in series.items() if s in results}


def _draw_panel(axes: Axes, panel: Panel, results: Results) -> None:
    bars = _bars(panel, results)
    names = list(bars)[::-1]  # from the bottom up
    unit = results[Series(panel.case, panel.figure, names[0])].unit
    axes.axis("on")
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
    drawn = axes.barh(
        names,
        [bars[name] for name in names],
        color=[_OURS if name.startswith("flaxckpt") else _OTHERS for name in names],
        height=0.7,
    )
    labels = [report.quantity(bars[name], unit) for name in names]
    axes.bar_label(drawn, labels, padding=3)
    axes.set_xlim(0, _SHARE * max(bars.values()))
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _caption(data: dict[str, Any], panels: list[Panel]) -> str:
    machine = Machine(**data["machine"])
    versions = {"Python": machine.python, **machine.versions}
    software = ", ".join(f"{name} {v}" for name, v in versions.items() if v)
    drawn = {(panel.case, panel.figure) for panel in panels}
    counts = sorted(
        len(result.values)
        for series, result in report.from_json(data).items()
        if (series.case, series.figure) in drawn
    )
    times = f"{counts[0]} to {counts[-1]}" if counts else "no"
    return (
        f"Medians of {times} measurements; less is better.\n"
        f"{machine}; {machine.date[:10]}\n{software}"
    )


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
