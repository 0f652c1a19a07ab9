"""Rules of retention that make no sense, time for deletions, deletions that fail."""

import logging
import types

import numpy as np
import pytest

import flaxckpt
from flaxckpt import _steps, _storage, errors
from flaxckpt._formats.items import Items
from flaxckpt._run import judge, retention
from flaxckpt.policies import BestN, LatestN
from tests.helpers import seams

PLAIN = _steps.names.StepFormat()


def rules(
    keep=(), keep_dataset=(), keep_items=None, metrics_from=None, items=("a", "b")
):
    return judge.Rules.of(
        keep, keep_dataset, keep_items or {}, metrics_from, Items(items)
    )


def save(root, *steps):
    with flaxckpt.Checkpointer(root) as ckpt:
        for step in steps:
            ckpt.save(step, {"w": np.ones(2)})


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
def test_rules_that_make_no_sense_are_refused(options, told):
    with pytest.raises(errors.OptionError, match=told):
        rules(**options)


def test_rules_without_policies_for_an_item_leave_it_alone():
    latest = LatestN(1)
    assert rules(keep_items={"a": [latest], "c": []}).keep_items == {"a": (latest,)}
    assert rules(keep_dataset=[latest]).keep_items == {"dataset": (latest,)}
    found = rules(keep_items={"dataset": [latest]}, keep=[latest])
    assert (found.keep_items, found.keep) == ({"dataset": (latest,)}, (latest,))


# ---- time -------------------------------------------------------------------------


@pytest.mark.parametrize("is_awaited", [True, False])
def test_deletions_end_after_a_while_if_somebody_waits(monkeypatch, is_awaited):
    clock = types.SimpleNamespace(now=100.0)
    seams.replace(
        monkeypatch,
        "retention.time",
        types.SimpleNamespace(monotonic=lambda: clock.now),
    )
    is_over = retention._deadline(lambda: is_awaited)
    clock.now += 10.0
    assert [is_over(), is_over()] == [False, False], "two are always allowed"
    assert is_over() is is_awaited
    clock.now = 101.9
    assert not is_over()


def test_prune_has_all_the_time_and_a_save_that_is_awaited_has_not(
    tmp_path, monkeypatch
):
    save(tmp_path, *range(1, 9))
    times = iter(range(0, 10_000, 10))
    seams.replace(
        monkeypatch,
        "retention.time",
        types.SimpleNamespace(monotonic=lambda: next(times)),
    )
    found = retention.Retention(tmp_path, PLAIN, rules([LatestN(2)]))
    some = found.delete_unkept(just_saved=8, is_awaited=lambda: True)
    assert some == (1, 2)
    assert found.delete_unkept() == (3, 4, 5, 6)


def test_leftovers_are_swept_only_if_time_is_left(tmp_path, monkeypatch):
    save(tmp_path, 1, 2, 3, 4)
    left = tmp_path / "9.orbax-checkpoint-tmp-deleted-0123abcd"
    left.mkdir()
    times = iter(range(0, 10_000, 10))
    seams.replace(
        monkeypatch,
        "retention.time",
        types.SimpleNamespace(monotonic=lambda: next(times)),
    )
    found = retention.Retention(tmp_path, PLAIN, rules([LatestN(2)]))
    assert found.delete_unkept(just_saved=4, is_awaited=lambda: True) == (1, 2)
    assert left.exists()
    found.delete_unkept(just_saved=4, is_awaited=lambda: True)
    assert not left.exists()


# ---- reasons ----------------------------------------------------------------------


def test_steps_not_uploaded_stay_and_count_elsewhere(tmp_path):
    save(tmp_path / "here", 1, 2)
    save(tmp_path / "there", 2, 3, 4)
    _steps.markers.mark_for_upload(tmp_path / "there" / "3")
    _steps.markers.mark_for_upload(tmp_path / "there" / "4")
    here, there = (
        retention.Retention(tmp_path / name, PLAIN, rules([LatestN(2)]))
        for name in ("here", "there")
    )
    assert there.explain()[3] == ["LatestN(2)", "not uploaded"]
    assert [here.would_keep(step, there) for step in (1, 2, 3, 4, 5)] == [
        *(False, False, True, True, False)
    ]


