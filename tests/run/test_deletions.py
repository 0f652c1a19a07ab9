"""Rules of retention that make no sense, time for deletions, deletions that fail."""

import itertools
import logging
import threading
import types

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.datasets import StepIndexed
from flaxckpt.policies import BestN, LatestN
from tests.helpers import seams

STATE = {"w": np.ones(2)}


def save(root, *steps, **options):
    """Saves steps; returns those that the last save deleted."""
    with flaxckpt.Checkpointer(root, **options) as ckpt:
        return [ckpt.save(step, STATE).wait() for step in steps][-1].deleted_steps


def save_losses(root, *losses):
    with flaxckpt.Checkpointer(root) as ckpt:
        for step, loss in enumerate(losses, 1):
            ckpt.save(step, STATE, metrics={"loss": loss})


def prune(root, *keep, **options):
    with flaxckpt.Checkpointer(root, keep=keep, **options) as ckpt:
        return ckpt.prune()


def steps_of(root):
    return set(flaxckpt.Checkpointer(root, read_only=True).steps())


# ---- rules ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"metrics_from": 3}, "metrics_from must be a function"),
        ({"keep_items": [LatestN(1)]}, "keep_items must be a dict"),
        ({"keep_items": {"a": [LatestN(1)], "b": [LatestN(1)]}}, "could lose them all"),
        (
            {"keep_items": {x: [LatestN(1)] for x in "abc"}},
            "policies for all items with arrays",
        ),
        (
            {"keep_items": {"dataset": [LatestN(1)]}, "keep_dataset": [LatestN(1)]},
            "pass one of both",
        ),
        ({"keep_items": {"a/b": [LatestN(1)]}}, "which cannot be an item"),
        ({"keep_items": {"a": LatestN(1)}}, r"keep_items\['a'\] must be a list"),
        ({"keep_dataset": LatestN(1)}, "keep_dataset must be a list"),
        ({"keep": LatestN(1)}, "keep must be a list"),
    ],
)
def test_rejects_invalid_rules(tmp_path, options, told):
    with pytest.raises(errors.OptionError, match=told):
        flaxckpt.Checkpointer(tmp_path, items=("a", "b"), **options)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, [True, True, True]),
        ({"keep_items": {"a": [LatestN(1)], "c": []}}, [False, True, True]),
        ({"keep_dataset": [LatestN(1)]}, [True, True, False]),
        ({"keep_items": {"dataset": [LatestN(1)]}}, [True, True, False]),
    ],
)
def test_rules_ignore_items_without_policies(tmp_path, options, left):
    with flaxckpt.Checkpointer(tmp_path, items=("a", "b"), **options) as ckpt:
        for step in (1, 2):
            dataset = StepIndexed(lambda i: i)
            ckpt.save(step, {"a": STATE, "b": STATE}, dataset=dataset)
    names = ("a", "b", "dataset")
    assert [(tmp_path / "1" / name).exists() for name in names] == left
    assert [(tmp_path / "2" / name).exists() for name in names] == [True] * 3


# ---- time -------------------------------------------------------------------------


class Held(LatestN):
    """A policy that decides when a test says so."""

    may_decide = threading.Event()

    def preserved(self, checkpoints):
        assert self.may_decide.wait(60)
        return super().preserved(checkpoints)


def save_held(root, step, *, awaited, meanwhile=lambda: None):
    """Saves a step of a run that keeps two; each look at the clock takes 10 s."""
    Held.may_decide.clear()
    with flaxckpt.Checkpointer(root, keep=[Held(2)]) as ckpt:
        handle = ckpt.save(step, STATE)
        if awaited:
            with pytest.raises(errors.CheckpointTimeoutError):
                handle.wait(0.01)
        meanwhile()
        Held.may_decide.set()
        while not awaited and not handle.done():
            threading.Event().wait(0.01)
        return handle.wait().deleted_steps


