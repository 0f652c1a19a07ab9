"""Each operation of storage on a disk: what it returns, makes durable and refuses."""

import errno
import fcntl
import hashlib
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from flaxckpt import errors
from flaxckpt._run import disk_usage
from flaxckpt._storage import (
    commit_marker,
    filesystem,
    listing,
    local_storage,
    modes,
    paths,
    rename,
    temporary,
    transaction,
)
from flaxckpt._storage.storage import LOCAL
from tests.helpers import seams, system_calls


class Disk:
    """Notes what is synced, as names below a root."""

    def __init__(self, monkeypatch, root):
        self._root = root
        self._calls = system_calls.record(monkeypatch, "fsync")

    @property
    def synced(self):
        return [os.path.relpath(path, self._root) for _, path in self._calls]


@pytest.fixture
def disk(tmp_path, monkeypatch):
    return Disk(monkeypatch, tmp_path)


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def permissions(path):
    return path.stat().st_mode & 0o7777


def make(root, **contents):
    for name, content in contents.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


# ---- listing ----------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path):
    """Files, a link to a file, a link to a directory and a broken link."""
    root = make(tmp_path / "tree", b=b"12", a__d=b"345", a__c=b"", z__e__f=b"6789")
    (root / "link").symlink_to("b")
    (root / "to_a").symlink_to("a")
    (root / "broken").symlink_to("nowhere")
    return root


def test_broken_links_count_as_existing(tree):
    for name, is_there in {"b": True, "a": True, "broken": True, "x": False}.items():
        assert LOCAL.exists(tree / name) is is_there
        assert LOCAL.is_taken(tree / name) is is_there
    assert transaction.is_committed(tree / "a")
    assert not transaction.is_committed(tree / "broken")
    assert not transaction.is_unfinished(tree)
    assert transaction.lists_committed(tree, ["a"])
    assert not transaction.lists_committed(tree, [])


def test_lists_files_below_directory_in_order(tree):
    assert sorted(LOCAL.names(tree)) == ["a", "b", "broken", "link", "to_a", "z"]
    assert sorted(LOCAL.directories(tree)) == ["a", "z"]
    below = ["b", "broken", "link", "a/c", "a/d", "z/e/f"]
    assert listing.files_below(tree) == below
    links = [entry.path for entry in LOCAL.walk(tree) if entry.is_link]
    assert links == ["broken", "link", "to_a"]
    assert {str(path.relative_to(tree)) for path in listing.all_files(tree)} == {*below}
    assert list(listing.all_files(tree / "b")) == [tree / "b"]
    assert LOCAL.contents(tree, lambda name: name != "z") == {"a": ["c", "d"]} or (
        LOCAL.contents(tree, lambda name: name != "z") == {"a": ["d", "c"]}
    )


def test_listing_skips_vanished_directory(tree):
    def select(name):
        if name == "z":
            (tree / "z/e/f").unlink()
            (tree / "z/e").rmdir()
            (tree / "z").rmdir()
        return True

    assert {*LOCAL.contents(tree, select)} == {"a"}


def test_listing_missing_directory_raises_error(tree):
    with pytest.raises(FileNotFoundError):
        list(listing.all_files(tree / "missing"))


def test_walk_distinguishes_files_directories_and_links(tree):
    (tree / "loop").symlink_to("loop")
    assert {tuple(entry) for entry in LOCAL.walk(tree, strict=True)} == {
        *(("a", True, False, False), ("a/c", False, True, False)),
        *(("a/d", False, True, False), ("b", False, True, False)),
        *(("broken", False, False, True), ("link", False, True, True)),
        *(("loop", False, False, True), ("to_a", True, False, True)),
        *(("z", True, False, False), ("z/e", True, False, False)),
        ("z/e/f", False, True, False),
    }