def test_explain_names_deleted_items_of_kept_steps(tmp_path):
    save(tmp_path, 1, 2)
    for step in ("1", "2"):
        for item in ("dataset", "b"):
            _steps.markers.mark_item_deleted(tmp_path / step, item)
    found = retention.Retention(tmp_path, PLAIN, rules([LatestN(1)]))
    why = ["newest", "LatestN(1)", "item b deleted", "dataset state deleted"]
    assert found.explain() == {1: [], 2: why}


# ---- steps that another job replaces ----------------------------------------------


def replace(path, value=9.0, **options):
    """Replaces a step, as another job does."""
    with flaxckpt.Checkpointer(path.parent) as ckpt:
        ckpt.save(
            int(path.name), {"w": np.full(2, value)}, on_exists="overwrite", **options
        )


def branches(value):
    return {name: {"w": np.full(2, value)} for name in ("model", "ema")}


def before(monkeypatch, module, name, action):
    """Has `action` happen, once, just before a function of a module is called."""
    real, waiting = getattr(module, name), [action]

    def call(path, *args, **options):
        if waiting:
            waiting.pop()(path)
        return real(path, *args, **options)

    monkeypatch.setattr(module, name, call)


@pytest.mark.parametrize(
    ("kind", "module", "function"),
    [
        ("file", _steps.delete, "delete"),
        ("file", _storage.leases, "deletion"),
        ("file", _storage.rename, "withdraw"),
        ("memory", _steps.delete, "delete"),
        ("memory", _storage.locks, "lock"),
    ],
)
def test_a_step_that_another_job_replaces_after_the_decision_stays(
    store_path, monkeypatch, caplog, kind, module, function
):
    caplog.set_level(logging.INFO, "flaxckpt")
    root = store_path(kind)
    save(root, 1, 2, 3)
    found = retention.Retention(root, PLAIN, rules([LatestN(1)]))
    before(monkeypatch, module, function, lambda *_: replace(root / "1"))
    assert found.delete_unkept() == (2,)
    assert f"step 1 stays for now: {root / '1'} is not deleted: it was just" in (
        caplog.text
    )
    assert flaxckpt.load(root / "1")["w"][0] == 9.0
    assert found.delete_unkept() == (1,)


class OneInTen:
    """A policy that keeps a step if it is at least 10 s after the one kept before."""

    SECS = (0, 0, 10, 15, 20, 30)

    def preserved(self, checkpoints):
        kept = []
        for number in sorted(c.step for c in checkpoints):
            if not kept or self.SECS[number] >= self.SECS[kept[-1]] + 10:
                kept.append(number)
        return set(kept)


@pytest.mark.parametrize("just_saved", [5, None])
def test_a_whole_step_is_not_deleted_in_favour_of_two_damaged_ones(
    tmp_path, just_saved
):
    save(tmp_path, 1, 2, 3, 4, 5)
    for step in (2, 3):
        (tmp_path / f"{step}/state/manifest.ocdbt").unlink()
    found = retention.Retention(tmp_path, PLAIN, rules([OneInTen()]))
    assert found.delete_unkept(just_saved=just_saved) == ()
    assert found.index.paths().keys() == {1, 2, 3, 4, 5}


def test_a_step_that_becomes_the_best_during_the_decision_stays(tmp_path, monkeypatch):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"w": np.ones(2)}, metrics={"loss": step + 1.0})
    before(
        monkeypatch,
        retention.run_index,
        "identify_save",
        lambda path: replace(path, metrics={"loss": 0.5}),
    )
    found = retention.Retention(tmp_path, PLAIN, rules([BestN(1, "loss", "min")]))
    assert found.delete_unkept(just_saved=3) == ()
    assert flaxckpt.load(tmp_path / "2")["w"][0] == 9.0
    assert found.delete_unkept() == (1,)


