"""The time between saves is chosen from their measured cost."""

from typing import NamedTuple

import pytest

import flaxckpt
from flaxckpt import SaveResult, errors
from flaxckpt._training.save_interval import SaveInterval
from tests.helpers import command_line, run_files


class Save(NamedTuple):
    """A save that ends at a known time."""

    loop: "Loop"
    began: float
    ends: float

    def done(self):
        return self.loop.steps >= self.ends

    def wait(self):
        return SaveResult(None, "", 0, 0.0, self.loop.now - self.began)


class Loop:
    """A loop of steps on a clock of its own, with saves of known cost.

    Args:
        save_steps: Number of steps that run beside a save, each slower by `delay`.
    """

    def __init__(self, *, blocked=0.5, save_steps=4, delay=0.25, **options):
        self.now = 0.0
        self.interval = SaveInterval(clock=lambda: self.now, **options)
        self.blocked, self.save_steps, self.delay = blocked, save_steps, delay
        self.saved_at = [0.0]
        self.steps = 0
        self.choices = []
        self._save = None

    def run(self, steps, secs=1.0):
        for _ in range(steps):
            self.interval.begin_step()
            is_saving = self._save is not None and not self._save.done()
            self.now += secs + (self.delay if is_saving else 0)
            self.steps += 1
            if (choice := self.interval.end_step()) is not None:
                self.choices.append(choice)
            if self.interval.is_due(self.saved_at[-1]):
                self._save = Save(self, self.now, self.steps + self.save_steps)
                self.now += self.blocked
                self.interval.note_save(self._save, self.blocked)
                self.saved_at.append(self.now)
        return self

    @property
    def intervals(self):
        return [
            b - a for a, b in zip(self.saved_at[1:], self.saved_at[2:], strict=False)
        ]


def test_first_save_follows_enough_measured_steps():
    loop = Loop(overhead=0.01, mtbf_secs=None).run(30)
    assert loop.saved_at[1:] == [22.5]  # two steps that compile, and twenty


def test_saves_cost_given_fraction_of_time():
    loop = Loop(overhead=0.01, mtbf_secs=None).run(2000)
    # A save costs 0.5 s of blocking and 4 steps with 0.25 s of delay each.
    [choice] = loop.choices  # reported once
    assert choice.cost_secs == pytest.approx(1.5)
    assert all(150 <= secs <= 152.5 for secs in loop.intervals)
    assert len(loop.intervals) > 10
    lost = 1.5 * (len(loop.saved_at) - 1)
    assert lost / loop.now == pytest.approx(0.01, rel=0.05)


def test_only_rare_failures_change_save_interval():
    rare = Loop(overhead=0.01, mtbf_secs=1e6).run(20_000)
    # sqrt(2 * 1.5 s * 1e6 s)
    assert all(1732 <= secs <= 1734.5 for secs in rare.intervals)
    assert "a failure each 1e+06 s" in rare.interval.reason
    frequent = Loop(overhead=0.01, mtbf_secs=10).run(2000)
    assert all(150 <= secs <= 152.5 for secs in frequent.intervals)


def test_free_save_is_not_followed_at_once_by_another():
    loop = Loop(blocked=0.0, delay=0.0, overhead=0.5, mtbf_secs=None).run(200)
    assert all(secs >= 2 * loop.save_steps for secs in loop.intervals)
    assert "a save takes 4 s" in loop.interval.reason


def test_follows_and_reports_change_of_cost():
    loop = Loop(overhead=0.1, mtbf_secs=None).run(500)
    [before] = loop.choices
    assert before.interval_secs == pytest.approx(15)
    loop.blocked = 3.5
    loop.run(1000)
    after = loop.choices[-1]
    assert after.interval_secs == pytest.approx(45)
    assert "a save each 45 s, because it costs the loop 4.5 s" in after.reason


def test_does_not_measure_failed_save(tmp_path):
    interval = SaveInterval(0.01, None, lambda: 0.0)
    (tmp_path / "file").write_text("in the way")
    handle = flaxckpt.save_async(tmp_path / "file" / "state", {"n": 1})
    with pytest.raises(errors.CheckpointError):
        handle.wait()
    interval.note_save(handle, 0.5)
    interval.begin_step()
    assert interval.end_step() is None
    assert interval.reason == "the cost of a save is measured"


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
