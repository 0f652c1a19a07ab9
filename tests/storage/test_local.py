"""Files are written whole, synced, and never reached through links."""

import ctypes
import errno
import os
import types
from pathlib import Path

import jax.numpy as jnp
import pytest

import flaxckpt
from flaxckpt import _storage, errors
from flaxckpt._storage import rename as storage_rename
from tests.helpers import command_line, seams


def test_resolves_relative_home_and_url_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _storage.paths.resolve("run") == tmp_path / "run"
    assert _storage.paths.resolve(Path("a/../run")) == tmp_path / "run"
    assert _storage.paths.resolve("~/run") == tmp_path / "run"
    assert _storage.paths.resolve(f"file://{tmp_path}/a%20b") == tmp_path / "a b"


@pytest.mark.parametrize(
    "name", ["a%20b", "a#b?c", "a\nb\tc", "ß", os.fsdecode(b"\xff")]
)
def test_resolves_each_file_url_to_its_own_directory(tmp_path, name):
    assert _storage.paths.resolve((tmp_path / name).as_uri()) == tmp_path / name


def test_keeps_control_characters_of_file_urls(tmp_path):
    assert _storage.paths.resolve(f"file://{tmp_path}/a\nb") == tmp_path / "a\nb"


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("ftp://host/run", "found ftp://host"),
        ("file://host/run", "found file://host"),
        ("file://", "wanted a local path or a URL"),
        ("file:///runs/lr#1", "%23 for '#'"),
        ("file:///runs/lr?1", "%3F for '\\?'"),
    ],
)
def test_rejects_other_urls(url, advice):
    with pytest.raises(errors.OptionError, match=advice):
        _storage.paths.resolve(url)


def test_rejects_paths_with_nul():
    for path in ("a\0b", "file:///a%00b"):
        with pytest.raises(errors.OptionError, match="without NUL characters"):
            flaxckpt.Checkpointer(path)


def test_needs_no_current_directory_for_absolute_paths(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    flaxckpt.save(tmp_path / "c", {"w": jnp.ones(3)})
    assert "float32[3]" in command_line.run("show", tmp_path / "c")
    with pytest.raises(errors.OptionError, match="pass an absolute path"):
        flaxckpt.load("c")


def test_rejects_paths_with_backslashes(tmp_path, monkeypatch):
    with pytest.raises(errors.OptionError, match="without backslashes"):
        flaxckpt.save(tmp_path / "a\\b", {"w": jnp.ones(3)})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "c\\d").mkdir()
    monkeypatch.chdir(tmp_path / "c\\d")
    with pytest.raises(errors.OptionError, match="without backslashes"):
        flaxckpt.save("run", {"w": jnp.ones(3)})


@pytest.mark.parametrize(
    "name", ["a b", "a%2fb", "a#b?c", "<a>", "a'\"b", "a\nb", "ß", "*"]
)
def test_keeps_odd_directory_names(tmp_path, name):
    flaxckpt.save(tmp_path / name, {"w": jnp.ones(3)})
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert flaxckpt.verify(tmp_path / name).ok


def test_failed_replace_keeps_old_content(tmp_path, monkeypatch):
    path = tmp_path / "file"
    _storage.of(path).replace(path, b"old")

    def fail(descriptor):
        raise OSError("disk on fire")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="on fire"):
        _storage.of(path).replace(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    _storage.of(path).replace(path, b"new")
    assert path.read_bytes() == b"new"


def write_both(root):
    """The directories `new` and `old`, which hold their names."""
    for name in ("new", "old"):
        (root / name).mkdir()
        (root / name / "file").write_text(name)


def test_publish_rejects_taken_name(tmp_path):
    write_both(tmp_path)
    with pytest.raises(errors.CheckpointExistsError):
        storage_rename.publish(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old" / "file").read_text() == "old"


@pytest.mark.parametrize("has_exchange", [True, False])
def test_exchange_swaps_two_directories(tmp_path, monkeypatch, has_exchange):
    if not has_exchange:
        monkeypatch.setattr(storage_rename.ctypes, "CDLL", lambda *a, **k: object())
    write_both(tmp_path)
    storage_rename.exchange(tmp_path / "new", tmp_path / "old", tmp_path / "aside")
    assert (tmp_path / "old" / "file").read_text() == "new"
    assert (tmp_path / "new" / "file").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


def renames(monkeypatch, code):
    """Lets the system's exchange of names fail with an error code."""

    def fail(*given):
        ctypes.set_errno(code)
        return -1

    library = types.SimpleNamespace(renameat2=fail)
    monkeypatch.setattr(storage_rename.ctypes, "CDLL", lambda *a, **k: library)


@pytest.mark.parametrize(
    "code", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM]
)
def test_exchange_falls_back_to_single_renames(tmp_path, monkeypatch, code):
    write_both(tmp_path)
    renames(monkeypatch, code)
    storage_rename.exchange(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old" / "file").read_text() == "new"
    assert (tmp_path / "new" / "file").read_text() == "old"
    with pytest.raises(FileNotFoundError):
        storage_rename.exchange(tmp_path / "missing", tmp_path / "old")
    assert (tmp_path / "old" / "file").read_text() == "new", "it has its name again"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


def test_failed_exchange_raises_error(tmp_path, monkeypatch):
    (tmp_path / "old").mkdir()
    with pytest.raises(FileNotFoundError, match="cannot exchange"):
        storage_rename.exchange(tmp_path / "missing", tmp_path / "old")
    renames(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="cannot exchange"):
        storage_rename.exchange(tmp_path / "missing", tmp_path / "old")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("change", ["publish", "exchange", "withdraw"])
def test_failed_sync_is_undone_or_reported_as_not_durable(
    tmp_path, monkeypatch, change, failing
):
    new, old = tmp_path / "new", tmp_path / "old"
    new.mkdir()
    if change != "publish":
        old.mkdir()
        (old / "file").write_text("old")
    before = sorted(tmp_path.rglob("*"))
    calls = []

    def fail(path):
        calls.append(path)
        if len(calls) <= failing:
            raise OSError(5, "Input/output error")

    seams.replace(monkeypatch, "files.sync_directory", fail)
    acts = {
        "publish": lambda: storage_rename.publish(new, old),
        "exchange": lambda: storage_rename.exchange(new, old),
        "withdraw": lambda: storage_rename.withdraw(old, tmp_path / "aside"),
    }
    with pytest.raises(OSError, match="Input/output") as info:
        acts[change]()
    assert isinstance(info.value, storage_rename.NotDurableError) is (failing == 2)
    assert sorted(tmp_path.rglob("*")) == before


def test_remove_tree_does_not_follow_links(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "file").write_text("precious")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(target)
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(NotADirectoryError):
        _storage.of(tmp_path).remove_tree(tmp_path / "link")
    _storage.of(inside).remove_tree(inside)
    _storage.of(tmp_path).remove_tree(tmp_path / "missing")
    assert (target / "file").read_text() == "precious"


def test_read_rejects_files_beyond_limit(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert _storage.of(path).read(path, max_bytes=5) == b"12345"
    with pytest.raises(errors.DamagedCheckpointError, match="at most 4"):
        _storage.of(path).read(path, max_bytes=4)


def test_sync_tree_counts_bytes_of_all_files(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "one").write_bytes(b"123")
    (tmp_path / "a" / "b" / "two").write_bytes(b"4567")
    assert _storage.of(tmp_path).sync_tree(tmp_path) == 7
