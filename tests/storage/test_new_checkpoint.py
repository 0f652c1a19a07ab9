"""The life of a checkpoint in a store: locked, written, committed, withdrawn, swept."""

import json
import time
import types

import pytest

from flaxckpt import errors
from flaxckpt._storage import commit_marker, files, leases, locks, transaction
from flaxckpt._storage.storage import of
from tests.helpers import faulty_store as faulty
from tests.helpers import seams

FILES = {"state/d/0.small.0": b"weights", "_METADATA": b"{}"}


@pytest.fixture
def path(monkeypatch):
    """A checkpoint in a store where no request arrives late."""
    seams.replace(monkeypatch, "locks.late_secs", 0.0)
    return faulty.new_path("new-checkpoint") / "1"


def new(path, *, overwrite=False, keep=lambda name: False):
    return commit_marker.new_checkpoint(path, overwrite=overwrite, keep=keep)


def write(path, **options):
    """Writes and commits a checkpoint; returns the bytes that were counted."""
    with new(path, **options) as made:
        for name, content in FILES.items():
            (made / name).write_bytes(content)
        return commit_marker.commit(made, b"{}")


def write_and_fail(path, error, act=lambda made: None):
    """Raises `error` after writing a file and `act`."""
    with new(path) as made:
        (made / "file").write_bytes(b"1")
        act(made)
        raise error


def leave(path, holder_id="gone"):
    """Leaves the lock of a dead writer of this process."""
    holder = locks._self()._replace(id=holder_id)
    path.store.write(path.key + locks.LOCK, holder.content())


def sweep(path):
    commit_marker.sweep(path.parent, lambda name: name.isdigit())


def after(monkeypatch, seam, act):
    """Calls `act` after the next request of a kind, such as "bucket.create"."""
    real = seams.current(seam)

    def do(*given):
        result = real(*given)
        seams.replace(monkeypatch, seam, real)
        act()
        return result

    seams.replace(monkeypatch, seam, do)


def interrupt():
    raise KeyboardInterrupt


WHOLE = sorted([*FILES, commit_marker.MARKER])
LOST = pytest.raises(errors.CheckpointExistsError, match="taken over")


# ---- writing ----------------------------------------------------------------------


def test_checkpoint_exists_only_after_commit(path):
    with new(path) as made:
        assert made == path
        assert locks.is_locked(path)
        assert commit_marker.is_unfinished(path)
        (made / "file").write_bytes(b"12345")
        assert not commit_marker.is_committed(path)
        assert commit_marker.commit(made, b"{}") == 7
        assert commit_marker.is_committed(path)
        assert not commit_marker.is_unfinished(path)
    assert not locks.is_locked(path)
    assert sorted(path.keys()) == [commit_marker.MARKER, "file"]
    assert not commit_marker._locks


def test_is_unfinished_needs_lock_or_bare_marker(path):
    assert not commit_marker.is_unfinished(path)
    (path / "file").write_bytes(b"1")
    assert not commit_marker.is_unfinished(path)
    leave(path)
    assert commit_marker.is_unfinished(path)
    (path / commit_marker.MARKER).write_bytes(b"{}")
    assert not commit_marker.is_unfinished(path)
    (path / "file").unlink()
    assert commit_marker.is_unfinished(path)


def test_error_removes_written_objects(path):
    with pytest.raises(KeyError):
        write_and_fail(path, KeyError())
    assert list(path.keys()) == []
    assert not locks.is_locked(path)
    assert not commit_marker._locks


def test_store_error_leaves_lock_to_sweep(path):
    with pytest.raises(errors.StoreError):
        write_and_fail(path, errors.StoreError("no answer"))
    assert list(path.keys()) == []
    assert locks.is_locked(path)
    (path / "late").write_bytes(b"1")  # it arrives after all
    sweep(path)
    assert list(path.keys()) == []
    assert not locks.is_locked(path)


def test_error_after_commit_removes_nothing(path):
    with pytest.raises(KeyError):
        write_and_fail(path, KeyError(), lambda made: commit_marker.commit(made, b"{}"))
    assert len(list(path.keys())) == 2


