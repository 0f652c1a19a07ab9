"""Charts of a metric of several runs, a line for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flaxckpt._report import data
from flaxckpt._report.charts import curves, frame, scales
from flaxckpt._report.data import MetricValue
from flaxckpt._util import html, humanize

_HEIGHT = 280
_TOP, _BOTTOM = 16, 26
_COLOURS = 10


def run_curves(
    name: str, runs: Mapping[int, tuple[str, Sequence[MetricValue]]]
) -> html.Markup:
    """Draws a metric of several runs over the steps.

    Args:
        name: The name of the metric.
        runs: Number of a run, which decides its colour -> its name and its values, at
            least one, finite, by ascending step.
    """
    points = [point for _, series in runs.values() for point in series]
    values = [point.value for point in points]
    steps = [point.step for point in points]
    bottom = _HEIGHT - _BOTTOM
    x = scales.Scale(min(steps), max(steps), 0.0, 100.0)
    linear = scales.linear_axis(values, bottom, _TOP)
    log = scales.log_axis(values, bottom, _TOP)
    axes = [linear] if log is None else [linear, log]
    plot = html.plot(
        f"{name} of {humanize.count(len(runs), 'run')} over steps",
        f"From {min(values):.6g} to {max(values):.6g}.",
        _HEIGHT,
        *[_layer(name, runs, x, axis) for axis in axes],
        frame.level(bottom, "baseline"),
        *frame.step_axis(x, bottom + 18, 8),
    )
    switch = curves.log_switch(name) if log is not None else html.NOTHING
    return html.element(
        "figure",
        html.element("figcaption", html.element("strong", name), switch),
        frame.frame(frame.vertical_axis(_HEIGHT, *axes), plot),
        data_metric=name,
    )


def _layer(
    name: str,
    runs: Mapping[int, tuple[str, Sequence[MetricValue]]],
    x: scales.Scale,
    y: scales.Axis,
) -> html.Markup:
    drawn = [_run(name, number, *run, x, y) for number, run in runs.items()]
    return html.element("g", *frame.grid(y), *drawn, class_=frame.kind(y))


def _run(
    name: str,
    number: int,
    run: str,
    series: Sequence[MetricValue],
    x: scales.Scale,
    y: scales.Axis,
) -> html.Markup:
    last = data.last_good(series) or series[-1]
    best = [point for point in series if point.best == "best"]
    facts = [f"best {humanize.number(p.value)} at step {p.step:,}" for p in best[-1:]]
    facts.append(f"last {humanize.number(last.value)} at step {last.step:,}")
    end = html.element(
        "circle",
        cx=html.percent(x(last.step)),
        cy=html.px(y(last.value)),
        r=3.5,
        class_="run-end",
    )
    return html.element(
        "g",
        html.element("title", f"{run}: {name} {', '.join(facts)}"),
        curves.line(series, x, y, _HEIGHT),
        end,
        class_=f"run r{number % _COLOURS}",
        data_run=run,
    )


def key(runs: Mapping[int, str]) -> html.Markup:
    """Returns the key of the colours, from the number and the name of each run."""
    entries = [
        html.element(
            "li",
            html.element(
                "svg",
                html.element("rect", y=4, width=12, height=4, class_="run-key"),
                viewBox="0 0 12 12",
                class_=f"swatch r{number % _COLOURS}",
                aria_hidden="true",
            ),
            run,
        )
        for number, run in runs.items()
    ]
    return html.element("ul", *entries, class_="legend", aria_label="Key")