def slow_clock(monkeypatch):
    times = itertools.count(0, 10)
    clock = types.SimpleNamespace(monotonic=lambda: next(times))
    seams.replace(monkeypatch, "retention.time", clock)


@pytest.mark.parametrize(
    ("awaited", "deleted"), [(True, (1, 2)), (False, (1, 2, 3, 4, 5, 6))]
)
def test_deletions_stop_at_deadline_if_awaited(tmp_path, monkeypatch, awaited, deleted):
    save(tmp_path, *range(1, 8))
    slow_clock(monkeypatch)
    assert save_held(tmp_path, 8, awaited=awaited) == deleted
    assert prune(tmp_path, LatestN(2)) == tuple(range(deleted[-1] + 1, 7))


def test_sweeps_leftovers_only_if_time_remains(tmp_path, monkeypatch):
    save(tmp_path, 1, 2, 3)
    slow_clock(monkeypatch)
    left = tmp_path / "9.orbax-checkpoint-tmp-deleted-0123abcd"
    assert save_held(tmp_path, 4, awaited=True, meanwhile=left.mkdir) == (1, 2)
    assert left.exists()
    left.rmdir()
    assert save_held(tmp_path, 5, awaited=False, meanwhile=left.mkdir) == (3,)
    assert not left.exists()


# ---- reasons ----------------------------------------------------------------------


def test_explain_names_deleted_items_of_kept_steps(tmp_path):
    options = {"items": ("a", "b"), "keep": [LatestN(1)]}
    with flaxckpt.Checkpointer(tmp_path, **options) as ckpt:
        dataset = StepIndexed(lambda i: i)
        ckpt.save(2, {"a": STATE, "b": STATE}, dataset=dataset)
        for item in ("dataset", "b"):
            ckpt.delete(2, item=item)
        why = ["newest", "LatestN(1)", "item b deleted", "dataset state deleted"]
        assert ckpt.explain() == {2: why}


# ---- steps that another job replaces ----------------------------------------------


def replace(path, value=9.0, **options):
    """Replaces a step, as another job does."""
    with flaxckpt.Checkpointer(path.parent) as ckpt:
        ckpt.save(
            int(path.name), {"w": np.full(2, value)}, on_exists="overwrite", **options
        )


def branches(value):
    return {name: {"w": np.full(2, value)} for name in ("model", "ema")}


def before(monkeypatch, seam, action):
    """Has `action` happen, once, on another thread before a function is called."""
    real, waiting = seams.current(seam), [action]

    def call(path, *args, **options):
        if waiting:
            thread = threading.Thread(target=waiting.pop(), args=(path,))
            thread.start()
            thread.join()
        return real(path, *args, **options)

    seams.replace(monkeypatch, seam, call)


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("file", "delete.delete"),
        ("file", "leases.deletion"),
        ("file", "rename.withdraw"),
        ("memory", "delete.delete"),
        ("memory", "locks.lock"),
    ],
)
def test_keeps_step_replaced_after_decision(
    store_path, monkeypatch, caplog, kind, function
):
    caplog.set_level(logging.INFO, "flaxckpt")
    root = store_path(kind)
    save(root, 1, 2, 3)
    before(monkeypatch, function, lambda _: replace(root / "1"))
    assert prune(root, LatestN(1)) == (2,)
    assert f"step 1 stays for now: {root / '1'} is not deleted: it was just" in (
        caplog.text
    )
    assert flaxckpt.load(root / "1")["w"][0] == 9.0
    assert prune(root, LatestN(1)) == (1,)


class OneInTen:
    """A policy that keeps a step if it is at least 10 s after the one kept before."""

    SECS = (0, 0, 10, 15, 20, 30)

    def preserved(self, checkpoints):
        kept = []
        for number in sorted(c.step for c in checkpoints):
            if not kept or self.SECS[number] >= self.SECS[kept[-1]] + 10:
                kept.append(number)
        return set(kept)