def test_writer_without_its_lock_removes_nothing(path):
    with pytest.raises(KeyError):
        write_and_fail(path, KeyError(), leave)
    assert list(path.keys()) == ["file"]
    assert locks.is_locked(path)


def test_sweep_removes_objects_left_after_another_removal(path):
    def take_over_and_remove(made):
        leave(made)
        made.store.delete(made.key + locks.LOCK)

    with pytest.raises(KeyError):
        write_and_fail(path, KeyError(), take_over_and_remove)
    assert locks.is_locked(path)
    sweep(path)
    assert list(path.keys()) == []
    assert not locks.is_locked(path)


def test_writer_without_its_lock_does_not_commit(path):
    with LOST, new(path) as made:
        leave(path)
        commit_marker.commit(made, b"{}")
    assert not commit_marker.is_committed(path)


def test_lock_lost_during_commit_raises_error(path, monkeypatch):
    with LOST, new(path) as made:
        (made / "file").write_bytes(b"1")
        after(monkeypatch, "bucket.create", lambda: leave(path))
        commit_marker.commit(made, b"{}")
    assert list(path.keys()) == [commit_marker.MARKER, "file"]


def test_sweep_keeps_objects_of_interrupted_commit(path, monkeypatch):
    def act(made):
        after(monkeypatch, "bucket.create", interrupt)
        commit_marker.commit(made, b"{}")

    with pytest.raises(KeyboardInterrupt):
        write_and_fail(path, AssertionError(), act)
    assert list(path.keys()) == [commit_marker.MARKER, "file"]
    assert locks.is_locked(path)
    sweep(path)
    assert list(path.keys()) == [commit_marker.MARKER, "file"]
    assert not locks.is_locked(path)


def test_does_not_wait_for_lock_of_another_holder(path, monkeypatch):
    def sleep(secs):
        raise AssertionError("waits for the lock")

    clock = types.SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    with locks.lock(path), monkeypatch.context() as patch:
        seams.replace(patch, "locks.time", clock)
        for act in (write, lambda path: commit_marker.locked(path).__enter__()):
            with pytest.raises(errors.CheckpointExistsError, match="written by"):
                act(path)


def test_error_without_store_leaves_objects_and_lock(path, caplog):
    with pytest.raises(KeyError), faulty.faulty(path) as kv:
        write_and_fail(path, KeyError(), lambda made: setattr(kv, "_last", 0))
    assert "could not remove memory://new-checkpoint/run/1 for now" in caplog.text
    assert "could not release the lock" not in caplog.text, "it is left on purpose"
    assert list(path.keys()) == ["file"]
    assert locks.is_locked(path)


@pytest.mark.parametrize("has_step", [False, True])
def test_releases_lock_of_dead_holder_without_remains(path, has_step):
    if has_step:
        write(path)
    leave(path)
    with commit_marker.locked(path, patient=True) as lock:
        assert lock.is_inherited
    assert not locks.is_locked(path)


def refuse(path):
    raise errors.SaveFailedError(f"{path} is not deleted")


def change(path):
    with of(path).lock_file(path / "file", path):
        refuse(path)


def delete(path):
    transaction.delete(path, refuse)


def delete_under_a_reader(path):
    lease = leases.Lease(path)
    try:
        transaction.delete(path, lambda now: None)
    finally:
        lease.release()


@pytest.mark.parametrize("act", [change, delete, delete_under_a_reader])
def test_keeps_lock_of_dead_holder_until_remains_are_removed(path, act):
    (path / "file").write_bytes(b"1")
    leave(path)
    with pytest.raises(errors.SaveFailedError, match="not deleted"):
        act(path)
    assert locks.is_locked(path)
    sweep(path)
    assert list(path.keys()) == []
    assert not locks.is_locked(path)


# ---- what is there before ---------------------------------------------------------


def test_replaces_checkpoint_only_on_demand(path):
    write(path)
    with pytest.raises(errors.CheckpointExistsError, match="in the meantime"):
        write(path)
    assert sorted(path.keys()) == WHOLE
    (path / "PINNED").write_bytes(b"1")
    (path / "old").write_bytes(b"1")
    with new(path, overwrite=True, keep=lambda name: name == "PINNED"):
        assert list(path.keys()) == ["PINNED"]
    assert not locks.is_locked(path)