def test_a_step_that_becomes_the_best_during_a_deletion_stays(tmp_path, monkeypatch):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.save(step, {"w": np.ones(2)}, metrics={"loss": float(-step)})
    found = retention.Retention(tmp_path, PLAIN, rules([BestN(1, "loss", "min")]))

    def add_metrics(path):
        if path.name == "1":  # step 2 is to be deleted next
            with flaxckpt.Checkpointer(tmp_path) as ckpt:
                ckpt.add_metrics(2, {"loss": -9.0})

    before(monkeypatch, _steps.delete, "delete", add_metrics)
    assert found.delete_unkept() == (1, 3)
    assert found.index.paths().keys() == {2, 4}, "4 is the newest"


@pytest.mark.parametrize(
    ("losses", "step", "loss", "deleted"),
    [
        ((-1.0, -2.0, -3.0, -4.0), 1, -9.0, (2, 3)),
        ((-1.0, -2.0, -3.0, -4.0), 4, 9.0, (1, 2)),
        ((-1.0, -2.0, -3.0, -4.0), 2, 5.0, (1, 2, 3)),
        ((-3.0, -2.0, -1.0, -4.0), 4, 9.0, (2, 3)),  # the first to be deleted stays
    ],
)
def test_metrics_that_change_after_the_decision_count(
    tmp_path, monkeypatch, losses, step, loss, deleted
):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        for number, each in enumerate(losses, 1):
            ckpt.save(number, {"w": np.ones(2)}, metrics={"loss": each})
    found = retention.Retention(tmp_path, PLAIN, rules([BestN(1, "loss", "min")]))
    real, decisions = found._decide, []

    def decide(just_saved):
        decisions.append(real(just_saved))
        if len(decisions) == 1:
            with flaxckpt.Checkpointer(tmp_path) as ckpt:
                ckpt.add_metrics(step, {"loss": loss})
        return decisions[-1]

    monkeypatch.setattr(found, "_decide", decide)
    assert found.delete_unkept() == deleted


def test_all_steps_are_deleted_if_nobody_waits(tmp_path, monkeypatch):
    save(tmp_path, 1, 2, 3, 4, 5)
    seams.replace(monkeypatch, "retention.deleting_secs", -1.0)
    found = retention.Retention(tmp_path, PLAIN, rules([LatestN(1)]))
    assert found.delete_unkept(is_awaited=lambda: True) == (1, 2)
    assert found.delete_unkept() == (3, 4)
    save(tmp_path, 6, 7, 8)
    assert found.delete_unkept() == (5, 6, 7)


def test_an_item_of_a_step_that_another_job_replaces_stays(tmp_path, monkeypatch):
    with flaxckpt.Checkpointer(tmp_path, items=("model", "ema")) as ckpt:
        for step in (1, 2):
            ckpt.save(step, branches(1.0))

    def replace_items(path):
        with flaxckpt.Checkpointer(tmp_path, items=("model", "ema")) as ckpt:
            ckpt.save(int(path.name), branches(9.0), on_exists="overwrite")

    before(monkeypatch, _steps.delete, "delete_item", replace_items)
    found = retention.Retention(
        tmp_path, PLAIN, rules(keep_items={"ema": [LatestN(1)]}, items=("model", "ema"))
    )
    found.delete_unkept()
    assert flaxckpt.load(tmp_path / "1")["ema"]["w"][0] == 9.0
    found.delete_unkept()
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
def test_a_deletion_that_fails_is_logged_and_the_next_is_done(
    tmp_path, monkeypatch, caplog, error, level, told
):
    caplog.set_level(logging.INFO, "flaxckpt")
    save(tmp_path, 1, 2, 3)
    real = _steps.delete.delete

    def delete(path, **options):
        if path.name == "1":
            raise error
        real(path, **options)

    seams.replace(monkeypatch, "delete.delete", delete)
    found = retention.Retention(tmp_path, PLAIN, rules([LatestN(1)]))
    assert found.delete_unkept() == (2,)
    [record] = [r for r in caplog.records if told in r.getMessage()]
    assert record.levelname == level