def test_reports_sizes_of_files(tree):
    links = sum((tree / name).lstat().st_size for name in ("broken", "link"))
    assert listing.known_size_below(tree) == 9 + links
    assert LOCAL.known_size(tree / "a/d", tree) == 3
    assert LOCAL.known_size(tree / "link", tree) == 2
    with pytest.raises(ValueError, match="out of"):
        LOCAL.known_size(tree / "link", tree / "a")
    os.link(tree / "b", tree / "a" / "again")
    counted = set()
    assert disk_usage.on_disk(tree, counted) == (9, 9)
    assert disk_usage.on_disk(tree / "b", counted) == (2, 0)
    assert disk_usage.on_disk(tree / "missing", counted) == (0, 0)


def test_known_size_ignores_vanished_file(tree, monkeypatch):
    real = listing.files_below(tree)
    seams.replace(monkeypatch, "listing.files_below", lambda path: [*real, "gone"])
    assert listing.known_size_below(tree) >= 9


def test_changed_file_has_new_identity(tree):
    assert LOCAL.identity(tree / "missing") is None
    before = LOCAL.identity(tree / "b"), LOCAL.fingerprint(tree / "b")
    assert before == (LOCAL.identity(tree / "b"), LOCAL.fingerprint(tree / "b"))
    assert before[1][1] == 2
    os.utime(tree / "b", (1, 1))
    assert LOCAL.identity(tree / "b") != before[0]
    assert LOCAL.fingerprint(tree / "b") != before[1]


# ---- reading ----------------------------------------------------------------------


def test_reads_file_up_to_limit(tree):
    assert LOCAL.read(tree / "a/d", max_bytes=3) == b"345"
    for limit in (2, 0):
        with pytest.raises(errors.DamagedCheckpointError, match=f"{limit} bytes, fou"):
            LOCAL.read(tree / "a/d", max_bytes=limit)
    with pytest.raises(errors.DamagedCheckpointError, match="not a regular file"):
        LOCAL.read(tree / "a", max_bytes=3)


def test_rejects_file_growing_beyond_limit_during_read(tree, monkeypatch):
    real = os.fstat

    def fstat(descriptor):
        found = real(descriptor)
        with (tree / "b").open("ab") as opened:
            opened.write(b"x" * 10)
        return found

    monkeypatch.setattr(local_storage.os, "fstat", fstat)
    with pytest.raises(
        errors.DamagedCheckpointError, match="at most 20 bytes, found 21"
    ):
        LOCAL.read(tree / "b", max_bytes=20)


@pytest.mark.parametrize(
    "make", [os.mkfifo, Path.mkdir, lambda p: p.symlink_to("/dev/zero")]
)
def test_rejects_special_files_without_waiting(tmp_path, make):
    path = tmp_path / "file"
    make(path)
    with pytest.raises(errors.DamagedCheckpointError, match="not a regular file"):
        LOCAL.read(path, max_bytes=10)
    with pytest.raises(errors.DamagedCheckpointError, match="not a regular file"):
        LOCAL.digest_file(path, max_bytes=10)


def test_reads_linked_file_up_to_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert LOCAL.read(tmp_path / "link", max_bytes=5) == b"12345"
    with pytest.raises(errors.DamagedCheckpointError, match="at most 4 bytes, found 5"):
        LOCAL.read(tmp_path / "link", max_bytes=4)


def test_digest_file_respects_limit(tree):
    digest = "sha256:" + hashlib.sha256(b"345").hexdigest()
    assert LOCAL.digest_file(tree / "a/d", max_bytes=3) == digest
    assert LOCAL.digest_file(tree / "a/d", max_bytes=2) is None


def test_stream_yields_all_bytes(tree, monkeypatch):
    seams.replace(monkeypatch, "local_storage.stream_bytes", 3)
    (tree / "b").write_bytes(b"12345678")
    parts = [bytes(part) for part in LOCAL.stream(tree / "b", tree, 8)]
    assert parts == [b"123", b"456", b"78"]
    with pytest.raises(ValueError, match="out of"):
        list(LOCAL.stream(tree / "link", tree / "a", 8))