@pytest.mark.parametrize("overwrite", [False, True])
def test_rejects_replacing_foreign_objects(path, overwrite):
    (path / "notes.txt").write_bytes(b"mine")
    with pytest.raises(errors.CheckpointExistsError, match="not a checkpoint"):
        write(path, overwrite=overwrite)
    assert list(path.keys()) == ["notes.txt"]
    assert not locks.is_locked(path)


def test_new_writer_replaces_remains_of_dead_writer(path):
    (path / "old").write_bytes(b"1")
    leave(path)
    write(path)
    assert sorted(path.keys()) == WHOLE


def test_replaces_late_marker(path):
    (path / commit_marker.MARKER).write_bytes(b"late")
    write(path)
    assert sorted(path.keys()) == WHOLE


@pytest.mark.parametrize("error", [errors.StoreError("no answer"), KeyboardInterrupt()])
def test_sweep_removes_interrupted_replacement(path, error, monkeypatch):
    write(path)

    def delete_all(keys, check):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(path.store, "delete_all", delete_all)
        with pytest.raises(type(error)):
            write(path, overwrite=True)
    assert not commit_marker.is_committed(path)
    assert locks.is_locked(path)
    sweep(path)
    assert list(path.keys()) == []


def test_lock_lost_during_replacement_stops_removal(path, monkeypatch):
    write(path)
    (path / "old").write_bytes(b"1")
    after(monkeypatch, "bucket.delete", lambda: leave(path))
    with LOST:
        write(path, overwrite=True)
    assert sorted(path.keys()) == sorted([*FILES, "old"])


def test_write_new_replaces_late_writes(path):
    commit_marker.write_new(path / "file", b"1")
    commit_marker.write_new(path / "file", b"2")
    assert (path / "file").read_bytes() == b"2"


def test_write_new_raises_error_if_others_keep_writing(path, monkeypatch):
    tries = []

    def refuse(store, key, *given):
        tries.append(key)

    seams.replace(monkeypatch, "bucket.create", refuse)
    with pytest.raises(errors.CheckpointExistsError, match="also being written"):
        commit_marker.write_new(path / "file", b"1")
    assert len(tries) == commit_marker._LATE_TRIES
    path.store.write(path.key + "/file", b"theirs")
    seams.replace(monkeypatch, "bucket.exchange", refuse)
    with pytest.raises(errors.CheckpointExistsError, match="also being written"):
        commit_marker.write_new(path / "file", b"1")
    assert len(tries) == 3 * commit_marker._LATE_TRIES


def test_paused_writer_without_its_lock_writes_no_object(path):
    with LOST, new(path):
        lock = commit_marker._locks[path]
        lock._holder = lock._holder._replace(beat=lock._holder.beat - 1000)
        leave(path)
        commit_marker.write_new(path / "file", b"1")
    assert list(path.keys()) == []


def test_writer_without_its_lock_replaces_no_object(path):
    with LOST, new(path):
        leave(path)
        path.store.write(path.key + "/file", b"theirs")
        commit_marker.write_new(path / "file", b"1")
    assert (path / "file").read_bytes() == b"theirs"


# ---- deleting ---------------------------------------------------------------------


def test_restores_withdrawn_marker(path):
    with locks.lock(path) as lock:
        assert commit_marker.withdraw(lock) is None
        commit_marker.restore(lock, None)
    assert not commit_marker.is_committed(path)
    write(path)
    with locks.lock(path) as lock:
        marker = commit_marker.withdraw(lock)
        assert marker == b"{}"
        assert not commit_marker.is_committed(path)
        commit_marker.restore(lock, marker)
    assert (path / commit_marker.MARKER).read_bytes() == b"{}"


def test_lost_lock_prevents_withdraw_restore_and_remove(path):
    write(path)
    with locks.lock(path) as lock:
        leave(path)
        with LOST:
            commit_marker.withdraw(lock)
    with locks.lock(path) as lock:
        leave(path)
        commit_marker.remove(lock)
        assert lock.is_left
    assert sorted(path.keys()) == WHOLE
    (path / commit_marker.MARKER).unlink()
    with locks.lock(path) as lock:
        leave(path)
        with LOST:
            commit_marker.restore(lock, b"{}")
    assert not commit_marker.is_committed(path)


