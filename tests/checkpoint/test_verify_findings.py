"""What `verify` says of each kind of fault: where it is, and whether it is proved."""

import contextlib
import errno
import os
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt._checkpoint import verify
from flaxckpt._util import progress
from flaxckpt.datasets import StepIndexed
from flaxckpt.integrations.orbax import CheckpointHandler, SaveArgs
from tests.helpers import chunks, old_stores, seams, system_calls
from tests.helpers import faulty_store as faulty
from tests.helpers.files import flip_bit


def save(path, state, *, is_old=False, **layout):
    layout = {"codec": "none", **layout}
    flaxckpt.save(path, state, layout=flaxckpt.ArrayLayout(**layout))
    if is_old:
        old_stores.make_directories(path)
    return path


def spoil(path, chunk):
    """Makes a chunk one that cannot be decoded."""
    size = len(chunks.read(path / "state", chunk))
    chunks.put(path / "state", chunk, b"\xff" * size)


def unreadable(monkeypatch, ending):
    """Has the disk fail for files whose path has this end."""
    system_calls.fail(monkeypatch, os, "open", errno.EIO, ending)


# ---- where a fault is -------------------------------------------------------------


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize(
    ("shape", "chunk", "place"),
    [
        ((32,), "c.1", "elements 16-31 of 32"),
        ((8, 8), "c.1.0", "rows 2-3 of 8"),
        ((2, 32), "c.0.1", "[0:1, 16:32] of [2, 32]"),
        ((1, 32), "c.0.1", "[0:1, 16:32] of [1, 32]"),
    ],
)
def test_reports_values_in_damaged_chunk(tmp_path, shape, chunk, place, is_old):
    value = np.arange(np.prod(shape), dtype="f4").reshape(shape)
    path = save(tmp_path / "c", {"w": value}, is_old=is_old, chunk_bytes=64)
    chunks.flip(path / "state", f"w/{chunk}")
    report = flaxckpt.verify(path)
    file = f"w/{chunk}" if is_old else "d/0.small.0"
    assert report.places == {"w": f"state/{file} -> w, {place}"}


def test_reports_undecodable_values(tmp_path, monkeypatch):
    seams.replace(monkeypatch, "verify.piece_bytes", 2**14)
    layout = {"codec": "zstd", "checksum": False, "chunk_bytes": 2**14}
    path = save(tmp_path / "c", {"w": np.zeros((8, 1024))}, **layout)
    spoil(path, "w/c.1.0")
    assert flaxckpt.verify(path).places == {"w": "w, rows 2-3 of 8"}


def test_reports_no_rows_for_wholly_damaged_leaf(tmp_path):
    path = save(tmp_path / "c", {"w": np.arange(8.0), "large": np.ones(2**18)})
    for name, file in (("w", "0.small.0"), ("large", "0.0/large")):
        chunks.flip(path / "state", f"{name}/c.0")
        assert flaxckpt.verify(path).places == {name: f"state/d/{file} -> {name}"}
        chunks.flip(path / "state", f"{name}/c.0")
    old_stores.make_directories(path)
    flip_bit(path / "state/w/c.0")
    assert flaxckpt.verify(path).places == {"w": "state/w/c.0 -> w"}


def test_damaged_database_names_some_of_its_leaves(tmp_path):
    state = {name: np.arange(64.0) for name in "abcde"}
    path = save(tmp_path / "c", state)
    for name, change in (("state/d/tree", -1), ("state/d/0.small.0", 1)):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[:change] if change < 0 else content + b"1")
        text = f"{name} -> 5 leaves: a, b, c, …"
        assert flaxckpt.verify(path).places == {name: text}
        (path / name).write_bytes(content)
    (path / name).write_bytes(content[:-1])
    report = flaxckpt.verify(path)
    assert report.problems == {"e": "0.small.0 ends before the chunk c.0 does"}
    assert report.places == {"e": f"{name} -> e"}