def test_read_range_completes_short_reads(tree, monkeypatch):
    (tree / "b").write_bytes(b"0123456789")
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: real(fd, min(n, 2), at))
    assert LOCAL.read_range(tree / "b", 1, 5) == b"12345"
    assert LOCAL.read_range(tree / "b", 8, 5) == b"89"
    assert LOCAL.read_small(tree / "b", 3, tree) == b"012"
    with pytest.raises(ValueError, match="out of"):
        LOCAL.read_small(tree / "link", 3, tree / "a")


def test_reads_bytes_into_several_views(tmp_path, monkeypatch):
    file = make(tmp_path, array__chunk=b"0123456789") / "array/chunk"
    seams.replace(monkeypatch, "local_storage.call_bytes", 3)
    first, second = bytearray(4), bytearray(5)
    views = [memoryview(first), memoryview(second)]
    LOCAL.read_into(file, views, offset=1, file_size=10)
    assert bytes(first + second) == b"123456789"
    for size in (9, 11):
        with pytest.raises(ValueError, match=f"has 10 bytes instead of {size}"):
            LOCAL.read_into(file, views, offset=1, file_size=size)
    with pytest.raises(ValueError, match="was truncated during the read"):
        LOCAL.read_into(file, views, offset=2, file_size=10)
    outside = make(tmp_path / "outside", chunk=b"0123456789") / "chunk"
    link = make(tmp_path / "x" / "y", other=b"") / "link"
    link.symlink_to(outside)
    with pytest.raises(ValueError, match="leads out"):
        LOCAL.read_into(link, views, offset=1, file_size=10)
    link.unlink()
    link.symlink_to(make(tmp_path / "x" / "z", chunk=b"0123456789") / "chunk")
    LOCAL.read_into(link, views, offset=1, file_size=10)


def test_storage_operations_leave_no_file_open(tree):
    before = len(LOCAL.names("/proc/self/fd"))
    for _ in range(3):
        LOCAL.read(tree / "b", max_bytes=9)
        LOCAL.read_range(tree / "b", 0, 9)
        LOCAL.known_size(tree / "b", tree)
        list(LOCAL.stream(tree / "b", tree, 2))
        LOCAL.read_into(tree / "b", [memoryview(bytearray(2))], offset=0, file_size=2)
        LOCAL.last_lines(tree / "b", 9)
        filesystem.forget_cached(tree / "b")
        LOCAL.append_lines(tree / "a/c", b"1\n", 9)
        with LOCAL.lock_file(tree / "b", tree):
            pass
    LOCAL.write_parts(tree / "new", [memoryview(b"1")])
    LOCAL.sync_tree(tree / "a")
    assert len(LOCAL.names("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("content", "limit", "lines"),
    [
        (b"1\n22\n333\n", 100, [b"1\n", b"22\n", b"333\n"]),
        (b"1\n22\n333\n", 9, [b"1\n", b"22\n", b"333\n"]),
        (b"1\n22\n333\n", 8, [b"22\n", b"333\n"]),
        (b"1\n22\n333\n", 7, [b"333\n"]),
        (b"1\n22\n333", 100, [b"1\n", b"22\n"]),
        (b"", 100, []),
        (b"333", 100, []),
    ],
)
def test_last_lines_returns_only_whole_lines(tmp_path, content, limit, lines):
    file = make(tmp_path, log=content) / "log"
    assert LOCAL.last_lines(file, limit) == lines


def test_forget_cached_ignores_missing_files(tree, monkeypatch):
    filesystem.forget_cached(tree / "missing")
    advised = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: advised.append(given[1:]))
    filesystem.forget_cached(tree / "b")
    assert advised == [(0, 0, os.POSIX_FADV_DONTNEED)]
    monkeypatch.delattr(os, "posix_fadvise")
    filesystem.forget_cached(tree / "b")


