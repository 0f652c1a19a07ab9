"""Commits by marker, whatever requests are lost: what is listed is whole."""

import jax.numpy as jnp
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.policies import LatestN
from tests.helpers import faulty_store as faulty
from tests.helpers import run_files, seams, strategies


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    seams.replace(monkeypatch, "locks.late_secs", 0.0)
    seams.replace(monkeypatch, "requests.first_pause_secs", 1e-4)
    seams.replace(monkeypatch, "requests.longest_pause_secs", 1e-4)


def state(step, text="a"):
    return {"w": jnp.full((4, 4), float(step)), "n": step, "text": text}


def assert_sound(path, *, wanted):
    """Reopened, a run has these steps and perhaps more, and all are what they were."""
    with flaxckpt.Checkpointer(path) as ckpt:
        listed = ckpt.steps()
        assert wanted <= set(listed)
        for step in listed:
            found = ckpt.restore(step=step)
            strategies.assert_same(state(step, found["text"]), found)
            assert ckpt.verify(step).ok
    there = {key.partition("/")[0] for key in path.keys()}  # noqa: SIM118
    assert there <= {"events.jsonl", "metadata", *map(str, listed)}
    return listed


def cut_off(path, act, *, wanted):
    """Does `act` with the network gone after its first requests, for every number."""
    for last in range(10_000):
        with faulty.faulty(path, last=last):
            try:
                act()
            except errors.CheckpointError:
                is_done = False
            else:
                is_done = True
        yield is_done
        assert_sound(path, wanted=wanted)
        if is_done:
            return
    raise AssertionError


def test_interrupted_save_leaves_whole_step_or_none():
    path = faulty.new_path("cut-saves")
    flaxckpt.Checkpointer(path).save(1, state(1)).wait()

    def act():
        ckpt = flaxckpt.Checkpointer(path)
        ckpt.save(2, state(2), metrics={"loss": 1.0}).wait()

    tries = 0
    for is_done in cut_off(path, act, wanted={1}):
        tries += 1
        with flaxckpt.Checkpointer(path) as ckpt:
            assert ckpt.steps() == [1, 2] if is_done else 1 in ckpt.steps()
            if 2 in ckpt.steps() and not is_done:
                ckpt.delete(2)  # it was committed all the same
    assert tries > 10


@pytest.mark.slow
def test_interrupted_replacement_leaves_whole_step_or_none():
    path = faulty.new_path("cut-replacements")

    def act():
        ckpt = flaxckpt.Checkpointer(path)
        ckpt.save(2, state(2, "new"), on_exists="overwrite").wait()

    flaxckpt.Checkpointer(path).save(1, state(1)).wait()
    found = set()
    for _ in cut_off(path, act, wanted={1}):
        with flaxckpt.Checkpointer(path) as ckpt:
            step = ckpt.restore(step=2)["text"] if 2 in ckpt.steps() else None
            found.add(step)
            ckpt.save(2, state(2, "old"), on_exists="overwrite").wait()
            ckpt.pin(2)
    assert found >= {"old", "new"}


def test_interrupted_deletion_leaves_whole_step_or_none():
    path = faulty.new_path("cut-deletions")
    flaxckpt.Checkpointer(path).save(1, state(1)).wait()

    def act():
        flaxckpt.Checkpointer(path).delete(2)

    def begin():
        with flaxckpt.Checkpointer(path) as ckpt:
            ckpt.save(2, state(2), on_exists="overwrite").wait()

    begin()
    for is_done in cut_off(path, act, wanted={1}):
        if not is_done:
            begin()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(40))
def test_acknowledged_steps_survive_delayed_writes(seed):
    path = faulty.new_path(f"arrivals-{seed}")
    acknowledged = set()
    with faulty.faulty(path, seed=seed, rate=25):
        for step in range(4):
            ckpt = flaxckpt.Checkpointer(path, keep=[LatestN(3)])
            try:
                result = ckpt.save(step, state(step)).wait()
            except errors.SaveFailedError:
                continue
            acknowledged.add(step)
            acknowledged -= set(result.deleted_steps)
    assert acknowledged
    with flaxckpt.Checkpointer(path) as ckpt:
        assert acknowledged <= set(ckpt.steps())
        for step in ckpt.steps():
            strategies.assert_same(state(step), ckpt.restore(step=step))
        for step in range(4):  # whatever came late is in nobody's way
            ckpt.save(step, state(step, "b"), on_exists="overwrite").wait()
            strategies.assert_same(state(step, "b"), ckpt.restore(step=step))


def test_never_replaces_foreign_objects():
    path = faulty.new_path("foreign")
    (path / "7/notes.txt").write_text("mine")
    with flaxckpt.Checkpointer(path) as ckpt:
        assert ckpt.steps() == []
        for how in ("error", "overwrite"):
            with pytest.raises(errors.CheckpointExistsError, match="exists"):
                ckpt.save(7, state(7), on_exists=how)
    assert (path / "7/notes.txt").read_text() == "mine"


def test_reader_protects_its_step_from_deletion():
    path = faulty.new_path("readers")
    with flaxckpt.Checkpointer(path, keep=[LatestN(1)]) as ckpt:
        ckpt.save(1, state(1)).wait()
        for step in ckpt.new_steps(timeout_secs=0.01, poll_secs=0.01):
            if step == 1:
                assert ckpt.save(2, state(2)).wait().deleted_steps == ()
                with pytest.raises(errors.SaveFailedError, match="being read"):
                    ckpt.delete(1)
        assert ckpt.prune() == (1,)
        assert ckpt.steps() == [2]


def test_step_needs_commit_marker():
    path = faulty.new_path("markers")
    with flaxckpt.Checkpointer(path) as ckpt:
        ckpt.save(1, state(1)).wait()
        ckpt.save(2, state(2)).wait()
        (path / "2" / run_files.COMMITTED).unlink()
        assert ckpt.steps() == [1]
        strategies.assert_same(state(1), flaxckpt.load(path))
        with pytest.raises(errors.CheckpointError):
            flaxckpt.load(path / "2")
    assert flaxckpt.Checkpointer(path, read_only=True).steps() == [1]