def test_interrupted_removal_leaves_lock_to_sweep(path, monkeypatch):
    (path / "file").write_bytes(b"1")
    seams.replace(monkeypatch, "bucket.delete_all", lambda *given: interrupt())
    with pytest.raises(KeyboardInterrupt), locks.lock(path) as lock:
        commit_marker.remove(lock)
    assert locks.is_locked(path)


def test_sweep_does_not_continue_unanswered_removal_at_once(path, monkeypatch):
    seams.replace(monkeypatch, "locks.late_secs", 1000.0)
    (path / "file").write_bytes(b"1")
    with faulty.faulty(path) as kv, locks.lock(path) as lock:
        kv._last = 0
        commit_marker.remove(lock)
    sweep(path)
    assert list(path.keys()) == ["file"], "requests to remove it may still arrive"
    assert locks.is_locked(path)


def test_sweep_completes_failed_removal(path, caplog):
    (path / "file").write_bytes(b"1")
    with faulty.faulty(path) as kv, locks.lock(path) as lock:
        kv._last = 0
        commit_marker.remove(lock)
        assert lock.is_left
    assert "could not remove" in caplog.text
    sweep(path)
    assert list(path.keys()) == []
    with locks.lock(path) as lock:
        commit_marker.remove(lock)
        assert not lock.is_left


# ---- leftovers --------------------------------------------------------------------


def test_sweep_removes_only_remains_of_dead_writers(path, caplog):
    root = path.parent
    for name in ("1", "2", "3", "4", "theirs", "6"):
        (root / name / "file").write_bytes(b"1")
    (root / "2" / commit_marker.MARKER).write_bytes(b"{}")
    for name in ("1", "2", "theirs", "6"):
        leave(root / name)
    (root / f"4{locks.LOCK}" / "file").write_bytes(b"of a user")
    (root / "notes.txt").write_bytes(b"of a user")
    with locks.lock(root / "3"):
        sweep(root / "3")
        assert locks.is_locked(root / "3")
    assert list((root / "1").keys()) == []
    assert len(list((root / "2").keys())) == 2, "it is committed"
    for name in ("3", "4", "theirs"):
        assert list((root / name).keys()) == ["file"], name
    assert list((root / "6").keys()) == []
    locked = [name for name in ("1", "2", "3", "6") if locks.is_locked(root / name)]
    assert not locked
    assert locks.is_locked(root / "theirs")


def test_sweep_continues_past_step_with_readers(path):
    root = path.parent
    for name in ("1", "2"):
        (root / name / "file").write_bytes(b"1")
        leave(root / name)
    lease = leases.Lease(root / "1")
    sweep(path)
    lease.release()
    assert list((root / "1").keys()) == ["file"]
    assert list((root / "2").keys()) == []
    assert locks.is_locked(root / "1")
    assert not locks.is_locked(root / "2")


WITHOUT_DIGESTS = [b"", b"\xff", b"written by Orbax", b"[1]", b"1", b"[" * 100_000]


@pytest.mark.parametrize("marker", WITHOUT_DIGESTS, ids=range(len(WITHOUT_DIGESTS)))
@pytest.mark.parametrize("is_whole", [True, False])
def test_marker_without_digests_counts_only_beside_other_objects(
    path, marker, is_whole
):
    if is_whole:
        (path / "file").write_bytes(b"1")
    (path / commit_marker.MARKER).write_bytes(marker)
    leave(path)
    sweep(path)
    kept = [commit_marker.MARKER, "file"] if is_whole else []
    assert list(path.keys()) == kept
    assert not locks.is_locked(path)


@pytest.mark.parametrize("manifest", [b"mine", b"another's", None])
def test_marker_counts_only_with_matching_objects(path, manifest):
    (path / "file").write_bytes(b"1")
    if manifest is not None:
        (path / commit_marker.MANIFEST).write_bytes(manifest)
    digests = {commit_marker.MANIFEST: files.digest(b"mine")}
    (path / commit_marker.MARKER).write_bytes(json.dumps(digests).encode())
    leave(path)
    sweep(path)
    is_kept = manifest == b"mine"
    assert commit_marker.is_committed(path) == is_kept
    assert bool(list(path.keys())) == is_kept