@pytest.mark.parametrize("is_save", [True, False])
def test_does_not_delete_whole_step_for_two_damaged_ones(tmp_path, is_save):
    save(tmp_path, 1, 2, 3, 4)
    for step in (2, 3):
        (tmp_path / f"{step}/state/manifest.ocdbt").unlink()
    if is_save:
        assert save(tmp_path, 5, keep=[OneInTen()]) == ()
    else:
        save(tmp_path, 5)
        assert prune(tmp_path, OneInTen()) == ()
    assert steps_of(tmp_path) == {1, 2, 3, 4, 5}


def test_keeps_step_becoming_best_during_decision(tmp_path, monkeypatch):
    save_losses(tmp_path, 2.0, 3.0)
    before(
        monkeypatch,
        "run_index.identify_save",
        lambda path: replace(path, metrics={"loss": 0.5}),
    )
    best = BestN(1, "loss", "min")
    with flaxckpt.Checkpointer(tmp_path, keep=[best]) as ckpt:
        saved = ckpt.save(3, STATE, metrics={"loss": 4.0}).wait()
    assert saved.deleted_steps == ()
    assert flaxckpt.load(tmp_path / "2")["w"][0] == 9.0
    assert prune(tmp_path, best) == (1,)


def test_keeps_step_becoming_best_during_deletion(tmp_path, monkeypatch):
    save_losses(tmp_path, -1.0, -2.0, -3.0, -4.0)

    def add_metrics(path):
        if path.name == "1":  # step 2 is to be deleted next
            with flaxckpt.Checkpointer(tmp_path) as ckpt:
                ckpt.add_metrics(2, {"loss": -9.0})

    before(monkeypatch, "delete.delete", add_metrics)
    assert prune(tmp_path, BestN(1, "loss", "min")) == (1, 3)
    assert steps_of(tmp_path) == {2, 4}, "4 is the newest"


@pytest.mark.parametrize(
    ("losses", "step", "loss", "deleted"),
    [
        ((-1.0, -2.0, -3.0, -4.0), 1, -9.0, (2, 3)),
        ((-1.0, -2.0, -3.0, -4.0), 4, 9.0, (1, 2)),
        ((-1.0, -2.0, -3.0, -4.0), 2, 5.0, (1, 2, 3)),
        ((-3.0, -2.0, -1.0, -4.0), 4, 9.0, (2, 3)),  # the first to be deleted stays
    ],
)
def test_metrics_changed_after_decision_count(
    tmp_path, monkeypatch, losses, step, loss, deleted
):
    save_losses(tmp_path, *losses)

    def add_metrics(*_):
        with flaxckpt.Checkpointer(tmp_path) as ckpt:
            ckpt.add_metrics(step, {"loss": loss})

    before(monkeypatch, "verify.check", add_metrics)  # of the newest step
    assert prune(tmp_path, BestN(1, "loss", "min")) == deleted


def test_keeps_item_of_replaced_step(tmp_path, monkeypatch):
    with flaxckpt.Checkpointer(tmp_path, items=("model", "ema")) as ckpt:
        for step in (1, 2):
            ckpt.save(step, branches(1.0))

    def replace_items(path):
        with flaxckpt.Checkpointer(tmp_path, items=("model", "ema")) as ckpt:
            ckpt.save(int(path.name), branches(9.0), on_exists="overwrite")

    before(monkeypatch, "delete.delete_item", replace_items)
    rules = {"keep_items": {"ema": [LatestN(1)]}, "items": ("model", "ema")}
    prune(tmp_path, **rules)
    assert flaxckpt.load(tmp_path / "1")["ema"]["w"][0] == 9.0
    prune(tmp_path, **rules)
    assert not (tmp_path / "1" / "ema").exists()


