"""A process that loses its lock changes nothing of the process that took it over."""

import contextlib

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from tests.helpers import faulty_store, seams

LOCK = ".orbax-checkpoint-tmp-writing"
OLD, MINE, THEIRS = ({"w": np.full(9, n), "name": f"{n}"} for n in range(3))


@pytest.fixture
def root(request, monkeypatch):
    """A run in a new bucket, whose locks are old after no time."""
    seams.replace(monkeypatch, "locks.abandoned_secs", 0.0)
    return faulty_store.new_path(f"take-over-{request.node.originalname[:30]}")


@contextlib.contextmanager
def elsewhere():
    """In the block, this process is one of another machine."""
    with pytest.MonkeyPatch.context() as patch:
        seams.replace(patch, "locks.machine", lambda: "elsewhere")
        yield


def sweep(root):
    """Another process takes over the locks, and removes what is not committed."""
    with elsewhere():
        for _ in range(2):  # the first one sees the lock for the first time
            flaxckpt.Checkpointer(root).close()


def save(root, state, step=1):
    flaxckpt.Checkpointer(root).save(step, state).wait()


def save_theirs(root):
    """Another process saves the step, unless it is there or locked."""
    with elsewhere(), contextlib.suppress(errors.CheckpointExistsError):
        save(root, THEIRS)


def before(monkeypatch, seam, act, is_at=lambda *args: True):
    """Calls `act` once, before the first call of a seam for which `is_at` holds."""
    real, done = seams.current(seam), []

    def do(*args, **options):
        if not done and is_at(*args):
            done.append(True)
            act()
        return real(*args, **options)

    seams.replace(monkeypatch, seam, do)
    return done


def assert_holds(root, state):
    found = flaxckpt.load(root / "1")
    assert found["name"] == state["name"]
    assert (found["w"] == state["w"]).all()
    assert flaxckpt.verify(root / "1").ok


def test_writer_without_its_lock_replaces_no_object(root, monkeypatch):
    other = faulty_store.new_path("theirs") / "1"
    save(other.parent, THEIRS)

    def act():
        sweep(root)
        for key in other.store.keys(other.prefix):
            name = key.removeprefix(other.prefix)
            (root / "1" / name).write_bytes((other / name).read_bytes())

    before(monkeypatch, "commit_marker.write_new", act)
    with pytest.raises(errors.CheckpointExistsError, match="taken over"):
        save(root, MINE)
    assert_holds(root, THEIRS)


def test_does_not_report_late_marker_as_commit(root, monkeypatch):
    def is_marker(path, *_):
        return path.name == "commit_success.txt"

    before(monkeypatch, "commit_marker.write_new", lambda: sweep(root), is_marker)
    with pytest.raises(errors.CheckpointExistsError, match="taken over"):
        save(root, MINE)
    assert not (root / "1/flaxckpt.json").is_file()
    assert flaxckpt.Checkpointer(root).steps() == []


@pytest.mark.parametrize("look", [1, 2], ids=["before", "after"])
def test_deleter_without_its_lock_removes_nothing(root, monkeypatch, look):
    """It loses the lock before, or after, it has removed the commit marker."""
    save(root, OLD)
    looks = []

    def act():
        sweep(root)
        save_theirs(root)

    def is_at(path):
        looks.append(path)
        return len(looks) == look

    ckpt = flaxckpt.Checkpointer(root)
    done = before(monkeypatch, "leases.readers", act, is_at)
    with contextlib.suppress(errors.CheckpointExistsError, errors.SaveFailedError):
        ckpt.delete(1)
    assert done
    assert_holds(root, OLD if look == 1 else THEIRS)


def lock_of_theirs(root, monkeypatch):
    """Returns the content of a lock that a process of another machine has held."""
    found = []
    lock = (root / "9").key + LOCK
    with pytest.MonkeyPatch.context() as patch, elsewhere():
        read = lambda: found.append(root.store.read(lock).value)  # noqa: E731
        before(patch, "commit_marker.write_new", read)
        save(root, THEIRS, step=9)
    return found[0]


def test_writer_with_lost_lock_commits_nothing(root, monkeypatch):
    lock, other = (root / "1").key + LOCK, lock_of_theirs(root, monkeypatch)
    before(monkeypatch, "commit_marker.commit", lambda: root.store.write(lock, other))
    with pytest.raises(errors.CheckpointExistsError, match="taken over"):
        save(root, MINE)
    assert not (root / "1/commit_success.txt").is_file()
    assert root.store.has(lock), "it is the other's"


def test_only_locks_of_live_writers_block_saves(monkeypatch):
    path = faulty_store.new_path("locks")

    with (
        seams.current("locks.lock")(path / "1"),
        pytest.raises(errors.CheckpointExistsError, match="wait"),
    ):
        save(path, MINE)
    save(path, MINE)
    assert_holds(path, MINE)

    # One of another machine: nobody here can tell, so it is watched.
    there = lock_of_theirs(path, monkeypatch)
    seams.replace(monkeypatch, "locks.abandoned_secs", 0.3)
    seams.replace(monkeypatch, "locks.look_secs", 0.02)
    lock = (path / "2").key + LOCK
    path.store.write(lock, there)
    (path / "2/state/d/0.small.0").write_bytes(b"old")
    with flaxckpt.Checkpointer(path) as ckpt:
        assert path.store.has(lock), "not known to be gone"
        ckpt.save(2, {"n": 2}).wait()
        assert ckpt.restore(step=2) == {"n": 2}
