"""Paths in stores: like `pathlib`'s, and never one of the file system."""

import os
import pickle

import pytest
import tensorstore as ts

import flaxckpt
from flaxckpt import _storage, errors
from flaxckpt._storage import paths as storage_paths
from flaxckpt._storage import store_options, store_requests
from flaxckpt._storage import store_settings as storage_store_settings
from flaxckpt._storage.store_requests import Connection
from tests.helpers import faulty_store as faulty


@pytest.fixture
def root():
    path = _storage.paths.resolve("memory://paths/run")
    path.store.delete_under("")
    for key in ("1/a", "1/b/c", "1/b/d.txt", "2.txt", "10/x"):
        (path / key).write_text(key)
    return path


def test_derived_paths_keep_their_store():
    path = _storage.paths.resolve("s3://bucket/dir//sub/")
    assert str(path) == f"{path}" == "s3://bucket/dir/sub"
    assert (path.key, path.prefix) == ("dir/sub", "dir/sub/")
    made = (path / "a" / "b").parent.with_name("c.txt")
    assert str(made) == "s3://bucket/dir/sub/c.txt"
    assert (made.name, made.suffix, made.stem) == ("c.txt", ".txt", "c")
    assert made.store is path.store
    assert made.relative_to(path).as_posix() == "c.txt"
    assert made.is_relative_to(path)
    bucket = _storage.paths.resolve("s3://bucket")
    assert (bucket.key, bucket.prefix) == ("", "")
    assert str(path.parents[1]) == "s3://bucket"
    assert len({path, _storage.paths.resolve("s3://bucket/dir/sub"), made}) == 2
    assert sorted([made, path]) == [path, made]
    assert pickle.loads(pickle.dumps(path)) == path
    assert _storage.paths.resolve(path) is path
    assert storage_paths.from_text(str(path)) == path
    assert not isinstance(
        storage_paths.from_text("/dir/s3:/x"), storage_paths.RemotePath
    )


def test_system_calls_reject_remote_paths(root):
    for call in (os.fspath, os.listdir, os.stat, os.path.lexists, open):
        with pytest.raises(TypeError, match="not a path in the file system"):
            call(root)


def test_prefixes_of_keys_act_as_directories(root):
    assert sorted(p.name for p in root.iterdir()) == ["1", "10", "2.txt"]
    assert sorted(_storage.of(root).directories(root)) == ["1", "10"]
    assert (root / "1").is_dir()
    assert not (root / "1").is_file()
    assert (root / "2.txt").is_file()
    assert not (root / "2.txt").is_dir()
    assert not (root / "3").exists()
    assert not (root / "2").exists(), "others merely begin so"
    assert [p.name for p in root.glob("*.txt")] == ["2.txt"]
    assert [p.key for p in root.rglob("*.txt")] == ["run/1/b/d.txt", "run/2.txt"]
    assert root.tree() == {"1": {"a", "b"}, "10": {"x"}}
    below = _storage.listing.files_below(root)
    assert below == ["1/a", "1/b/c", "1/b/d.txt", "10/x", "2.txt"]
    assert [*_storage.listing.all_files(root)] == [root / name for name in below]
    assert _storage.listing.known_size_below(root) == 0
    _storage.of(root).remove_tree(root / "1")
    assert sorted(p.name for p in root.iterdir()) == ["10", "2.txt"]


def test_reads_and_writes_whole_objects(root):
    file = root / "2.txt"
    assert file.read_text() == "2.txt"
    assert file.stat().st_size == 5
    with file.open("rb") as opened:
        assert opened.read(2) == b"2."
    with pytest.raises(OSError, match="cannot open an object for writing"):
        file.open("wb")
    before = _storage.stamp(file)
    assert before.is_current()
    file.write_text("other")
    assert not before.is_current()
    file.unlink()
    file.unlink(missing_ok=True)
    for act in (file.unlink, file.stat, file.read_bytes):
        with pytest.raises(FileNotFoundError):
            act()
    with pytest.raises(errors.DamagedCheckpointError, match="at most 2 bytes"):
        _storage.of(root).read(root / "1/a", max_bytes=2)


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///x", "s3://b/../c", "s3://b/./c", "s3://b:1/c", "ftp://b/c"]
)
def test_rejects_invalid_bucket_urls(url):
    with pytest.raises(errors.OptionError):
        flaxckpt.Checkpointer(url)


def test_rejects_invalid_store_options():
    with pytest.raises(errors.OptionError, match="deadline_secs"):
        flaxckpt.StoreOptions(deadline_secs=0)
    for url in ("bucket", "s3://bucket/path", "file://x"):
        with pytest.raises(errors.OptionError, match="URL of a bucket"):
            flaxckpt.set_store_options(url, flaxckpt.StoreOptions())


