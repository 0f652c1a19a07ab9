"""Leases of readers and announcements of deletions, on a disk and in a store."""

import contextlib
import errno
import json
import os
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from flaxckpt import errors
from flaxckpt._storage import leases
from tests.helpers import faulty_store as faulty
from tests.helpers import seams, system_calls

KINDS = ("disk", "store")
LIMIT_SECS = {"disk": 60, "store": 360}


@pytest.fixture
def path(request, tmp_path):
    """A checkpoint with one file."""
    path = tmp_path / "1"
    if request.param == "store":
        path = faulty.new_path("leases") / "1"
    else:
        path.mkdir()
    (path / "file").write_text("content")
    return path


on_both = pytest.mark.parametrize("path", KINDS, indirect=True)
on_disk = pytest.mark.parametrize("path", ["disk"], indirect=True)
in_store = pytest.mark.parametrize("path", ["store"], indirect=True)


def kind(path):
    return "disk" if type(path) is type(Path()) else "store"


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def put(path, name, *, age=0.0):
    """Writes a file of another reader, or of a deletion, that is so old."""
    if kind(path) == "store":
        now = time.time() - age
        (path / name).write_bytes(json.dumps({"time": now}).encode())
    else:
        (path / name).touch()
        os.utime(path / name, (time.time() - age, time.time() - age))
    return name


OTHER = "READING-there-7-0123abcd"


# ---- readers ----------------------------------------------------------------------


@on_disk
def test_mode_of_lease_file_follows_umask(path):
    before = os.umask(0)
    try:
        lease = leases.Lease(path)
    finally:
        os.umask(before)
    [name] = [name for name in names(path) if name != "file"]
    assert (path / name).stat().st_mode & 0o7777 == 0o666
    lease.release()


@on_both
def test_lease_is_file_until_released(path):
    lease = leases.Lease(path)
    [name] = [name for name in names(path) if name != "file"]
    assert leases.is_lease(name)
    host = re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname())
    assert leases.readers(path) == [f"{host}:{os.getpid()}"]
    lease.release()
    assert names(path) == ["file"]
    put(path, name)
    lease.release()
    assert names(path) != ["file"], "the second call does nothing"
    assert not [t for t in threading.enumerate() if t.name == "flaxckpt lease"]


@on_both
def test_lease_name_sanitizes_and_shortens_host_name(path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "a b/ä-" + "h" * 99)
    lease = leases.Lease(path)
    [name] = [name for name in names(path) if name != "file"]
    assert leases.is_lease(name)
    assert name.startswith("READING-a_b___hhh")
    [reader] = leases.readers(path)
    assert reader.partition(":")[0] == "a_b___" + "h" * 58
    lease.release()


@on_both
def test_two_leases_of_one_process_use_two_files(path):
    first, second = leases.Lease(path), leases.Lease(path)
    assert len(names(path)) == 3
    first.release()
    assert leases.readers(path)
    second.release()
    assert names(path) == ["file"]


@on_disk
def test_checkpoint_vanishing_under_reader_counts_as_deleted(path, monkeypatch):
    put(path, leases.DELETING)
    real = leases.unexpired

    def unexpired(checkpoint, found):
        found = list(found)
        path.rename(path.with_name("aside"))
        return real(checkpoint, found)

    seams.replace(monkeypatch, "leases.unexpired", unexpired)
    assert leases.is_being_deleted(path)


@on_both
def test_missing_checkpoint_has_no_lease_or_readers(path):
    with pytest.raises(FileNotFoundError):
        leases.Lease(path.parent / "2")
    assert leases.readers(path.parent / "2") == []
    assert leases.is_being_deleted(path.parent / "2")
    assert not (path.parent / "2").exists()