# ---- sizes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "content", "told"),
    [
        ({"checksum": False}, b"1" * 31, "c.0 has 31 bytes instead of 32"),
        ({"checksum": False}, b"1" * 33, "c.0 has 33 bytes instead of 32"),
        ({"checksum": False}, b"", "c.0 has 0 bytes instead of 32"),
        ({}, b"1" * 32, "c.0 has 32 bytes instead of 36"),
        ({"codec": "zstd"}, b"", "c.0 has 0 bytes instead of some"),
        ({"codec": "zstd"}, b"1" * 40, "its CRC-32C differs"),
    ],
)
def test_detects_wrong_chunk_file_size(tmp_path, layout, content, told):
    value = np.zeros(4096) if "codec" in layout else np.arange(4.0)
    path = save(tmp_path / "c", {"w": value}, is_old=True, **layout)
    (path / "state/w/c.0").write_bytes(content)
    report = flaxckpt.verify(path)
    assert told in report.problems["w"]
    with pytest.raises(errors.DamagedCheckpointError, match=r"^w: c\.0 "):
        verify.check(path, None)


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("rest", range(6))
def test_checks_every_byte_of_chunk_across_read_parts(tmp_path, rest, is_old):
    """Files are read in parts of 1 MiB; the last one may cut the checksum."""
    value = np.zeros(2**20 - 4 + rest, np.uint8)
    path = save(tmp_path / "c", {"w": value}, is_old=is_old)
    assert flaxckpt.verify(path).ok
    for place in (0, value.size - 1, value.size, value.size + 3):
        chunks.flip(path / "state", "w/c.0", place)
        assert "w" in flaxckpt.verify(path).problems, place
        chunks.flip(path / "state", "w/c.0", place)


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("layout", [{}, {"checksum": False}, {"codec": "zstd"}])
def test_counts_each_byte_once_and_knows_total(tmp_path, layout, is_old):
    value = np.random.default_rng(0).standard_normal(2**15)
    path = save(tmp_path / "c", {"w": value}, is_old=is_old, **layout)
    counter = progress.Counter("verifying")
    report = verify.verify_checkpoint(path, None, counter=counter)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert counter.total == size
    assert 0.5 * size < counter.done <= size
    assert report.bytes_checked == counter.done


def test_counts_bytes_of_other_formats(tmp_path):
    save(tmp_path / "c", {"w": np.zeros(2**10, np.float32)})
    flaxckpt.convert(tmp_path / "c", tmp_path / "m.safetensors")
    counter = progress.Counter("verifying")
    verify.verify_checkpoint(tmp_path / "m.safetensors", None, counter=counter)
    assert counter.done == counter.total == 2**12


@pytest.mark.parametrize("checksum", [True, False])
def test_compares_chunks_in_stores(checksum):
    """There, sizes are known only after the read."""
    path = faulty.new_path("verify") / "c"
    save(path, {"w": np.arange(4.0), "v": np.arange(4.0)}, checksum=checksum)
    assert flaxckpt.verify(path).ok
    file = path / "state" / "d" / "0.small.0"
    last = max("wv", key=lambda name: chunks.place(path / "state", f"{name}/c.0")[1])
    content = file.read_bytes()
    for changed, damaged in ((content[:-1], last), (b"", "wv")):
        file.write_bytes(changed)
        problems = flaxckpt.verify(path).problems
        told = "0.small.0 ends before the chunk c.0 does"
        assert problems == dict.fromkeys(damaged, told)


def test_detects_overlong_object():
    path = faulty.new_path("verify") / "c"
    save(path, {"w": np.arange(4.0), "v": np.arange(4.0)})
    file = path / "state" / "d" / "0.small.0"
    content = file.read_bytes()
    file.write_bytes(content + b"1")
    told = f"0.small.0 has {len(content) + 1} bytes instead of {len(content)}"
    assert flaxckpt.verify(path).problems == {"state/d/0.small.0": told}