def test_store_options_and_environment_determine_spec(monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    given = flaxckpt.StoreOptions(region="eu-west-1", profile="work", concurrency=4)

    def had(spec, name):
        """What a name in a specification means."""
        return store_requests._shared[spec[name]]

    spec = Connection("s3", "bucket", given).spec("run/")
    assert spec["aws_region"] == "eu-west-1"
    assert had(spec, "aws_credentials") == {"type": "profile", "profile": "work"}
    assert spec["use_conditional_write"]
    assert had(spec, "s3_request_concurrency") == {"limit": 4}
    assert "endpoint" not in spec
    public = Connection("s3", "bucket", flaxckpt.StoreOptions(anonymous=True))
    assert had(public.spec(""), "aws_credentials") == {"type": "anonymous"}
    spec = Connection("gs", "bucket", flaxckpt.StoreOptions()).spec("run/")
    assert (spec["driver"], spec["bucket"], spec["path"]) == ("gcs", "bucket", "run/")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    found = storage_store_settings.of("s3", "bucket").connection.spec("")
    assert found["endpoint"] == "http://127.0.0.1:9"
    assert found["aws_region"] == "us-east-1"
    assert had(found, "aws_credentials") == {"type": "environment"}


def test_opening_bucket_too_slowly_raises_error(monkeypatch):
    promise, never = ts.Promise.new()
    monkeypatch.setattr(ts.KvStore, "open", lambda *_, **__: never)
    options = flaxckpt.StoreOptions(deadline_secs=0.1, retries=0)
    with pytest.raises(errors.StoreError, match=r"cannot open memory://late"):
        Connection("memory", "late", options).kv()
    promise.set_result(None)


def test_glob_finds_objects_at_any_depth():
    path = faulty.new_path("patterns") / "c"
    for name in ("d/1", "d/2", "d/deep/3", "p.0/d/4", "top"):
        (path / name).write_bytes(b"x")

    def found(pattern):
        return {p.relative_to(path).as_posix() for p in path.glob(pattern)}

    assert found("d/*") == {"d/1", "d/2", "d/deep"}
    assert found("p.*/d/*") == {"p.0/d/4"}
    assert found("t*") == {"top"}


def test_reads_ahead_until_own_change():
    path = faulty.new_path("read-ahead")
    (path / "a").write_bytes(b"first")
    with faulty.faulty(path) as kv:
        with _storage.paths.read_ahead([path / "a", path / "b"]):
            begun = kv.requests
            assert (path / "a").read_bytes() == b"first"
            assert path.store.part(f"{path.key}/a", 1, 3) == b"ir"
            assert not (path / "b").is_file()
            stamp = _storage.stamp(path / "a")
            assert kv.requests == begun
            (path / "a").write_bytes(b"second")
            assert (path / "a").read_bytes() == b"second"
        assert not stamp.is_current()


def test_appending_keeps_lines_of_other_writers():
    path = faulty.new_path("appended")
    storage, journal = _storage.of(path), path / "journal"
    for number in range(6):
        storage.append_lines(journal, b"ours %d\n" % number, 2**20)
        if number % 2:
            journal.write_bytes(journal.read_bytes() + b"theirs %d\n" % number)
        if number == 3:
            journal.unlink()
    assert journal.read_bytes() == b"ours 4\nours 5\ntheirs 5\n"


class _Silent:
    """A store that never answers, and a clock."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(store_requests.time, "monotonic", lambda: self.now)

    def result(self, timeout):
        self.now += timeout
        raise TimeoutError


def test_cleanup_after_unanswered_request_waits_one_more_deadline(monkeypatch):
    silent = _Silent(monkeypatch)
    options = flaxckpt.StoreOptions(deadline_secs=60)
    connection = store_requests.Connection("memory", "gone", options)

    def ask(answer=None):
        begin = silent.now
        if answer is None:
            with pytest.raises(errors.StoreError, match="no answer within"):
                connection.request("read it", lambda: silent)
        else:
            connection.request("read it", lambda: answer)
        return silent.now - begin

    assert [ask() for _ in range(2)] == [60, 60]
    with store_options.cleanup():
        assert [ask() for _ in range(4)] == [60, 1, 1, 1]
    assert ask() == 60, "it may be back"
    with store_options.cleanup():
        assert [ask() for _ in range(2)] == [60, 1]

    class Answer:
        def result(self, timeout):
            return b""

    ask(Answer())
    with store_options.cleanup():
        assert [ask() for _ in range(2)] == [60, 60], "it had come back"
