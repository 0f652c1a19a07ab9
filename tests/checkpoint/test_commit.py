"""From a snapshot to a checkpoint: its errors, its lock, its files and its name."""

import errno
import json
import shutil
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt._checkpoint import commit, save
from flaxckpt._storage import rename, store_requests
from flaxckpt._storage.storage import LOCAL
from tests.helpers import faulty_store as faulty
from tests.helpers import run_files, seams, strategies

STATE = {"w": np.arange(20_000.0, dtype="f4"), "b": jnp.ones(3), "n": 1}


# ---- errors -----------------------------------------------------------------------

FAILURES = {
    "a store": (errors.StoreError("no answer"), "unless an unconfirmed commit marker"),
    "a fork": (store_requests.ForkedError("forked"), "could not be saved: forked$"),
    "a rename": (rename.NotDurableError(5, "EIO"), "did not confirm the rename"),
    "a disk": (OSError("on fire"), "on fire\nNothing of it is kept"),
    "a name": (OSError(errno.ENAMETOOLONG, "long"), "untouched; use a shorter path"),
    "a value": (ValueError("no number"), "no number\nNothing of it is kept"),
    "a library": (RuntimeError("odd"), "odd\nNothing of it is kept"),
    "memory": (MemoryError(), "Nothing of it is kept"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_write_failures_raise_save_failed_error(tmp_path, what):
    error, told = FAILURES[what]
    with pytest.raises(errors.SaveFailedError, match=told) as info:
        fail(commit.write_lock, tmp_path / "c", error)
    assert info.value.__cause__ is error
    assert str(tmp_path / "c") in str(info.value)


def fail(context, path, error):
    with context(path):
        raise error


def test_own_errors_propagate_unchanged(tmp_path):
    for error in (errors.CheckpointExistsError("there"), errors.OptionError("bad")):
        with pytest.raises(type(error)) as info:
            fail(commit.write_lock, tmp_path / "c", error)
        assert info.value is error


def test_store_error_before_first_write_reports_nothing_written(tmp_path):
    with pytest.raises(errors.SaveFailedError, match="no answer\nNothing was written"):
        fail(commit.store_errors, tmp_path / "c", errors.StoreError("no answer"))
    with pytest.raises(OSError, match="on fire"):
        fail(commit.store_errors, tmp_path / "c", OSError("on fire"))


def test_write_lock_admits_one_thread_per_checkpoint(tmp_path):
    inside, most = [], []

    def write(path):
        with commit.write_lock(path):
            inside.append(path)
            time.sleep(0.01)
            most.append(inside.count(path))
            inside.remove(path)

    threads = [threading.Thread(target=write, args=(tmp_path / "c",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4
    with commit.write_lock(tmp_path / "c"), commit.write_lock(tmp_path / "d"):
        pass


# ---- requests ---------------------------------------------------------------------


def test_save_request_reports_elapsed_time_and_options(tmp_path):
    request = commit.SaveRequest(path=tmp_path)
    assert 0 <= request.elapsed() < 60
    assert not request.overwrite
    assert commit.SaveRequest(path=tmp_path, on_exists="overwrite").overwrite
    assert commit.SaveRequest(path=tmp_path, step=3).number == 3


def test_snapshot_counts_its_bytes(tmp_path):
    request = commit.SaveRequest(path=tmp_path / "c")
    snapshot = save.take_snapshot(request, {**STATE, "text": "a"})
    arrays = STATE["w"].nbytes + STATE["b"].nbytes
    assert snapshot.stored_bytes == arrays + np.int64().nbytes  # n is an array, too
    assert snapshot.nbytes == snapshot.stored_bytes


# ---- files ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["disk", "store"])
def test_save_writes_all_parts(tmp_path, kind):
    root = faulty.new_path("commit") if kind == "store" else tmp_path / "a" / "run"
    with flaxckpt.Checkpointer(root) as ckpt:
        result = ckpt.save(
            1, STATE, metrics={"loss": 1.0}, metadata={"a": 1}, json={"notes": [1]}
        ).wait()
        names = {entry.name for entry in (root / "1").iterdir()}
        assert names >= {"state", "metrics", "notes", "flaxckpt.json"}
        assert not names & {"TEMPORARY", "PINNED"}
        strategies.assert_same(STATE, ckpt.restore(step=1))
        assert ckpt.verify(1).ok
        assert ckpt.metrics(1) == {"loss": 1.0}
        found = sum(len(file.read_bytes()) for file in files(root / "1"))
        assert result.bytes_written == found
        ckpt.pin(1)
        ckpt.save(1, {**STATE, "n": 2}, on_exists="overwrite", temporary=True).wait()
        names = {entry.name for entry in (root / "1").iterdir()}
        assert names >= {"TEMPORARY", "PINNED"}
        assert ckpt.restore(step=1)["n"] == 2


def files(path):
    for entry in path.iterdir():
        if entry.is_dir():
            yield from files(entry)
        else:
            yield entry


def test_items_have_their_own_arrays(tmp_path):
    state = {"params": {"w": jnp.ones(3)}, "opt": {"m": jnp.zeros(3)}}
    with flaxckpt.Checkpointer(tmp_path, items=("params", "opt")) as ckpt:
        ckpt.save(1, state).wait()
        assert {"params", "opt"} <= {p.name for p in (tmp_path / "1").iterdir()}
        strategies.assert_same(state, ckpt.restore(step=1))
        assert ckpt.verify(1).ok


@pytest.mark.parametrize("permissions", [None, 0o750])
def test_links_equal_array_only_to_file_of_same_mode(tmp_path, permissions):
    large = np.arange(2**18, dtype="f4")  # in a file of its own
    state = STATE | {"large": large}
    with flaxckpt.Checkpointer(tmp_path, permissions=permissions) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state | {"n": step}).wait()
        files = [tmp_path / f"{step}/state/d/0.0/large" for step in (1, 2, 3)]
        inodes = {file.stat().st_ino for file in files[:2]}
        assert len(inodes) == 1
        files[1].chmod(0o600)
        ckpt.save(3, state).wait()
    third = files[2].stat()
    if permissions is not None:
        assert third.st_mode & 0o777 == 0o640
        assert third.st_ino not in inodes
    strategies.assert_same(state, flaxckpt.load(tmp_path / "3"))


def bytes_read():
    """Bytes that this process has read so far, in all calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="Linux counts bytes")
def test_links_previously_saved_array_without_reading_it(tmp_path):
    array = jnp.arange(2**20)
    with flaxckpt.Checkpointer(tmp_path) as run:
        run.save(1, {"w": array}).wait()
        before = bytes_read()
        run.save(2, {"w": array}).wait()
        assert bytes_read() - before < array.nbytes / 4
    assert (tmp_path / "2/state/d/0.0/w").samefile(tmp_path / "1/state/d/0.0/w")


def test_parts_of_large_chunks_have_checksums(tmp_path):
    """So that a part can be verified without the rest."""
    flaxckpt.save(tmp_path / "c", {"w": np.zeros(2**15), "b": np.zeros(8)})
    segments = json.loads((tmp_path / "c/flaxckpt.json").read_text())["segments"]
    assert list(segments["crc32c"]) == ["w"]
    table = flaxckpt._formats.locate.read_stored(tmp_path / "c", None).table
    inner = table["w"].sources[0].raw.checksums.of_segments(0, 2**18)
    assert len(inner) == 2**18 // segments["bytes"] - 1


def test_creates_missing_parents(tmp_path):
    flaxckpt.save(tmp_path / "a/b/c", STATE)
    strategies.assert_same(STATE, flaxckpt.load(tmp_path / "a/b/c"))
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        shutil.rmtree(tmp_path / "run")
        ckpt.save(1, STATE).wait()
    assert ckpt.steps() == [1]


def test_counts_array_bytes_while_writing(tmp_path):
    sizes = []
    snapshot = take_snapshot(tmp_path / "c", count=sizes.append)
    with commit.begin(snapshot) as transaction:
        commit.write_files(snapshot, transaction, None)
    assert sum(sizes) == snapshot.stored_bytes


def test_failure_of_another_file_stops_array_writes(tmp_path):
    """The other files are written beside the arrays, by another thread."""

    def check():
        raise OSError("on fire")

    snapshot = take_snapshot(tmp_path / "c")
    with commit.begin(snapshot) as transaction, pytest.raises(OSError, match="on fire"):
        commit.write_arrays(snapshot, transaction.directory, None, check)


def take_snapshot(path, **options):
    request = commit.SaveRequest(path=path, **options)
    return save.take_snapshot(request, STATE)


def test_rejects_path_below_store_object():
    file = faulty.new_path("commit") / "file"
    file.write_bytes(b"mine")
    with pytest.raises(errors.SaveFailedError, match="file"):
        flaxckpt.save(file / "c", STATE)
    assert file.read_bytes() == b"mine"


def test_write_files_creates_directories(tmp_path):
    content = {"a/b/one": b"1", "a/b/two": b"2", "three": b"3"}
    LOCAL.write_files(tmp_path, content)
    assert {name: (tmp_path / name).read_bytes() for name in content} == content
    with pytest.raises(FileExistsError):
        LOCAL.write_files(tmp_path, {"three": b"4"})


# ---- names ------------------------------------------------------------------------


def make(path, content):
    flaxckpt.save(path, {"w": np.full(3, content)})
    return path


def publish(new, final, *, overwrite):
    """Commits the files of `new` as the checkpoint `final`."""
    with commit.replacing(final, overwrite=overwrite) as transaction:
        for file in new.iterdir():
            file.rename(transaction.directory / file.name)
        transaction.commit(None)


@pytest.mark.parametrize("is_there", [True, False])
def test_publish_renames_finished_directory(tmp_path, is_there):
    new, final = make(tmp_path / "new", 2.0), tmp_path / "c"
    if is_there:
        make(final, 1.0)
        with pytest.raises(errors.CheckpointExistsError):
            publish(make(tmp_path / "other", 3.0), final, overwrite=False)
        assert flaxckpt.load(final)["w"][0] == 1.0
    publish(new, final, overwrite=is_there)
    assert not (final / "TEMPORARY").exists()
    assert flaxckpt.load(final)["w"][0] == 2.0
    assert not list(tmp_path.glob("c.*")), "neither the old one nor the new"


def test_publish_keeps_files_added_meanwhile(tmp_path):
    new, final = make(tmp_path / "new", 2.0), make(tmp_path / "c", 1.0)
    (final / "notes.txt").write_text("mine")
    with pytest.raises(errors.CheckpointExistsError, match=r"notes\.txt"):
        publish(new, final, overwrite=True)
    assert (final / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("is_pinned", [True, False])
def test_publish_keeps_pin_added_meanwhile(tmp_path, is_pinned):
    new, final = make(tmp_path / "new", 2.0), make(tmp_path / "c", 1.0)
    if is_pinned:
        run_files.pin(final)
    publish(new, final, overwrite=True)
    assert flaxckpt.load(final)["w"][0] == 2.0
    assert run_files.is_pinned(final) is is_pinned


def pin_in_the_exchange(monkeypatch):
    """Pins what is replaced just before its replacement, after all checks."""
    real = rename.exchange

    def exchange(temporary, final, aside=None):
        run_files.pin(final)
        real(temporary, final, aside)

    seams.replace(monkeypatch, "rename.exchange", exchange)


def test_publish_keeps_pin_added_during_exchange(tmp_path, monkeypatch):
    new, final = make(tmp_path / "new", 2.0), make(tmp_path / "c", 1.0)
    pin_in_the_exchange(monkeypatch)
    publish(new, final, overwrite=True)
    assert flaxckpt.load(final)["w"][0] == 2.0
    assert run_files.is_pinned(final)


@pytest.mark.parametrize("is_late", [False, True])
def test_publish_raises_error_if_pin_cannot_be_kept(tmp_path, monkeypatch, is_late):
    new, final = make(tmp_path / "new", 2.0), make(tmp_path / "c", 1.0)
    if is_late:
        pin_in_the_exchange(monkeypatch)
    else:
        run_files.pin(final)

    def fail(path, content, **options):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    seams.replace(monkeypatch, "disk.replace", fail)
    if is_late:
        with pytest.raises(errors.SaveFailedError, match="saved, but its pin was lost"):
            publish(new, final, overwrite=True)
    else:
        with pytest.raises(OSError, match="No space left"):
            publish(new, final, overwrite=True)
    assert flaxckpt.load(final)["w"][0] == (2.0 if is_late else 1.0)


def test_publish_does_not_rewrite_pin_of_new_step(tmp_path):
    new, final = make(tmp_path / "new", 2.0), make(tmp_path / "c", 1.0)
    for path in (new, final):
        run_files.pin(path)
    (new / run_files.PIN).write_text("of the new step")
    publish(new, final, overwrite=True)
    assert (final / run_files.PIN).read_text() == "of the new step"


# ---- after a long pause -----------------------------------------------------------


def test_does_not_publish_recreated_directory(tmp_path, monkeypatch):
    real = seams.current("arrays.write")

    def write(root, *args, **options):
        checksums = real(root, *args, **options)
        [temporary] = tmp_path.glob("c.*")
        shutil.rmtree(temporary)  # as another process after a long pause
        return real(root, *args, **options) or checksums

    seams.replace(monkeypatch, "arrays.write", write)
    with pytest.raises(errors.SaveFailedError):
        flaxckpt.save(tmp_path / "c", STATE)
    assert list(tmp_path.iterdir()) == []
