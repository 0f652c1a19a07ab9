"""The time between saves is chosen from their measured cost."""

import itertools
from typing import NamedTuple

import pytest

import flaxckpt
from flaxckpt import SaveResult, errors
from tests.helpers import command_line, run_files


class Save(NamedTuple):
    """A save that ends at a known time."""

    loop: "Loop"
    began: float
    ends: float

    def done(self):
        return self.loop.steps >= self.ends

    def wait(self):
        if self.loop.fails:
            raise errors.SaveFailedError("the disk is full")
        return SaveResult(None, "", 0, 0.0, self.loop.now - self.began)


class Loop(flaxckpt.Checkpointer):
    """A run whose loop has a clock of its own, and saves of known cost.

    Args:
        save_steps: Number of steps that run beside a save, each slower by `delay`.
        fails: Whether all saves fail.
    """

    def __init__(
        self, path, *, blocked=0.5, save_steps=4, delay=0.25, fails=False, **options
    ):
        super().__init__(path)
        self.now, self.steps, self.saved_at = 0.0, 0, []
        self.blocked, self.save_steps, self.delay = blocked, save_steps, delay
        self.fails = fails
        self.begun = None
        self.on_step = flaxckpt.CheckpointCallback(
            self, clock=lambda: self.now, save_last=False, check_step=False, **options
        )

    def run(self, steps, secs=1.0):
        for _ in range(steps):
            is_saving = self.begun is not None and not self.begun.done()
            self.now += secs + (self.delay if is_saving else 0)
            self.steps += 1
            self.on_step(self.steps, {})
        return self

    def save(self, step, state, **options):
        self.begun = Save(self, self.now, self.steps + self.save_steps)
        self.now += self.blocked
        self.saved_at.append(self.now)
        return self.begun

    @property
    def choices(self):
        """The choices of an interval that the journal has, as dicts."""
        events = run_files.read_events(self.directory)
        return [event.details for event in events if event.kind == "scheduled"]

    @property
    def intervals(self):
        return [b - a for a, b in itertools.pairwise(self.saved_at)]


def test_first_save_follows_enough_measured_steps(tmp_path):
    loop = Loop(tmp_path, overhead=0.01).run(30)
    assert loop.saved_at == [23.5]  # a step without a begin, two that compile, twenty


def test_saves_cost_given_fraction_of_time(tmp_path):
    loop = Loop(tmp_path, overhead=0.01).run(2000)
    # A save costs 0.5 s of blocking and 4 steps with 0.25 s of delay each.
    [choice] = loop.choices  # reported once
    assert choice["cost_secs"] == pytest.approx(1.5)
    assert all(150 <= secs <= 152.5 for secs in loop.intervals)
    assert len(loop.intervals) > 10
    lost = 1.5 * len(loop.saved_at)
    assert lost / loop.now == pytest.approx(0.01, rel=0.05)


def test_only_rare_failures_change_save_interval(tmp_path):
    rare = Loop(tmp_path / "rare", overhead=0.01, mtbf_secs=1e6).run(20_000)
    # sqrt(2 * 1.5 s * 1e6 s)
    assert all(1732 <= secs <= 1734.5 for secs in rare.intervals)
    assert "a failure each 1e+06 s" in rare.choices[-1]["reason"]
    frequent = Loop(tmp_path / "frequent", overhead=0.01, mtbf_secs=10).run(2000)
    assert all(150 <= secs <= 152.5 for secs in frequent.intervals)


def test_free_save_is_not_followed_at_once_by_another(tmp_path):
    loop = Loop(tmp_path, blocked=0.0, delay=0.0, overhead=0.5).run(200)
    assert all(secs >= 2 * loop.save_steps for secs in loop.intervals)
    assert "a save takes 4 s" in loop.choices[-1]["reason"]


def test_follows_and_reports_change_of_cost(tmp_path):
    loop = Loop(tmp_path, overhead=0.1).run(500)
    [before] = loop.choices
    assert before["interval_secs"] == pytest.approx(15)
    loop.blocked = 3.5
    loop.run(1000)
    after = loop.choices[-1]
    assert after["interval_secs"] == pytest.approx(45)
    assert "a save each 45 s, because it costs the loop 4.5 s" in after["reason"]


def test_does_not_measure_failed_save(tmp_path):
    loop = Loop(tmp_path, overhead=0.01, fails=True).run(60)
    assert loop.saved_at
    assert not loop.choices
    loop.fails = False
    loop.run(60)
    assert len(loop.choices) == 1


@pytest.mark.slow
def test_callback_measures_saves_and_reports_its_choice(tmp_path):
    now = [0.0]
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        callback = flaxckpt.CheckpointCallback(
            ckpt, overhead=0.1, save_last=False, clock=lambda: now[0]
        )
        saved = []
        for step in range(1, 200):
            now[0] += 1.0
            if callback(step, {"n": step}):
                saved.append(step)
                ckpt.wait()
        assert saved[0] == 23
        assert len(saved) > 3
        callback.close()
    events = run_files.read_events(tmp_path / "run")
    scheduled = [event for event in events if event.kind == "scheduled"]
    assert scheduled
    assert scheduled[0].details["interval_secs"] > 0
    assert "saves: a save each" in command_line.run("explain", tmp_path / "run")


@pytest.mark.parametrize(
    "options",
    [
        {"overhead": 0},
        {"overhead": 1},
        {"overhead": "1 %"},
        {"mtbf_secs": 0, "overhead": 0.01},
        {"mtbf_secs": float("inf"), "overhead": 0.01},
        {"mtbf_secs": 3600.0},
    ],
)
def test_rejects_invalid_options(tmp_path, options):
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        with pytest.raises(errors.OptionError, match=next(iter(options))):
            flaxckpt.CheckpointCallback(ckpt, **options)
        with pytest.raises(errors.OptionError, match="pass one"):
            flaxckpt.CheckpointCallback(ckpt, overhead=0.01, every_secs=10)