# ---- deletions that fail ----------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "level", "told"),
    [
        (errors.SaveFailedError("pinned"), "INFO", "step 1 stays for now: pinned"),
        (FileNotFoundError("gone"), "INFO", "step 1 was deleted by another process"),
        (PermissionError("denied"), "ERROR", "step 1 could not be deleted: denied"),
    ],
)
def test_logs_failed_deletion_and_continues(
    tmp_path, monkeypatch, caplog, error, level, told
):
    caplog.set_level(logging.INFO, "flaxckpt")
    save(tmp_path, 1, 2, 3)
    real = seams.current("delete.delete")

    def delete(path, **options):
        if path.name == "1":
            raise error
        real(path, **options)

    seams.replace(monkeypatch, "delete.delete", delete)
    assert prune(tmp_path, LatestN(1)) == (2,)
    [record] = [r for r in caplog.records if told in r.getMessage()]
    assert record.levelname == level


class Failing:
    """A policy that keeps the newest step, until it has decided `calls` times."""

    def __init__(self, calls=0):
        self.calls = calls

    def preserved(self, checkpoints):
        self.calls -= 1
        if self.calls < 0:
            raise ValueError("no idea")
        return {max(c.step for c in checkpoints)}


def test_failing_policy_deletes_nothing(tmp_path, caplog):
    save(tmp_path, 1)
    assert save(tmp_path, 2, keep=[Failing()]) == ()
    assert "nothing is deleted after step 2: no idea" in caplog.text
    with pytest.raises(ValueError, match="no idea"):
        prune(tmp_path, Failing())
    assert steps_of(tmp_path) == {1, 2}


@pytest.mark.parametrize(("changed", "deleted"), [(1, ()), (2, (1,))])
def test_failing_policy_stops_deletion(tmp_path, monkeypatch, caplog, changed, deleted):
    save(tmp_path, 1, 2, 3)
    real = seams.current("run_step.is_outdated")
    looked = []

    def is_outdated(step):
        looked.append(step.step)
        return looked.count(changed) == 2 if step.step == changed else real(step)

    seams.replace(monkeypatch, "run_step.is_outdated", is_outdated)
    assert save(tmp_path, 4, keep=[Failing(calls=1)]) == deleted
    assert "no more steps are deleted: no idea" in caplog.text
    assert steps_of(tmp_path) == {1, 2, 3, 4} - {*deleted}


def test_constantly_changing_metrics_do_not_delay_deletion(tmp_path, monkeypatch):
    save(tmp_path, 1, 2, 3)

    def is_outdated(step):
        return step.step == 3

    seams.replace(monkeypatch, "run_step.is_outdated", is_outdated)
    assert prune(tmp_path, LatestN(1)) == (1, 2)


def test_unused_metrics_do_not_delay_deletion(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, STATE, metrics={"loss": 1.0}, temporary=True).wait()
        assert checkpointer.best_step("loss", "min") == 1  # reads them
        checkpointer.add_metrics(1, {"loss": 2.0})
        assert checkpointer.save(2, STATE).wait().deleted_steps == (1,)


def test_warns_about_unknown_metrics(tmp_path, caplog):
    save_losses(tmp_path, 1.0)
    prune(tmp_path, *(BestN(1, name, "min") for name in ("loss", "los", "loess")))
    told = [
        name for name in ("loss", "los", "loess") if f"metric {name!r}" in caplog.text
    ]
    assert told == ["los", "loess"]


def test_keeps_step_just_saved(tmp_path):
    save(tmp_path, 2, 3)
    assert save(tmp_path, 1, keep=[LatestN(1)]) == (2,)
    assert prune(tmp_path, LatestN(1)) == (1,)


def test_warns_once_about_unknown_items(tmp_path, caplog):
    rules = {"c": [LatestN(1)], "b": [LatestN(1)]}
    with flaxckpt.Checkpointer(tmp_path, items=("a", "b"), keep_items=rules) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"a": STATE, "b": STATE})
    assert caplog.text.count("policies for 'c', but no step of") == 1