@on_disk
def test_failed_lease_leaves_no_file_open(path, monkeypatch):
    before = list(Path("/proc/self/fd").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(leases.secrets, "token_hex", lambda size: "0123abcd")
        lease = leases.Lease(path)
        with pytest.raises(FileExistsError):
            leases.Lease(path)
    lease.release()
    assert len(list(Path("/proc/self/fd").iterdir())) == len(before)
    assert names(path) == ["file"]


@on_disk
def test_lease_follows_renamed_checkpoint(path):
    lease = leases.Lease(path)
    moved = path.rename(path.parent / "aside")
    [name] = [name for name in names(moved) if name != "file"]
    os.utime(moved / name, (1.0, 1.0))
    lease._refresh()
    assert (moved / name).stat().st_mtime > time.time() - 3000
    lease.release()
    assert names(moved) == ["file"]


@on_both
def test_renews_lease_repeatedly(path, monkeypatch):
    with monkeypatch.context() as patch:
        seams.replace(patch, "leases.expires_secs", 0.04)
        lease = leases.Lease(path)
    [name] = [name for name in names(path) if name != "file"]
    for _ in range(2):
        put(path, name, age=10_000)
        deadline = time.monotonic() + 60
        while not leases.readers(path) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert leases.readers(path)
    lease.release()


@on_both
def test_retries_failed_renewal(path):
    lease = leases.Lease(path)
    for file in path.iterdir():
        file.unlink()
    if kind(path) == "store":
        with faulty.faulty(path, last=0):
            assert lease._refresh() is not False
    else:
        path.rmdir()
        assert lease._refresh() is not False
    lease.release()


@on_both
def test_forked_child_does_not_release_lease_of_parent(path, monkeypatch):
    lease = leases.Lease(path)
    before = names(path)
    with monkeypatch.context() as patch:
        child = os.getpid() + 1
        patch.setattr(os, "getpid", lambda: child)
        lease.release()
    assert names(path) == before
    assert lease._heartbeat._thread.is_alive()
    lease._heartbeat.stop()


@on_both
def test_releases_leases_at_exit(path):
    held = leases.Lease(path)
    released = leases.Lease(path)
    released.release()
    assert released not in leases._leases
    leases._release_all()
    assert names(path) == ["file"]
    assert held not in leases._leases


# ---- who is alive -----------------------------------------------------------------


@on_both
@pytest.mark.parametrize("sign", [1, -1], ids=["past", "future"])
def test_reader_counts_until_expired(path, sign):
    limit = LIMIT_SECS[kind(path)]
    put(path, OTHER, age=sign * (limit - 15))
    assert leases.readers(path) == ["there:7"]
    put(path, OTHER, age=sign * (limit + 15))
    assert leases.readers(path) == []


@on_disk
def test_allows_extra_hour_without_file_system_time(path, monkeypatch):
    seams.replace(monkeypatch, "leases.file_system_time", lambda directory: None)
    put(path, OTHER, age=3660 - 30)
    assert leases.readers(path) == ["there:7"]
    put(path, OTHER, age=3660 + 30)
    assert leases.readers(path) == []


@on_disk
def test_measures_age_by_file_system_clock(path, monkeypatch):
    put(path, OTHER, age=70)
    now = time.time()
    seams.replace(monkeypatch, "leases.file_system_time", lambda directory: now - 30)
    assert leases.readers(path) == ["there:7"]
    assert not leases.is_older(path / OTHER, 45)
    assert leases.is_older(path / OTHER, 35)


@on_disk
def test_unknown_age_is_not_older(path, monkeypatch):
    put(path, OTHER, age=70)
    assert leases.is_older(path / OTHER, 60)
    assert not leases.is_older(path / OTHER, 80)
    assert not leases.is_older(path / "missing", 0)
    seams.replace(monkeypatch, "leases.file_system_time", lambda directory: None)
    assert not leases.is_older(path / OTHER, 60)


@on_disk
def test_file_system_time_is_current(path):
    assert abs(leases._file_system_time(path) - time.time()) < 600
    assert leases._file_system_time(path / "missing") is None
    assert names(path) == ["file"]


@in_store
@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"7", b"{}", b'{"time": []}', b"[" * 100_000]
)
def test_reader_of_unknown_age_counts(path, content):
    (path / OTHER).write_bytes(content)
    assert leases.readers(path) == ["there:7"]


