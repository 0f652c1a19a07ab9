"""`flaxckpt top`: how a run goes."""

import dataclasses
import math
import time

import numpy as np

import flaxckpt
from flaxckpt import _report
from flaxckpt._report.data import MetricValue, Save
from flaxckpt.cli import top
from flaxckpt.policies import BestN, LatestN


def test_shows_healthy_run_once_without_terminal(here, command):
    lines = command.text("top", "run")
    assert lines[0] == "run  ● Healthy, last 2 at step 300 (loss)."
    shown = dict(line.split(maxsplit=1) for line in lines[1:])
    assert shown["newest"].startswith("step 300, saved ")
    assert shown["loss"] == "█▁▅  3 → 2"
    assert shown["saves"].startswith("training waited ")
    document = command.json("top", "run")
    assert document["ok"]
    assert (document["newest"], document["next_step"]) == (300, 400)


def test_reports_diverged_run(here, command):
    with flaxckpt.Checkpointer("bad", keep=[LatestN(9), BestN(1, "l", "min")]) as run:
        for step, loss in ((1, 0.5), (2, np.nan)):
            run.save(step, {"w": np.ones(2)}, metrics={"l": loss})
    lines = command.text("top", "bad", code=1)
    assert "✖ Diverged at 2: NaN since; last finite step 1 is kept" in lines[0]
    assert not command.json("top", "bad", code=1)["ok"]


def test_rejects_single_checkpoint(here, command):
    assert "pass a run directory" in command.refuses("top", "run/100")
    assert "○ No steps yet." in command.text("top", "empty")[0]


def points(values):
    return [MetricValue(n, value, True, None) for n, value in enumerate(values)]


def test_draws_curves_with_characters():
    assert top.curve(points([0.0, 1.0, math.nan, 0.5])) == "▁█!▅  0 → 0.5"
    assert top.curve(points([2.0, 2.0])) == "▁▁  2 → 2"
    assert top.curve([]) == ""
    drawn, _, _ = top.curve(points(range(10_000))).partition("  ")
    assert len(drawn) <= 48
    assert drawn == "".join(sorted(drawn)), "the values grow, and so do the characters"


def test_predicts_next_save_from_previous_intervals(here):
    report = _report.gather("run", _report.ReportOptions(diff=False))
    now = time.time()
    saves = tuple(
        Save(step, now - 120 + 30 * n, 0.1, 1.0, 9, None, "durable", None)
        for n, step in enumerate((100, 200, 300, 400))
    )

    def said(later):
        shown = top.describe(dataclasses.replace(report, saves=saves), now + later)
        return shown[-1].split(maxsplit=1)[1]

    assert said(-10) == "step 500 in 10 s"
    assert said(10) == "step 500 is due"
    assert said(300) == "no save for 6 min, one came every 30 s before"