class Failing:
    def preserved(self, checkpoints):
        raise ValueError("no idea")


def test_a_policy_that_fails_deletes_nothing(tmp_path, caplog):
    save(tmp_path, 1, 2)
    found = retention.Retention(tmp_path, PLAIN, rules([Failing()]))
    assert found.delete_unkept(just_saved=2) == ()
    assert "nothing is deleted after step 2: no idea" in caplog.text
    with pytest.raises(ValueError, match="no idea"):
        found.delete_unkept()
    assert found.index.paths().keys() == {1, 2}


@pytest.mark.parametrize(("changed", "deleted"), [(1, ()), (2, (1,))])
def test_a_policy_that_fails_later_deletes_no_more(
    tmp_path, monkeypatch, caplog, changed, deleted
):
    save(tmp_path, 1, 2, 3, 4)
    found = retention.Retention(tmp_path, PLAIN, rules([LatestN(1)]))
    real, decisions = found._decide, []

    def decide(just_saved):
        decisions.append(just_saved)
        if len(decisions) == 2:
            raise ValueError("no idea")
        return real(just_saved)

    monkeypatch.setattr(found, "_decide", decide)
    monkeypatch.setattr(found, "_is_outdated", lambda decision, step: step == changed)
    assert found.delete_unkept(just_saved=4) == deleted
    assert "no more steps are deleted: no idea" in caplog.text
    assert found.index.paths().keys() == {1, 2, 3, 4} - {*deleted}


def test_metrics_that_change_all_the_time_hold_up_no_deletion(tmp_path, monkeypatch):
    save(tmp_path, 1, 2, 3)
    found = retention.Retention(tmp_path, PLAIN, rules([LatestN(1)]))
    monkeypatch.setattr(found, "_is_outdated", lambda decision, step: True)
    assert found.delete_unkept() == (1, 2)


def test_metrics_that_no_policy_uses_hold_up_no_deletion(tmp_path):
    state = {"w": np.ones(2)}
    with flaxckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, metrics={"loss": 1.0}, temporary=True).wait()
        assert checkpointer.best_step("loss", "min") == 1  # reads them
        checkpointer.add_metrics(1, {"loss": 2.0})
        assert checkpointer.save(2, state).wait().deleted_steps == (1,)


def test_warns_of_each_metric_that_no_step_has(tmp_path, caplog):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"w": np.ones(2)}, metrics={"loss": 1.0})
    keep = [BestN(1, name, "min") for name in ("loss", "los", "loess")]
    retention.Retention(tmp_path, PLAIN, rules(keep)).delete_unkept()
    told = [
        name for name in ("loss", "los", "loess") if f"metric {name!r}" in caplog.text
    ]
    assert told == ["los", "loess"]


def test_the_step_just_saved_stays_this_time(tmp_path):
    save(tmp_path, 1, 2, 3)
    found = retention.Retention(tmp_path, PLAIN, rules([LatestN(1)]))
    assert found.delete_unkept(just_saved=1) == (2,)
    assert found.delete_unkept() == (1,)


def test_warns_of_unknown_items_once(tmp_path, caplog):
    save(tmp_path, 1)
    found = retention.Retention(
        tmp_path, PLAIN, rules(keep_items={"c": [LatestN(1)], "state": [LatestN(1)]})
    )
    for _ in range(2):
        found.delete_unkept()
    assert caplog.text.count("policies for 'c', but no step of") == 1