@on_both
def test_unexpired_ignores_missing_files(path):
    assert leases.unexpired(path, [OTHER, "READING-gone-1-0123abcd"]) == []
    put(path, OTHER)
    assert leases.unexpired(path, iter(["gone", OTHER])) == [OTHER]
    assert leases.unexpired(path, []) == []


def test_recognizes_only_exact_lease_names():
    for name in (OTHER, "DELETING", f"READING-{'h' * 64}-1-01234567"):
        assert leases.is_lease(name), name
    for name in (
        "READING",
        "READING-notes.txt",
        f"READING-{'h' * 65}-1-01234567",
        OTHER + "0",
        "x" + OTHER,
        "DELETING.txt",
    ):
        assert not leases.is_lease(name), name
    assert leases.reader(OTHER) == "there:7"
    assert leases.reader("READING-a-b-7-0123abcd") == "a-b:7"
    assert leases.reader("READING-\x1b") == errors.printable("READING-\x1b")


# ---- deletions --------------------------------------------------------------------


@on_both
def test_announces_deletion_while_it_lasts(path):
    assert not leases.is_being_deleted(path)
    with leases.deletion(path):
        assert names(path) == ["DELETING", "file"]
        assert leases.is_being_deleted(path)
        assert leases.readers(path) == []
    assert names(path) == ["file"]
    assert not leases.is_being_deleted(path)


@on_both
def test_ignores_announcement_of_old_interrupted_deletion(path):
    put(path, "DELETING", age=400)
    assert not leases.is_being_deleted(path)
    with leases.deletion(path):
        assert leases.is_being_deleted(path), "announced anew"


@on_both
def test_deletion_rejects_checkpoint_being_read(path):
    put(path, OTHER)
    put(path, "READING-here-9-0123abcd")
    with (
        pytest.raises(
            errors.SaveFailedError,
            match=r"not deleted: it is being read by here:9, there:7; .* after 60 s",
        ),
        leases.deletion(path),
    ):
        pytest.fail("the block began")
    assert "DELETING" not in names(path)


@on_disk
def test_deletion_may_remove_its_own_announcement(path):
    with leases.deletion(path):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    assert not path.exists()


@on_disk
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EIO])
def test_only_full_disk_permits_unannounced_deletion(path, monkeypatch, code):
    system_calls.fail(monkeypatch, Path, "touch", code)
    begun = []
    with contextlib.suppress(OSError), leases.deletion(path):
        begun.append(code)
    assert bool(begun) == (code in (errno.ENOSPC, errno.EDQUOT))


@on_disk
def test_deletion_ignores_failed_removal_of_announcement(path, monkeypatch):
    system_calls.fail(monkeypatch, Path, "unlink", errno.EACCES)
    with leases.deletion(path):
        pass
    assert names(path) == ["DELETING", "file"]


# ---- leftovers in stores ----------------------------------------------------------


@in_store
def test_sweep_removes_expired_leases(path):
    put(path, OTHER, age=400)
    put(path, "READING-here-9-0123abcd", age=300)
    (path / "READING-directory" / "file").write_text("of a user")
    leases.sweep(path)
    assert names(path) == ["READING-directory", "READING-here-9-0123abcd", "file"]
    put(path, "DELETING", age=400)
    leases.sweep(path)
    assert "DELETING" not in names(path)
    put(path, "DELETING")
    put(path, "old", age=400)
    leases.sweep(path)
    assert {"DELETING", "old"} <= {*names(path)}


@in_store
def test_sweep_ignores_missing_files(path, monkeypatch):
    def is_recent(file):
        file.unlink()
        return False

    put(path, OTHER)
    seams.replace(monkeypatch, "leases.is_recent", is_recent)
    leases.sweep(path)
    assert names(path) == ["file"]