@pytest.mark.parametrize("layout", [{}, {"codec": "zstd"}], ids=lambda x: str(x))
def test_reads_large_store_objects_in_parts(monkeypatch, layout):
    """Since no more than a part of them has to be in memory."""
    seams.replace(monkeypatch, "bucket.part_bytes", 2**12)
    path = faulty.new_path("verify-parts") / "c"
    values = np.random.default_rng(0).standard_normal(2**12)
    save(path, {"w": values}, **layout)
    sizes = []
    with faulty.faulty(path) as kv:
        real = kv.read

        def read(key, byte_range=None):
            future = real(key, byte_range=byte_range)
            if "/d/" in key:
                sizes.append(len(future.result().value))
            return future

        kv.read = read
        assert flaxckpt.verify(path).ok
    assert sum(sizes) > 0.9 * values.nbytes
    assert max(sizes) <= 2**12 + 4


# ---- faults that are not proved ---------------------------------------------------


def test_unreadable_file_leaves_damage_unproved(tmp_path, monkeypatch):
    layout = {"codec": "zstd", "checksum": False}
    state = {"w": np.zeros(2**17), "v": np.zeros(2**17)}  # in files of their own
    path = save(tmp_path / "c", state, **layout)
    spoil(path, "w/c.0")
    unreadable(monkeypatch, "state/d/0.0/v")
    report = flaxckpt.verify(path)
    assert not report.problems
    assert {"w"} <= set(report.unread)
    assert verify.find_damage(path, None) is None
    with pytest.raises(errors.DamagedCheckpointError):
        verify.check(path, None)


@pytest.mark.parametrize("is_lost", [True, False])
def test_reports_damaged_or_unreadable_description(tmp_path, monkeypatch, is_lost):
    path = save(tmp_path / "c", {"w": np.zeros(4), "name": "x"})
    flip_bit(path / "state/_strings.json")
    if not is_lost:
        unreadable(monkeypatch, "state/d/0.small.0")
    report = flaxckpt.verify(path)
    faults, others = report.problems, report.unread
    if not is_lost:
        faults, others = others, faults
    assert (len(faults), len(others)) == (1, 0)
    assert report.leaves is None
    with pytest.raises(errors.DamagedCheckpointError, match=str(path)):
        verify.check(path, None)


@pytest.mark.parametrize("target", ["../../other", "gone"])
def test_dangling_or_outside_link_does_not_hide_damage(tmp_path, target):
    path = save(tmp_path / "c", {"w": np.zeros(4), "name": "x"})
    (tmp_path / "other").write_text("mine")
    (path / "state/link").symlink_to(target)
    flip_bit(path / "state/_strings.json")
    report = flaxckpt.verify(path)
    assert (len(report.problems), len(report.unread)) == (1, 0)


def before_manifest(monkeypatch, count, act):
    """Calls `act` with the manifest before it is opened, after `count` times."""
    real, opened = seams.current("disk.open_file"), []

    def open_file(file, *args, **options):
        if file.name == "flaxckpt.json":
            opened.append(file)
            if len(opened) == count + 1:
                act(file)
        return real(file, *args, **options)

    seams.replace(monkeypatch, "disk.open_file", open_file)


@pytest.mark.parametrize("count", [0, 1])
def test_unreadable_manifest_is_not_damage(tmp_path, monkeypatch, count):
    path = save(tmp_path / "c", {"w": np.zeros(4)})

    def fail(file):
        raise OSError(errno.EIO, "Input/output error", str(file))

    before_manifest(monkeypatch, count, fail)
    report = verify.verify_checkpoint(path, None)
    assert (dict(report.problems), set(report.unread)) == ({}, {"."})
    assert "Input/output error" in report.unread["."]
    monkeypatch.undo()
    before_manifest(monkeypatch, count, fail)
    assert verify.find_damage(path, None) is None


@pytest.mark.parametrize("count", [0, 1])
def test_checkpoint_deleted_meanwhile_is_not_damaged(tmp_path, monkeypatch, count):
    path = save(tmp_path / "c", {"w": np.zeros(4)})
    before_manifest(monkeypatch, count, lambda file: shutil.rmtree(path))
    assert verify.find_damage(path, None) is None