# ---- writing ----------------------------------------------------------------------


def test_write_syncs_new_file_and_rejects_existing(tmp_path, disk, monkeypatch):
    contents = []
    real = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: contents.append((tmp_path / "a").read_bytes()) or real(fd),
    )
    LOCAL.write(tmp_path / "a", b"12")
    assert contents == [b"12"]
    assert disk.synced == ["a"]
    with pytest.raises(FileExistsError):
        LOCAL.write(tmp_path / "a", b"34")
    assert (tmp_path / "a").read_bytes() == b"12"


@pytest.mark.parametrize("mode", [None, 0o750])
def test_replace_is_durable_and_sets_mode(tmp_path, disk, umask, mode):
    make(tmp_path, a=b"old")
    LOCAL.replace(tmp_path / "a", b"new", mode=mode)
    assert (tmp_path / "a").read_bytes() == b"new"
    assert permissions(tmp_path / "a") == (0o644 if mode is None else 0o640)
    [temporary_name, directory] = disk.synced
    assert temporary_name.startswith("a.")
    assert directory == "."
    assert LOCAL.names(tmp_path) == ["a"]


def test_file_is_private_before_it_has_content(tmp_path, monkeypatch, umask):
    modes_of_empty = []
    seams.replace(
        monkeypatch,
        "modes.follow",
        lambda file, mode: modes_of_empty.append(permissions(file)),
    )
    LOCAL.replace(tmp_path / "a", b"new", mode=0o750)
    assert modes_of_empty == [0o600]


def test_failed_replace_leaves_no_temporary_file(tmp_path, monkeypatch):
    make(tmp_path, a=b"old")
    for owner, name in ((os, "open"), (Path, "replace")):
        with monkeypatch.context() as patch:
            system_calls.fail(patch, owner, name, errno.EACCES)
            with pytest.raises(PermissionError):
                LOCAL.replace(tmp_path / "a", b"new")
    assert LOCAL.names(tmp_path) == ["a"]


def test_make_directory_syncs_all_parents(tmp_path, disk, umask):
    LOCAL.make_directory(tmp_path / "a/b/c")
    assert disk.synced == [".", "a", "a/b"]
    LOCAL.make_directory(tmp_path / "a/b/c")
    assert len(disk.synced) == 3
    assert permissions(tmp_path / "a/b/c") == 0o755
    LOCAL.make_directory(tmp_path / "p/q", mode=0o750)
    assert permissions(tmp_path / "p/q") == permissions(tmp_path / "p") == 0o750


@pytest.mark.parametrize("mode", [None, 0o750])
def test_keeps_mode_of_directory_made_by_another_process(tmp_path, mode, umask):
    (tmp_path / "a").mkdir()
    local_storage._make(tmp_path / "a", mode)
    assert permissions(tmp_path / "a") == 0o755
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        local_storage._make(tmp_path / "file", mode)


def test_sync_tree_syncs_root_last(tree, disk, monkeypatch):
    seams.replace(monkeypatch, "local_storage.syncing_threads", 1)
    for name in ("link", "to_a", "broken"):
        (tree / name).unlink()
    os.link(tree / "b", tree.parent / "again")
    assert LOCAL.sync_tree(tree) == 7, "a file of another step counts nothing"
    below = ["tree", "tree/a", "tree/a/c", "tree/a/d", "tree/b"]
    assert sorted(disk.synced) == [*below, "tree/z", "tree/z/e", "tree/z/e/f"]
    assert disk.synced[-1] == "tree"
    LOCAL.sync_files([tree / "b", tree / "a"], 1)
    assert disk.synced[8:] == ["tree/b", "tree/a"]


def test_sync_tree_rejects_pipe_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="Invalid argument"):
        LOCAL.sync_tree(tmp_path)


