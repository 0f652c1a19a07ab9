"""Results as tables and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.machine import Machine
from benchmarks.samples import Result, Results, Series, Settings, Skip, Unit, distinct
from benchmarks.targets import Verdict


def to_json(
    results: Results,
    verdicts: Sequence[Verdict],
    skips: Sequence[Skip],
    machine: Machine,
    settings: Settings,
) -> dict[str, Any]:
    """Returns the results of a run as JSON."""
    return {
        "machine": dataclasses.asdict(machine),
        "rounds": settings.rounds,
        "quick": settings.quick,
        "results": [
            {
                **series._asdict(),
                "unit": result.unit,
                "median": result.median,
                "minimum": result.minimum,
                "values": result.values,
            }
            for series, result in results.items()
        ],
        "targets": [
            {
                "target": verdict.target.what,
                "limit": verdict.target.limit,
                "measured": verdict.value,
                "met": verdict.is_met,
            }
            for verdict in verdicts
        ],
        "skipped": [skip._asdict() for skip in skips],
    }


def from_json(data: dict[str, Any]) -> Results:
    """Returns the results in the output of `to_json`."""
    return {
        Series(row["case"], row["figure"], row["contender"]): Result(
            tuple(row["values"]), row["unit"]
        )
        for row in data["results"]
    }


def case_table(case: str, results: Results) -> Table:
    """Returns a table: per figure and contender median, minimum, ratio to flaxckpt."""
    table = Table(title=case, box=box.SIMPLE)
    for title in ("figure", "contender"):
        table.add_column(title)
    for title in ("median", "minimum", "to flaxckpt"):
        table.add_column(title, justify="right")
    in_case = [series for series in results if series.case == case]
    for figure in distinct(series.figure for series in in_case):
        base = results.get(Series(case, figure, "flaxckpt"))
        table.add_section()
        for series in (s for s in in_case if s.figure == figure):
            result = results[series]
            table.add_row(
                figure,
                series.contender,
                quantity(result.median, result.unit),
                quantity(result.minimum, result.unit),
                f"{result.median / base.median:.3g}"
                if base and base.median > 0
                else "",
            )
    return table


def quantity(value: float, unit: Unit) -> str:
    """Formats a value: `1.23 s`, `4.56 ms`, `1.49 GB`, `5.12 %`."""
    if unit == "x":
        return f"{100 * value:.3g} %"
    steps = (
        ((1, "s"), (1e-3, "ms"), (1e-6, "µs"))
        if unit == "s"
        else ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
    )
    size, name = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    return f"{value / size:.3g} {name}"


def target_table(verdicts: Sequence[Verdict]) -> Table:
    """Returns a table of targets, measured values and verdicts."""
    table = Table(title="targets: ratios of medians", box=box.SIMPLE)
    table.add_column("figure of flaxckpt")
    for title in ("at most", "measured", ""):
        table.add_column(title, justify="right")
    labels = {True: "[green]met", False: "[red]missed", None: "[dim]not measured"}
    for verdict in verdicts:
        value = "" if verdict.value is None else f"{verdict.value:.3f}"
        limit = f"{verdict.target.limit:g}"
        table.add_row(verdict.target.what, limit, value, labels[verdict.is_met])
    return table
