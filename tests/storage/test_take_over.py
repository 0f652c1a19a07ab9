"""A process that loses its lock changes nothing of the process that took it over."""

import contextlib

import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt._storage import commit_marker, locks, transaction
from tests.helpers import faulty_store, seams


@pytest.fixture
def final(request, monkeypatch):
    """A step in a new bucket, whose locks are old after no time."""
    seams.replace(monkeypatch, "locks.abandoned_secs", 0.0)
    return faulty_store.new_path(f"take-over-{request.node.originalname[:30]}") / "1"


@contextlib.contextmanager
def elsewhere():
    """In the block, this process is one of another machine."""
    with pytest.MonkeyPatch.context() as patch:
        seams.replace(patch, "locks.machine", lambda: "elsewhere")
        yield


def sweep(final):
    """Another process takes over the lock, and removes what is not committed."""
    with elsewhere():
        for _ in range(2):  # the first one sees the lock for the first time
            commit_marker.sweep(final.parent, lambda name: True)


def save(final, content):
    """Another process saves the step, unless it is there or locked."""
    with elsewhere(), locks.lock(final):
        if not commit_marker.is_committed(final):
            for name in ("data", commit_marker.MARKER):
                final.store.write((final / name).key, content)


def write(final, act):
    """This process writes the step; `act` runs after it has the lock."""
    with commit_marker.new_checkpoint(final, overwrite=False, keep=lambda name: False):
        act()


def contents(final):
    return {
        name: (final / name).read_bytes() for name in ("data", commit_marker.MARKER)
    }


def test_writer_without_its_lock_replaces_no_object(final):
    def act():
        sweep(final)
        save(final, b"theirs")
        commit_marker.write_new(final / "data", b"mine")

    with pytest.raises(errors.CheckpointExistsError, match="taken over"):
        write(final, act)
    assert contents(final) == dict.fromkeys(contents(final), b"theirs")


def test_does_not_report_late_marker_as_commit(final, monkeypatch):
    real = commit_marker.write_new

    def write_new(path, content):
        if path.name == commit_marker.MARKER:
            sweep(final)
        real(path, content)

    def act():
        commit_marker.write_new(final / "data", b"mine")
        commit_marker.commit(final, b"mine")

    seams.replace(monkeypatch, "commit_marker.write_new", write_new)
    with pytest.raises(errors.CheckpointExistsError, match="taken over"):
        write(final, act)
    assert not (final / "data").is_file()


@pytest.mark.parametrize("look", [1, 2], ids=["before", "after"])
def test_deleter_without_its_lock_removes_nothing(final, monkeypatch, look):
    """It loses the lock before, or after, it has removed the commit marker."""
    save(final, b"old")
    real, looks = seams.current("leases.readers"), []

    def readers(path):
        looks.append(path)
        if len(looks) == look:
            sweep(final)
            with elsewhere(), contextlib.suppress(errors.CheckpointExistsError):
                save(final, b"theirs")
        return real(path)

    seams.replace(monkeypatch, "leases.readers", readers)
    with contextlib.suppress(errors.CheckpointExistsError):
        transaction.delete(final, lambda path: None)
    there = b"old" if look == 1 else b"theirs"
    assert contents(final) == dict.fromkeys(contents(final), there)


def test_writer_with_lost_lock_commits_nothing(final):
    lock = final.key + locks.LOCK

    def act():
        (final / "state/d/0.small.0").write_bytes(b"mine")
        with elsewhere(), locks.lock(final.parent / "2"):
            other = final.store.read((final.parent / "2").key + locks.LOCK).value
        final.store.write(lock, other)
        commit_marker.commit(final, b"{}")

    with pytest.raises(errors.CheckpointExistsError, match="taken over"):
        write(final, act)
    assert not commit_marker.is_committed(final)
    assert final.store.has(lock), "it is the other's"


def test_only_locks_of_live_writers_block_saves(monkeypatch):
    path = faulty_store.new_path("locks")
    state = {"n": 1}
    with (
        locks.lock(path / "1"),
        pytest.raises(errors.CheckpointExistsError, match="wait"),
    ):
        flaxckpt.Checkpointer(path).save(1, state).wait()
    assert flaxckpt.Checkpointer(path).save(1, state).wait().step == 1

    # One of another machine: nobody here can tell, so it is watched.
    with elsewhere(), locks.lock(path / "3"):
        there = path.store.read((path / "3").key + locks.LOCK).value
    seams.replace(monkeypatch, "locks.abandoned_secs", 0.3)
    seams.replace(monkeypatch, "locks.look_secs", 0.02)
    lock = (path / "2").key + locks.LOCK
    path.store.write(lock, there)
    (path / "2/state/d/0.small.0").write_bytes(b"old")
    with flaxckpt.Checkpointer(path) as ckpt:
        assert path.store.has(lock), "not known to be gone"
        ckpt.save(2, {"n": 2}).wait()
        assert ckpt.restore() == {"n": 2}