def test_write_parts_completes_short_writes_in_order(tmp_path, monkeypatch, umask):
    seams.replace(monkeypatch, "local_storage.written_at_once", 3)
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, view: real(fd, view[:2]))
    LOCAL.write_parts(tmp_path / "a", [memoryview(b"12345"), memoryview(b"678")])
    assert (tmp_path / "a").read_bytes() == b"12345678"
    assert permissions(tmp_path / "a") == 0o644
    with pytest.raises(FileExistsError):
        LOCAL.write_parts(tmp_path / "a", [])


def test_write_parts_syncs_large_files_at_once(tmp_path, disk, monkeypatch):
    seams.replace(monkeypatch, "local_storage.synced_at_once", 4)
    LOCAL.write_parts(tmp_path / "a", [memoryview(b"12"), memoryview(b"34")])
    LOCAL.write_parts(tmp_path / "b", [memoryview(b"12"), memoryview(b"3")])
    assert disk.synced == ["a"]


def test_appends_whole_lines(tmp_path, umask):
    file = tmp_path / "log"
    LOCAL.append_lines(file, b"1\n", 100)
    LOCAL.append_lines(file, b"2\n", 100)
    assert file.read_bytes() == b"1\n2\n"
    assert permissions(file) == 0o644
    file.write_bytes(b"1\ncut o")
    LOCAL.append_lines(file, b"2\n", 100)
    assert file.read_bytes() == b"1\ncut o\n2\n"
    LOCAL.append_lines(file, b"3\n", 100, mode=0o750)
    assert permissions(file) == 0o640


def test_new_journal_is_private_before_it_gets_its_mode(tmp_path, monkeypatch, umask):
    found = []
    seams.replace(
        monkeypatch,
        "modes.set_on_file",
        lambda fd, mode: found.append(os.fstat(fd).st_mode & 0o777),
    )
    LOCAL.append_lines(tmp_path / "log", b"1\n", 100, mode=0o750)
    assert found == [0o600]
    monkeypatch.setattr(os, "geteuid", lambda: -2)
    LOCAL.append_lines(tmp_path / "log", b"1\n", 100, mode=0o750)
    assert len(found) == 1, "only the owner may change the mode"


def test_appends_lines_only_to_regular_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"regular|No such device"):
        LOCAL.append_lines(tmp_path / "pipe", b"1\n", 100)
    (tmp_path / "link").symlink_to(make(tmp_path, log=b"") / "log")
    with pytest.raises(OSError, match="symbolic"):
        LOCAL.append_lines(tmp_path / "link", b"1\n", 100)


def test_truncated_append_raises_error(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, content: real(fd, content[:-1]))
    with pytest.raises(OSError, match="no space left"):
        LOCAL.append_lines(tmp_path / "log", b"1\n", 100)


def test_file_lock_is_exclusive(tmp_path):
    file = make(tmp_path, a=b"") / "a"
    held, events = threading.Event(), []

    def wait():
        held.wait()
        with LOCAL.lock_file(file, file.parent):
            events.append("second")

    thread = threading.Thread(target=wait)
    thread.start()
    with LOCAL.lock_file(file, file.parent):
        held.set()
        time.sleep(0.05)
        events.append("first")
    thread.join()
    assert events == ["first", "second"]
    with LOCAL.lock_file(tmp_path, tmp_path):  # a directory
        pass
    with (
        pytest.raises(FileNotFoundError),
        LOCAL.lock_file(tmp_path / "missing", tmp_path),
    ):
        pass


def test_lock_file_tolerates_missing_permission_and_lock_support(tmp_path, monkeypatch):
    real = os.open

    def opened(path, flags, *given):
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *given)

    monkeypatch.setattr(os, "open", opened)
    system_calls.fail(monkeypatch, fcntl, "flock", errno.EOPNOTSUPP)
    with LOCAL.lock_file(make(tmp_path, a=b"") / "a", tmp_path):
        pass


