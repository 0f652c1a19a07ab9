"""`flaxckpt top`: how a run goes."""

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest

import flaxckpt
from flaxckpt.policies import BestN, LatestN
from tests.helpers import report_runs


def test_shows_healthy_run_once_without_terminal(here, command):
    lines = command.text("top", "run")
    assert lines[0] == "run  ● Healthy so far, last 2 at step 300 (loss)."
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


def write_journal(directory, rows):
    """Writes the journal of a run without steps: (seconds ago, step, metrics)."""
    lines = [
        {
            "time": time.time() - ago,
            "kind": "committed",
            "step": step,
            "path": f"{directory}/{step}",
            "details": {"metrics": metrics, "blocked_secs": 0.1, "total_secs": 1.0},
        }
        for ago, step, metrics in rows
    ]
    Path(directory).mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    Path(directory, "events.jsonl").write_text(text)


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([0.0, 1.0, math.nan, 0.5], "▁█!▅  0 → 0.5"),
        ([2.0, 2.0], "▁▁  2 → 2"),
        ([], None),
        (range(10_000), None),
    ],
)
def test_draws_curves_with_characters(here, command, values, drawn):
    rows = [(9e4, step, {"loss": value}) for step, value in enumerate(values)]
    write_journal("gone", rows)
    lines = [line.split(maxsplit=1) for line in command.text("top", "gone")]
    found = dict(lines).get("loss")
    if not values or drawn:
        assert found == drawn
        return
    bars, _, _ = found.partition("  ")
    assert 40 < len(bars) <= 48
    assert [*bars] == sorted(bars), "the values grow, and so do the characters"


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (3.6, "step 500 in 6 h"),
        (12, "step 500 is due"),
        (100, "no save for 4 d, one came every 10 h before"),
    ],
)
def test_predicts_next_save_from_previous_intervals(here, command, last, said):
    """Saves came every ten hours, and the last one some hours ago."""
    steps = (100, 200, 300, 400)
    ages = [3600 * (last + 10 * n) for n in (3, 2, 1, 0)]
    write_journal(
        "gone", [(age, step, {}) for age, step in zip(ages, steps, strict=True)]
    )
    assert command.text("top", "gone")[-1].split(maxsplit=1) == ["next", said]


def test_page_and_top_agree_on_the_last_stall(here, command):
    """Of the last save with a known wait, which became durable or not."""
    write_journal("gone", [(9.0, 1, {})])
    with Path("gone/events.jsonl").open("a", encoding="utf-8") as journal:
        for kind, details in (
            ("started", {}),
            ("snapshot", {"blocked_secs": 0.25}),
            ("failed", {"error": "no space"}),
        ):
            row = {"time": time.time(), "kind": kind, "step": 2, "details": details}
            journal.write(json.dumps(row | {"path": "gone/2"}) + "\n")
    assert command.json("top", "gone", code=1)["blocked_secs"] == 0.25
    (card,) = (
        found
        for found in report_runs.Elements(report_runs.page_of("gone")).with_data(
            "data-card", "data-value"
        )
        if found["data-card"] == "last-save"
    )
    assert float(card["data-value"]) == 0.25
