"""Temporary directories: whose they are, and what a sweep removes."""

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
import types

import pytest

from flaxckpt._storage import rename, temporary
from tests.helpers import seams, system_calls

WRITING = "7.orbax-checkpoint-tmp-writing-0123abcd"
REPLACED = "7.orbax-checkpoint-tmp-replaced-0123abcd"
DELETED = "7.orbax-checkpoint-tmp-deleted-0123abcd"
READER = "READING-there-7-0123abcd"
BRIEF = "7.orbax-checkpoint-tmp-metrics-0123abcd"
MESSAGES = "together.orbax-checkpoint-tmp-5"


REPLACING = "file.0123abcd.tmp"


def leave(root, name, *, age=0.0):
    (root / name).mkdir()
    (root / name / "file").write_text(name)
    then = time.time() - age
    os.utime(root / name, (then, then))
    return root / name


def sweep(root):
    temporary.sweep(root, str.isdigit)


def is_locked(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@pytest.fixture
def shared(monkeypatch):
    """Other machines may see the directories."""
    seams.replace(monkeypatch, "filesystem.is_local", lambda path: False)


def heartbeats():
    return [t for t in threading.enumerate() if t.name == "flaxckpt touch"]


# ---- names ------------------------------------------------------------------------


def test_new_path_returns_unique_leftover_names(tmp_path):
    made = {temporary.new_path(tmp_path / "7", "writing").name for _ in range(9)}
    assert len(made) == 9
    assert temporary.leftovers(sorted(made), str.isdigit) == sorted(made)
    assert temporary.leftovers(made, lambda name: False) == []


def test_recognizes_only_own_leftover_names():
    ours = [WRITING, REPLACED, BRIEF, MESSAGES, "7.orbax-checkpoint-tmp-metrics"]
    ours += [f"{trial}.orbax-checkpoint-tmp-writing-0123abcd" for trial in TRIALS]
    others = ["7", "7.orbax-checkpoint-tmp-4", WRITING + "0", "together"]
    assert temporary.leftovers([*ours, *others], str.isdigit) == ours


TRIALS = ("preflight", "resume")


def test_unfinished_names_lists_unfinished_saves(tmp_path):
    for name in (
        *(WRITING, "8.orbax-checkpoint-tmp", "9.orbax-checkpoint-tmp-17"),
        *(REPLACED.replace("7", "5"), BRIEF.replace("7", "4"), "3"),
        *(f"{trial}.orbax-checkpoint-tmp-writing-0123abcd" for trial in TRIALS),
        ".orbax-checkpoint-tmp-4",
    ):
        (tmp_path / name).mkdir()
    assert temporary.unfinished_names(tmp_path) == ["7", "8", "9"]


# ---- new directories --------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, 0o755])
def test_new_directory_is_locked_and_finally_removed(tmp_path, mode):
    umask = os.umask(0o022)
    try:
        with temporary.new_directory(tmp_path / "7", mode) as path:
            assert path.stat().st_mode & 0o777 == (0o755 if mode is None else 0o700)
            assert temporary.leftovers([path.name], str.isdigit)
            assert is_locked(path)
            sweep(tmp_path)
            (path / "file").touch()
        assert list(tmp_path.iterdir()) == []
    finally:
        os.umask(umask)


def test_renamed_directory_stays(tmp_path):
    with temporary.new_directory(tmp_path / "7") as path:
        path.rename(tmp_path / "7")
        assert is_locked(tmp_path / "7")
    assert [path.name for path in tmp_path.iterdir()] == ["7"]
    assert not is_locked(tmp_path / "7")


def test_error_removes_new_directory(tmp_path):
    with pytest.raises(KeyError), temporary.new_directory(tmp_path / "7"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_non_durable_rename_keeps_directory(tmp_path):
    with (
        pytest.raises(rename.NotDurableError),
        temporary.new_directory(tmp_path / "7") as path,
    ):
        raise rename.NotDurableError(5, "Input/output error")
    assert path.is_dir()


def test_recreates_directory_swept_at_once(tmp_path, monkeypatch):
    real, claimed = temporary.claim, []

    def claim(path):
        claimed.append(path)
        if len(claimed) == 1:
            path.rmdir()
        return real(path)

    seams.replace(monkeypatch, "temporary.claim", claim)
    with temporary.new_directory(tmp_path / "7") as path:
        assert path == claimed[1]
        assert path.is_dir()
    assert len(claimed) == 2


def test_sweep_completes_failed_removal(tmp_path, monkeypatch, caplog):
    def fail(path):
        raise OSError("on fire")

    with monkeypatch.context() as patch:
        seams.replace(patch, "files.remove_tree", fail)
        with temporary.new_directory(tmp_path / "7") as path:
            pass
    assert "on fire" in caplog.text
    sweep(tmp_path)
    assert not path.exists()


# ---- claims -----------------------------------------------------------------------


def test_only_one_of_two_claims_directory(tmp_path):
    path = leave(tmp_path, WRITING)
    with temporary.claim(path) as first, temporary.claim(path) as second:
        assert first
        assert not second
    with temporary.claim(path) as again:
        assert again


@pytest.mark.parametrize("patience_secs", [None, 0.0, 1.0])
@pytest.mark.parametrize("end_secs", [0.75, 1.0, 2.0])
def test_patient_claim_waits_for_end_of_another(
    tmp_path, monkeypatch, patience_secs, end_secs
):
    path = leave(tmp_path, WRITING)
    other = temporary.claim(path)
    clock = types.SimpleNamespace(now=100.0, monotonic=lambda: clock.now)

    def sleep(secs):
        clock.now += secs
        if clock.now == 100 + end_secs:
            other.__exit__(None, None, None)

    clock.sleep = sleep
    seams.replace(monkeypatch, "temporary.time", clock)
    seams.replace(monkeypatch, "temporary.lock_poll_secs", 0.25)
    assert other.__enter__()
    given = {} if patience_secs is None else {"patience_secs": patience_secs}
    with temporary.claim(path, **given) as is_ours:
        assert is_ours == (end_secs <= (patience_secs or 0))
    assert clock.now == 100 + min(end_secs, patience_secs or 0)
    if not is_ours:
        other.__exit__(None, None, None)


def test_does_not_claim_missing_or_replaced_directory(tmp_path, monkeypatch):
    with temporary.claim(tmp_path / "missing") as is_ours:
        assert not is_ours
    real = os.open

    def opened(path, *given):
        descriptor = real(path, *given)
        path.rmdir()
        if path.name == "replaced":
            (tmp_path / "other").mkdir()  # not of the same number
            path.mkdir()
        return descriptor

    monkeypatch.setattr(temporary.os, "open", opened)
    for name in ("gone", "replaced"):
        (tmp_path / name).mkdir()
        with temporary.claim(tmp_path / name) as is_ours:
            assert not is_ours, name


def test_check_claim_rejects_recreated_directory(tmp_path):
    with temporary.new_directory(tmp_path / "7") as path:
        temporary.check_claim(path)
        path.rename(tmp_path / "swept")
        with pytest.raises(FileNotFoundError, match="another process"):
            temporary.check_claim(path)
        path.mkdir()
        with pytest.raises(FileNotFoundError, match="another process"):
            temporary.check_claim(path)
    temporary.check_claim(path)  # nobody claims it


@pytest.mark.parametrize("kind", ["file", "link"])
def test_claim_rejects_files_and_links(tmp_path, kind):
    path = tmp_path / "7"
    if kind == "file":
        path.touch()
    else:
        path.symlink_to(leave(tmp_path, "8"))
    with pytest.raises(OSError, match="7"), temporary.claim(path):
        pass


def test_claims_directory_on_file_system_without_locks(tmp_path, monkeypatch):
    path = leave(tmp_path, WRITING)
    system_calls.fail(monkeypatch, fcntl, "flock", errno.EOPNOTSUPP)
    with temporary.claim(path) as is_ours:
        assert is_ours


def test_claim_closes_its_file_descriptor(tmp_path):
    path = leave(tmp_path, WRITING)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        with temporary.claim(path):
            pass
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_child_process_does_not_keep_inherited_claim(tmp_path, monkeypatch):
    path = leave(tmp_path, WRITING)
    real, opened = os.open, []
    monkeypatch.setattr(
        os, "open", lambda *given: opened.append(real(*given)) or opened[-1]
    )
    with temporary.claim(path):
        child = subprocess.Popen(["sleep", "600"], pass_fds=opened[:1])
    with child, temporary.claim(path) as is_ours:
        child.kill()
        assert is_ours


def test_touches_claimed_directory_on_shared_file_system(tmp_path, monkeypatch, shared):
    seams.replace(monkeypatch, "temporary.touched_every_secs", 0.005)
    path = leave(tmp_path, WRITING, age=1000)
    with temporary.claim(path):
        assert heartbeats()
        deadline = time.monotonic() + 60
        while path.stat().st_mtime < time.time() - 500 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert path.stat().st_mtime > time.time() - 500
    assert not heartbeats()


def test_retries_failed_touch(tmp_path, monkeypatch, shared):
    calls = []

    def utime(descriptor):
        calls.append(descriptor)
        raise OSError("on fire")

    seams.replace(monkeypatch, "temporary.touched_every_secs", 0.001)
    path = leave(tmp_path, WRITING)
    monkeypatch.setattr(temporary.os, "utime", utime)
    with temporary.claim(path):
        deadline = time.monotonic() + 60
        while len(calls) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
    assert len(calls) >= 3


def test_claims_directory_even_without_threads(tmp_path, monkeypatch, shared):
    seams.refuse_threads(monkeypatch)
    with temporary.claim(leave(tmp_path, WRITING)) as is_ours:
        assert is_ours


def test_does_not_touch_local_directory(tmp_path):
    with temporary.claim(leave(tmp_path, WRITING)):
        assert not heartbeats()


# ---- sweeps -----------------------------------------------------------------------

HOLD = """
import sys, pathlib
from flaxckpt._storage import temporary
with temporary.claim(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    input()
"""


def test_sweep_spares_directories_held_by_another_process(tmp_path):
    path = leave(tmp_path, WRITING)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=-1, stdout=-1, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        sweep(tmp_path)
        assert path.exists()
        process.kill()
    sweep(tmp_path)
    assert not path.exists()


def test_sweep_removes_only_leftovers(tmp_path):
    for name in (WRITING, "8", "notes", "x.orbax-checkpoint-tmp-writing-0123abcd"):
        leave(tmp_path, name)
    sweep(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"8", "notes", "x.orbax-checkpoint-tmp-writing-0123abcd"}


LIMITS = {WRITING: 600, REPLACED: 600, BRIEF: 60, MESSAGES: 86_400}


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("is_shared", [False, True])
def test_sweep_removes_leftover_after_age_limit(tmp_path, monkeypatch, name, is_shared):
    seams.replace(monkeypatch, "filesystem.is_local", lambda path: not is_shared)
    (tmp_path / "7").mkdir()
    path = leave(tmp_path, name, age=LIMITS[name] - 30)
    sweep(tmp_path)
    at_once = not is_shared and name in (WRITING, REPLACED)
    assert path.exists() is not at_once
    if not at_once:
        os.utime(path, (time.time() - LIMITS[name] - 30,) * 2)
        sweep(tmp_path)
        assert not path.exists()


@pytest.mark.parametrize("there", ["nothing", "a step", "a broken link"])
def test_sweep_restores_replaced_step_if_name_is_free(tmp_path, there, caplog):
    path = leave(tmp_path, REPLACED)
    if there == "a step":
        leave(tmp_path, "7")
    elif there == "a broken link":
        (tmp_path / "7").symlink_to("nowhere")
    sweep(tmp_path)
    assert not path.exists()
    if there == "nothing":
        assert (tmp_path / "7" / "file").read_text() == REPLACED
        assert "restored" in caplog.text
    elif there == "a step":
        assert (tmp_path / "7" / "file").read_text() == "7"
    else:
        assert (tmp_path / "7").is_symlink()


def test_sweep_keeps_deleted_step_while_read(tmp_path):
    for name in (DELETED, WRITING):
        (leave(tmp_path, name) / READER).touch()
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [DELETED]
    (tmp_path / DELETED / READER).unlink()
    sweep(tmp_path)
    assert not list(tmp_path.iterdir())


def test_sweep_keeps_leftover_renamed_meanwhile(tmp_path, monkeypatch):
    path = leave(tmp_path, WRITING)
    moved = tmp_path / "moved"

    def sync(directory):
        path.rename(moved)

    seams.replace(monkeypatch, "files.sync_directory", sync)
    sweep(tmp_path)
    assert (moved / "file").read_text() == WRITING


@pytest.mark.parametrize("what", [WRITING, REPLACED])
def test_sweep_syncs_names_before_removal_and_after_rename(tmp_path, monkeypatch, what):
    path = leave(tmp_path, what)
    synced = []

    def sync(directory):
        synced.append((directory, path.exists()))

    seams.replace(monkeypatch, "files.sync_directory", sync)
    sweep(tmp_path)
    assert synced == [(tmp_path, what == WRITING)]
    assert not path.exists()
    synced.clear()
    sweep(tmp_path)
    assert synced == []


def test_unremovable_leftover_raises_error(tmp_path, monkeypatch):
    def fail(path):
        raise OSError("on fire")

    leave(tmp_path, WRITING)
    seams.replace(monkeypatch, "files.remove_tree", fail)
    with pytest.raises(OSError, match="on fire"):
        sweep(tmp_path)


def test_sweep_files_removes_old_files_of_crashes(tmp_path):
    names = ["READING-there-7-0123abcd", "DELETING", REPLACING]
    for name in (*names, "notes"):
        (tmp_path / name).touch()
    temporary.sweep_files(tmp_path)
    assert len(list(tmp_path.iterdir())) == len(names) + 1
    for path in tmp_path.iterdir():
        os.utime(path, (time.time() - 50,) * 2)
    temporary.sweep_files(tmp_path)
    assert len(list(tmp_path.iterdir())) == len(names) + 1
    for path in tmp_path.iterdir():
        os.utime(path, (time.time() - 70,) * 2)
    temporary.sweep_files(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_sweep_spares_directories_and_links_named_like_leases(tmp_path):
    (tmp_path / "DELETING").mkdir()
    (tmp_path / "target").touch()
    link = tmp_path / "READING-there-7-0123abcd"
    link.symlink_to(tmp_path / "target")
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1), follow_symlinks=False)
    temporary.sweep_files(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_sweep_files_ignores_file_swept_by_another_process(tmp_path, monkeypatch):
    def is_older(path, secs):
        path.unlink()
        return True

    (tmp_path / "DELETING").touch()
    seams.replace(monkeypatch, "leases.is_older", is_older)
    temporary.sweep_files(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_sweep_files_ignores_files_and_missing_directories(tmp_path):
    temporary.sweep_files(tmp_path / "missing")
    (tmp_path / "file").touch()
    temporary.sweep_files(tmp_path / "file")


def test_sweep_syncs_last_renames_before_removing_leftover(tmp_path, monkeypatch):
    """After a power cut, the step would have the name of the removed directory."""
    final = tmp_path / "1"
    new = temporary.new_path(final, temporary.WRITING)
    for path, text in ((final, "old"), (new, "new")):
        path.mkdir()
        (path / "data").write_text(text)
    calls = []
    claim, sync, remove = (
        temporary.claim,
        seams.current("files.sync_directory"),
        seams.current("files.remove_tree"),
    )

    @contextlib.contextmanager
    def late_claim(path):
        rename.exchange_atomically(path, final)  # its writer, which is then killed
        calls.append("exchange")
        with claim(path) as is_ours:
            yield is_ours

    seams.replace(monkeypatch, "temporary.claim", late_claim)
    seams.replace(
        monkeypatch,
        "files.sync_directory",
        lambda path: (calls.append("sync"), sync(path)),
    )
    seams.replace(
        monkeypatch,
        "files.remove_tree",
        lambda path: (calls.append("remove"), remove(path)),
    )
    temporary.sweep(tmp_path, lambda name: True)
    assert calls == ["exchange", "sync", "remove"]
    assert (final / "data").read_text() == "new"