# ---- directories and checkpoints --------------------------------------------------

FILES = {"one": b"1", "two": b"22"}


def test_adds_directory_once_with_all_files(tmp_path, disk, umask):
    step = make(tmp_path / "7", file=b"")
    step.chmod(0o750)
    assert LOCAL.add_directory(step / "metrics", FILES)
    assert {name: (step / "metrics" / name).read_bytes() for name in FILES} == FILES
    assert permissions(step / "metrics") == 0o750
    assert permissions(step / "metrics/one") == 0o640
    assert disk.synced[-1] == "7"
    assert {Path(name).name for name in disk.synced[:2]} == {*FILES}
    assert disk.synced[2].startswith("7.orbax-checkpoint-tmp-")
    assert not LOCAL.add_directory(step / "metrics", {"one": b"changed"})
    assert (step / "metrics/one").read_bytes() == b"1"
    assert LOCAL.names(tmp_path) == ["7"]
    (step / "link").symlink_to("nowhere")
    with pytest.raises(NotADirectoryError):
        LOCAL.add_directory(step / "link", FILES)


def commit(final, *, before=lambda: None, mode=None):
    with transaction.begin(final, mode=mode) as new:
        make(new.directory, state__w=b"12345")
        return new.commit(b"{}", before).size


def before_publishing(monkeypatch, call):
    """Calls a function with a finished checkpoint just before it gets its name."""
    real = rename.publish

    def publish(new, final):
        call(new)
        real(new, final)

    seams.replace(monkeypatch, "rename.publish", publish)


def test_checkpoint_is_durable_before_it_gets_its_name(tmp_path, disk, monkeypatch):
    final, at_publish, at_before = tmp_path / "7", [], []
    before_publishing(monkeypatch, lambda _: at_publish.extend(disk.synced))
    assert commit(final, before=lambda: at_before.extend(disk.synced)) == 7
    new = next(name for name in at_publish if "/" not in name)
    files = {commit_marker.MARKER, "state", "state/w"}
    assert {*at_publish} == {new, *(f"{new}/{name}" for name in files)}
    assert at_before == at_publish
    assert disk.synced[-1] == "."
    assert (final / commit_marker.MARKER).read_bytes() == b"{}"
    assert LOCAL.names(tmp_path) == ["7"]


def test_does_not_publish_swept_checkpoint(tmp_path):
    def sweep():
        [new] = tmp_path.iterdir()
        new.rename(tmp_path / "swept")
        make(new, state__w=b"the rest")

    with pytest.raises(FileNotFoundError, match="another process removed"):
        commit(tmp_path / "7", before=sweep)
    assert LOCAL.names(tmp_path) == ["swept"]


def test_checkpoint_has_mode_before_rename(tmp_path, umask, monkeypatch):
    found = []

    def look(new):
        found.append([permissions(new / name) for name in ("", "state", "state/w")])

    before_publishing(monkeypatch, look)
    commit(tmp_path / "7", mode=0o750)
    commit(tmp_path / "8")
    assert found == [[0o750, 0o750, 0o640], [0o755, 0o755, 0o644]]
    assert permissions(tmp_path / "7") == 0o750
    assert permissions(tmp_path / "8") == 0o755


def test_new_checkpoint_sweeps_only_its_own_leftovers(tmp_path):
    for name in ("7", "8"):
        (tmp_path / f"{name}.orbax-checkpoint-tmp-writing-0123abcd").mkdir()
    commit(tmp_path / "7")
    left = ["7", "8.orbax-checkpoint-tmp-writing-0123abcd"]
    assert sorted(LOCAL.names(tmp_path)) == left


def copy(source, final, is_wanted=lambda name: True, markers=None, **options):
    with transaction.begin(final, **options) as new:
        marker = new.copy(source, is_wanted)
        new.write(markers or {})
        return new.commit(marker).size