def test_missing_step_raises_not_found_error(tmp_path):
    with pytest.raises(errors.CheckpointNotFoundError):
        verify.verify_checkpoint(tmp_path / "1", 1)


@pytest.mark.parametrize("count", [0, 1])
def test_reports_manifest_lost_during_verify(tmp_path, monkeypatch, count):
    path = save(tmp_path / "c", {"w": np.zeros(4)})
    before_manifest(monkeypatch, count, lambda file: file.unlink())
    report = verify.verify_checkpoint(path, None)
    assert set(report.problems) == {"."}
    assert not report.ok


@contextlib.contextmanager
def outage(path, ending, count):
    """The store of a path fails one request for a file, after `count`.

    Yields the requests.
    """
    asked = []
    with faulty.faulty(path) as kv:
        real = kv.read

        def read(key, byte_range=None):
            if key.endswith(ending):
                asked.append(key)
                if len(asked) == count + 1:
                    raise ValueError("PERMISSION_DENIED: the token has expired")
            return real(key, byte_range=byte_range)

        kv.read = read
        yield asked


@pytest.mark.parametrize(
    "ending", ["flaxckpt.json", "_strings.json", "d/tree", "0.small.0"]
)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_transient_store_outage_proves_no_damage(ending, count):
    """Although all can be read afterwards."""
    path = faulty.new_path("verify-outage") / "c"
    save(path, {"w": np.zeros(4), "name": "x"})
    with outage(path, ending, count) as asked:
        report = verify.verify_checkpoint(path, None)
    assert report.problems == {}
    assert bool(report.unread) == (len(asked) > count)
    with outage(path, ending, count):
        assert verify.find_damage(path, None) is None


def test_memory_error_is_not_damage(tmp_path, monkeypatch):
    save(tmp_path / "c", {"w": np.zeros(4, np.float32)})
    flaxckpt.convert(tmp_path / "c", tmp_path / "m.safetensors")

    def fail(*args, **options):
        raise MemoryError

    seams.replace(monkeypatch, "blockwise.read", fail)
    report = flaxckpt.verify(tmp_path / "m.safetensors")
    assert report.problems == {}
    assert report.unread == {"w": "larger than the memory"}


def test_reports_missing_file_in_empty_metrics_directory(tmp_path):
    """Also in a step of which nothing else records that it had metrics."""
    path = save(tmp_path / "c", {"w": np.zeros(4)})
    (path / "metrics").mkdir()
    assert flaxckpt.verify(path).problems == {"metrics/metrics": "metrics is missing"}


def test_foreign_metrics_count_as_unchecked(tmp_path):
    path = save(tmp_path / "c", {"w": np.zeros(4)})
    (path / "metrics").mkdir()
    (path / "metrics/metrics").write_text('{"loss": 1.0}')
    report = flaxckpt.verify(path)
    assert report.ok
    assert list(report.unchecked) == ["metrics/metrics"]