def test_copy_is_durable_before_it_gets_its_name(tmp_path, disk, umask, monkeypatch):
    source = make(tmp_path / "7", a__b=b"123", c=b"4", d__e__f=b"5")
    (source / "empty").mkdir()
    at_publish = []
    before_publishing(monkeypatch, lambda _: at_publish.extend(disk.synced))
    size = copy(source, tmp_path / "8", markers={"PINNED": b"1\n"})
    monkeypatch.undo()
    assert size == 7
    assert sorted(listing.files_below(tmp_path / "8")) == [
        "PINNED",
        "a/b",
        "c",
        "d/e/f",
    ]
    assert (tmp_path / "8/a/b").read_bytes() == b"123"
    assert {name.partition("/")[2] for name in at_publish} == {
        *("", "a", "a/b", "c", "d", "d/e", "d/e/f", "PINNED")
    }
    assert permissions(tmp_path / "8") == 0o755
    copy(source, tmp_path / "9", lambda name: str(name) == "a/b", mode=0o750)
    assert listing.files_below(tmp_path / "9") == ["a/b"]
    assert permissions(tmp_path / "9/a/b") == 0o640
    with pytest.raises(errors.CheckpointExistsError):
        copy(source, tmp_path / "9")
    assert sorted(LOCAL.names(tmp_path)) == ["7", "8", "9"]


# ---- deleting ---------------------------------------------------------------------

READER = "READING-there-7-0123abcd"


def late(monkeypatch, act):
    """Does `act` on a checkpoint right before it is withdrawn."""
    real = rename.withdraw

    def withdraw(final, aside):
        act(final)
        real(final, aside)

    seams.replace(monkeypatch, "rename.withdraw", withdraw)


def test_delete_withdraws_name_durably_before_removing_files(
    tmp_path, disk, monkeypatch
):
    make(tmp_path / "7", state__w=b"12345")
    seen = []
    seams.replace(
        monkeypatch,
        "temporary.discard",
        lambda path: seen.append((disk.synced[-1], LOCAL.names(path))),
    )
    transaction.delete(tmp_path / "7", lambda path: None)
    assert seen == [(".", ["DELETING", "state"])]
    [left] = LOCAL.names(tmp_path)
    assert temporary.leftovers([left], str.isdigit)


def test_delete_removes_all_files(tmp_path):
    make(tmp_path / "7", state__w=b"12345")
    transaction.delete(tmp_path / "7", lambda path: None)
    assert LOCAL.names(tmp_path) == []


@pytest.mark.parametrize("when", ["before", "late"])
def test_delete_rejects_step_being_read(tmp_path, monkeypatch, disk, when):
    step = make(tmp_path / "7", file=b"")
    if when == "before":
        (step / READER).touch()
    else:
        late(monkeypatch, lambda path: (path / READER).touch())
    with pytest.raises(errors.SaveFailedError, match=r"7 is not deleted: .* there:7"):
        transaction.delete(step, lambda path: None)
    assert sorted(LOCAL.names(step)) == [READER, "file"]
    assert LOCAL.names(tmp_path) == ["7"]
    assert disk.synced == ([] if when == "before" else [".", "."])


@pytest.mark.parametrize("failing", [1, 2])
def test_failed_check_keeps_name(tmp_path, failing):
    step = make(tmp_path / "7", file=b"")
    checked = []

    def check(path):
        checked.append(path.name)
        if len(checked) == failing:
            raise errors.SaveFailedError("pinned")

    with pytest.raises(errors.SaveFailedError, match="pinned"):
        transaction.delete(step, check)
    assert LOCAL.names(step) == ["file"]
    assert LOCAL.names(tmp_path) == ["7"]
    assert checked[0] == "7"
    assert len(checked) == failing


def test_delete_claims_step_meanwhile(tmp_path, monkeypatch):
    make(tmp_path / "7", file=b"")
    late(monkeypatch, lambda path: seen.append(_is_free(path)))
    seen = []
    seams.replace(
        monkeypatch, "temporary.discard", lambda path: seen.append(_is_free(path))
    )
    transaction.delete(tmp_path / "7", lambda path: None)
    assert seen == [False, False]


def _is_free(path):
    with temporary.claim(path) as is_ours:
        return is_ours


def test_delete_part_announces_withdraws_and_removes_part(tmp_path, disk, monkeypatch):
    step = make(tmp_path / "7", state__w=b"12", opt__m=b"34")
    at_announcement = []

    def announce():
        at_announcement.extend(sorted(LOCAL.names(step)))

    transaction.delete_part(step, "opt", announce)
    assert at_announcement == ["DELETING", "opt", "state"]
    assert LOCAL.names(step) == ["state"]
    assert LOCAL.names(tmp_path) == ["7"]
    assert "7" in disk.synced
    (step / READER).touch()
    with pytest.raises(errors.SaveFailedError):
        transaction.delete_part(step, "state", announce)
    assert sorted(LOCAL.names(step)) == [READER, "state"]


def test_delete_part_restores_name_durably_for_late_reader(tmp_path, disk, monkeypatch):
    step = make(tmp_path / "7", state__w=b"12")
    late(monkeypatch, lambda part: (step / READER).touch())
    with pytest.raises(errors.SaveFailedError, match=r"7 is not deleted: .* there:7"):
        transaction.delete_part(step, "state", bool)
    assert sorted(LOCAL.names(step)) == [READER, "state"]
    assert LOCAL.names(tmp_path) == ["7"]
    assert disk.synced.count("7") == 2, "after both renames"


def test_reports_properties_of_disk(tmp_path):
    assert stat.S_ISDIR(tmp_path.stat().st_mode)
    assert filesystem.free_bytes(tmp_path) > 0
    assert filesystem.is_local(tmp_path)
    assert filesystem.kind(tmp_path)
    assert LOCAL.can_map is True
    assert LOCAL.can_rename is True
    assert LOCAL.costs_requests is False
    assert LOCAL.kvstore(tmp_path, "a/")["path"] == f"{tmp_path}/a/"
    (tmp_path / "link").symlink_to("x")
    assert paths.real(tmp_path / "link") == str(tmp_path.resolve() / "x")


def test_detects_file_system_of_path(tmp_path):
    if not Path("/proc/self/mountinfo").exists():
        assert not filesystem.is_local(tmp_path)
        pytest.skip("no /proc here")
    assert filesystem.kind("/proc/self") == "proc"
    assert not filesystem.is_local("/proc/self")
    if Path("/dev/shm").is_dir() and os.path.ismount("/dev/shm"):
        assert filesystem.is_local("/dev/shm")
    assert filesystem.kind("/nowhere/at/all") == filesystem.kind("/")
    assert filesystem._unescaped(r"/a\040b\134c") == "/a b\\c"


def _copy(source):
    with transaction.begin(source.parent / "copy") as new:
        return new.copy(source)


@pytest.mark.parametrize(
    "act", [LOCAL.sync_tree, _copy, lambda path: modes.set_below(path, 0o750)]
)
def test_directory_that_cannot_be_listed_does_not_count_as_empty(
    tree, monkeypatch, act
):
    real = os.scandir

    def scandir(path):
        if str(path).rstrip("/").endswith("tree/z/e"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        act(tree)


def test_checkpoint_keeps_its_name_if_a_check_fails_after_it_was_withdrawn(tree):
    calls = []

    def check(path):
        calls.append(path)
        if len(calls) > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        transaction.delete(tree, check)
    assert (tree / "b").read_bytes() == b"12"
    new = make(tree.parent / "new", b=b"new")
    calls.clear()
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        transaction.replace(new, tree, lambda name: False, check)
    assert (tree / "b").read_bytes() == b"12"