def test_damaged_metrics_do_not_make_step_unreadable(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as run:
        run.save(1, {"w": np.zeros(4)}, metrics={"loss": 1.0})
    flip_bit(tmp_path / "1" / "metrics" / "metrics")
    assert not flaxckpt.verify(tmp_path).ok
    verify.check(tmp_path / "1", 1)
    flip_bit(tmp_path / "1" / "state" / "d" / "tree")
    with pytest.raises(errors.DamagedCheckpointError):
        verify.check(tmp_path / "1", 1)


def test_report_locates_every_damaged_leaf(tmp_path):
    """Also of a leaf after a file that holds no leaf, and before it."""
    with flaxckpt.Checkpointer(tmp_path) as run:
        data = StepIndexed(lambda i: i)
        state = {"v": np.zeros(4), "w": np.zeros(4)}
        run.save(1, state, metrics={"loss": 1.0}, dataset=data)
    for name in "vw":
        chunks.flip(tmp_path / "1/state", f"{name}/c.0")
    flip_bit(tmp_path / "1/metrics/metrics")
    for file in (tmp_path / "1" / "dataset").iterdir():
        flip_bit(file)
    report = flaxckpt.verify(tmp_path)
    assert {"v", "w"} < set(report.problems)
    assert report.places == {name: f"state/d/0.small.0 -> {name}" for name in "vw"}


@pytest.mark.parametrize("error", [OSError(errno.EIO, "failed"), ValueError("lost")])
def test_reports_lost_checkpoint(tmp_path, error):
    report = verify.report_lost(tmp_path, 3, error)
    faults = report.unread if isinstance(error, OSError) else report.problems
    assert dict(faults) == {".": str(error)}
    assert (len(report.problems) + len(report.unread), report.secs) == (1, 0.0)
    assert (report.leaves, report.step) == (None, 3)


@pytest.mark.parametrize("is_old", [False, True])
def test_finds_damage_in_arrays_without_descriptions(tmp_path, is_old):
    path = save(tmp_path / "c", {"w": np.zeros(4)}, is_old=is_old)
    for file in path.rglob("*"):
        if file.is_file() and file.parent.name != ("w" if is_old else "d"):
            file.unlink()
    why = verify.find_damage(path, None)
    assert why.startswith(f"{path} is not a checkpoint")
    assert "\n" not in why


def test_finds_damage_in_remains_of_checkpoint(tmp_path):
    path = save(tmp_path / "c", {"w": np.zeros(4)})
    (path / "flaxckpt.json").unlink()
    (path / "state" / "_METADATA").unlink()
    assert verify.find_damage(path, None)
    shutil.rmtree(path / "state")
    assert verify.find_damage(path, None)
    shutil.rmtree(path)
    assert verify.find_damage(path, None) is None


def test_finds_no_damage_in_foreign_directories(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/text").write_text("mine")
    assert verify.find_damage(tmp_path / "notes", None) is None


# ---- databases, and Orbax ---------------------------------------------------------


def test_reports_database_of_another_step_in_each_item(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, items=("a", "b")) as run:
        for step, names in ((1, "wv"), (2, "w")):
            arrays = {name: np.arange(4096.0) for name in names}
            run.save(step, {"a": dict(arrays), "b": dict(arrays)})
    for item in ("a", "b"):
        shutil.rmtree(tmp_path / "1" / item)
        shutil.copytree(tmp_path / "2" / item, tmp_path / "1" / item)
    report = flaxckpt.verify(tmp_path, step=1)
    assert {"a/d/tree", "b/d/tree"} <= set(report.problems)
    assert set(report.unreadable) == {"a/w", "a/v", "b/w", "b/v"}


@pytest.fixture(params=["new", "digested", "large"])
def database(request, tmp_path):
    """A checkpoint with a database in an item, and an item without arrays."""
    state = {"a": {name: np.arange(4096.0) for name in "wv"}, "b": {"name": "x"}}
    flaxckpt.save(tmp_path / "c", state, items=("a", "b"))
    if request.param != "new":
        digested = request.param == "digested"
        old_stores.make_databases(tmp_path / "c", ["a"], digested=digested)
    return tmp_path / "c"


def test_database_checksums_suffice(database):
    report = flaxckpt.verify(database)
    assert report.ok, str(report)
    assert report.unchecked == {}


@pytest.mark.parametrize("where", ["d", "manifest.ocdbt"])
def test_damaged_database_does_not_report_missing_leaves(database, where):
    file = database / "a" / where
    file = file / "tree" if (file / "tree").exists() else file
    [file] = file.iterdir() if file.is_dir() else [file]
    file.write_bytes(bytes(file.stat().st_size))
    report = flaxckpt.verify(database)
    assert (bool(report.problems), report.unread) == (True, {})
    assert set(report.unreadable) == {"a/w", "a/v"}
    told = "".join(report.problems.values())
    assert "missing" not in told
    if "has changed since it was saved" in told:  # its digest proves it
        assert set(report.problems) == {f"{file.relative_to(database)}"}


def test_missing_file_of_old_database_makes_leaves_unreadable(tmp_path):
    path = save(tmp_path / "c", {name: np.arange(4096.0) for name in "wv"})
    old_stores.make_databases(path)
    database = old_stores.open_database(path / "state")
    for key in ("v/c.0", "v/zarr.json", "w/zarr.json"):
        database[key] = database[key]  # moves to a new file
    file, *_ = chunks.place(path / "state", "w/c.0")
    file.unlink()
    report = flaxckpt.verify(path)
    name = f"state/d/{file.name}"
    assert report.unreadable == {"w": f"{name} is missing"}
    assert report.places == {name: f"{name} -> w"}


def test_unreadable_database_is_not_damage(database, monkeypatch):
    unreadable(monkeypatch, "a/manifest.ocdbt")
    report = flaxckpt.verify(database)
    assert report.problems == {}
    assert "a/manifest.ocdbt" in report.unread
    assert set(report.unreadable) == {"a/w", "a/v"}


def test_detects_damaged_orbax_items(tmp_path):
    path = tmp_path / "c"
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler("a", "b")) as checkpointer:
        states = {name: {"w": np.arange(4.0)} for name in "ab"}
        checkpointer.save(
            path,
            ocp.args.Composite(**{n: ocp.args.StandardSave(states[n]) for n in "ab"}),
        )
    assert flaxckpt.verify(path).ok
    (path / "b" / "_METADATA").write_bytes(b"{")
    report = flaxckpt.verify(path)
    assert set(report.problems) == {"b"}


def test_compares_own_items_in_orbax_step(tmp_path):
    handlers = {"own": CheckpointHandler(), "b": ocp.StandardCheckpointHandler()}
    state, small = {"w": np.arange(2.0**15)}, {"w": np.arange(4.0)}
    with ocp.CheckpointManager(tmp_path, item_handlers=handlers) as manager:
        items = {"own": SaveArgs(state), "b": ocp.args.StandardSave(small)}
        manager.save(1, args=ocp.args.Composite(**items))
    (tmp_path / "1/own/notes.txt").write_text("mine")
    report = flaxckpt.verify(tmp_path / "1")
    assert report.ok, str(report)
    assert "own/notes.txt" in report.extra
    assert "own/w" not in report.unchecked
    assert report.bytes_checked < 1.5 * state["w"].nbytes  # not read twice
    chunks.flip(tmp_path / "1/own", "w/c.0")
    report = flaxckpt.verify(tmp_path / "1")
    assert set(report.problems) == {"own/w"}
    assert report.places["own/w"].startswith("own/d/0.small.0")


def test_stops_at_first_fault_unless_thorough(tmp_path, monkeypatch):
    seams.replace(monkeypatch, "verify.decoded_at_once", 2**15)
    layout = {"codec": "zstd", "checksum": False}
    state = {name: np.zeros(2**12) for name in "rstu"}
    path = save(tmp_path / "c", state, **layout)
    sound = verify.verify_checkpoint(path, None, thorough=False)
    for name in state:
        spoil(path, f"{name}/c.0")
    assert set(flaxckpt.verify(path).problems) == {*state}
    assert set(verify.verify_checkpoint(path, None).problems) == {*state}
    report = verify.verify_checkpoint(path, None, thorough=False)
    assert len(report.problems) == 1
    assert report.bytes_checked < sound.bytes_checked - 2 * 2**15


@pytest.mark.parametrize("is_old", [False, True])
def test_reports_damaged_description_first(tmp_path, is_old):
    layout = {"codec": "zstd", "checksum": False, "is_old": is_old}
    path = save(tmp_path / "c", {name: np.zeros(2**12) for name in "rstu"}, **layout)
    for name in "rstu":
        spoil(path, f"{name}/c.0")
    flip_bit(path / "state/_METADATA")
    report = verify.verify_checkpoint(path, None, thorough=False)
    assert list(report.problems) == ["state/_METADATA"]
    assert report.bytes_checked < 2**15
