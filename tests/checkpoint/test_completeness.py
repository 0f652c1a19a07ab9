"""Before older steps go, the new one is looked at: no file is missing or too short."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import flaxckpt
from flaxckpt.cli import app
from flaxckpt.policies import LatestN
from tests import GOLDEN
from tests.helpers import faulty_store as faulty
from tests.helpers import old_stores
from tests.helpers.files import flip_bit, largest_file

LAYOUTS = {
    "database": flaxckpt.ArrayLayout(),
    "files": flaxckpt.ArrayLayout(),
    "no checksums": flaxckpt.ArrayLayout(codec="none", checksum=False),
    "compressed": flaxckpt.ArrayLayout(codec="zstd"),
    "zarr 2": flaxckpt.ArrayLayout(zarr_version=2, checksum=False),
}
"""On disks, all but the first are saved as directories of chunk files, as of old."""

STATE = {
    "w": np.arange(2048.0, dtype="f4").reshape(32, 64),
    "b": jnp.arange(3, dtype=jnp.bfloat16),
    "scalar": jnp.float32(1),
    "empty": np.zeros((0, 3), "f4"),
    "text": "a",
}
METRICS = {"metrics/metrics", "metrics/digests"}
"""Lost metrics keep a step, and are no damage of its values."""


def save(path, layout, **options):
    with flaxckpt.Checkpointer(path, layout=LAYOUTS[layout]) as ckpt:
        ckpt.save(1, STATE, **options)
    if layout != "database":
        old_stores.make_directories(path / "1")
    return path / "1"


def changed(path, name, change):
    """A copy of a step, in a run of its own, with a change of one file."""
    copy = path.parent.with_name("changed") / path.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy)
    file = copy / name
    if change == "removed":
        file.unlink()
    elif change == "empty":
        file.write_bytes(b"")
    elif change == "longer":
        file.write_bytes(file.read_bytes() + b"\0")
    else:
        file.write_bytes(file.read_bytes()[:-1])
    return copy


def find_loss(step):
    """Returns why retention counts a step as damaged; None if it is whole."""
    root, number = step.parent, int(step.name)
    with flaxckpt.Checkpointer(root, keep=[LatestN(1)], read_only=True) as run:
        why = run.explain().get(number, ["damaged: not a step"])
    return why[0].removeprefix("damaged: ") if "damaged: " in why[0] else None


def find_damage(path, wanted):
    """Returns the damage that a load of `wanted` meets, and damage elsewhere."""
    target = path.with_name("wanted")
    flaxckpt.save(target, wanted, overwrite=True)
    result = CliRunner().invoke(
        app, ["plan", str(path), str(target), "--unused", "ignore", "--json"]
    )
    plan = json.loads(result.output)
    return plan["damage"], plan["damage_elsewhere"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_detects_missing_and_empty_files(tmp_path, layout):
    path = save(tmp_path / "c", layout, metrics={"loss": 1.0})
    assert find_loss(path) is None
    files = {file for file in path.rglob("*") if file.is_file()}
    for name in {file.relative_to(path).as_posix() for file in files} - METRICS:
        for change in ("removed", "empty"):
            if (name, change) == ("commit_success.txt", "removed"):
                continue  # on a disk, the name of the directory says so
            told = find_loss(changed(path, name, change))
            assert told, (name, change)
            assert name in told or name != "flaxckpt.json"


@pytest.mark.parametrize("change", ["longer", "shorter"])
def test_detects_wrong_size_of_database_files(tmp_path, change):
    path = save(tmp_path / "c", "database")
    for name in ("state/d/0.small.0", "state/d/tree"):
        assert name in find_loss(changed(path, name, change))


@pytest.mark.parametrize("layout", ["files", "no checksums"])
@pytest.mark.parametrize("change", ["longer", "shorter"])
def test_detects_wrong_size_of_chunks(tmp_path, layout, change):
    path = save(tmp_path / "c", layout)
    name = "state/b/c.0"
    size = (path / name).stat().st_size
    found = size + (1 if change == "longer" else -1)
    told = f"{name}: wanted {size} bytes, found {found}"
    assert told in find_loss(changed(path, name, change))


def test_reports_all_faults_of_array(tmp_path):
    path = save(tmp_path / "c", "compressed")
    copy = changed(path, "state/w/c.0.0", "removed")
    (copy / "state/w/zarr.json").unlink()
    told = find_loss(copy)
    for name in ("c.0.0", "zarr.json"):
        assert f"state/w/{name}: wanted some bytes, found none" in told


@pytest.mark.parametrize("size", [1024, 1023], ids=["in files", "in nodes"])
def test_checks_array_bytes_outside_nodes_of_old_database(tmp_path, size):
    path = tmp_path / "c" / "1"
    layout = flaxckpt.ArrayLayout(codec="none", checksum=False)
    flaxckpt.save(path, {"w": np.zeros(size, "f4")}, layout=layout)
    old_stores.make_databases(path)
    assert find_loss(path) is None
    least = 4096 if size == 1024 else 1
    for data in (path / "state/d").iterdir():
        data.unlink()
    data.write_bytes(b"1" * least)
    assert find_loss(path) is None
    data.write_bytes(b"1" * (least - 1))
    assert f"bytes, found {least - 1}" in find_loss(path)
    data.write_bytes(b"1" * least)
    (path / "state/manifest.ocdbt").write_bytes(b"")
    assert "manifest.ocdbt: wanted some bytes, found none" in find_loss(path)


def test_deleted_items_do_not_count_as_missing(tmp_path):
    path = tmp_path / "run"
    with flaxckpt.Checkpointer(path, items=("params", "opt")) as ckpt:
        ckpt.save(1, {"params": STATE, "opt": STATE}).wait()
        ckpt.delete(1, item="opt")
    assert find_loss(path / "1") is None
    shutil.rmtree(path / "1" / "params")
    assert find_loss(path / "1")


@pytest.mark.parametrize("layout", ["files", "compressed"])
def test_checks_files_of_wanted_leaves_separately(tmp_path, layout):
    path = save(tmp_path / "c", layout)
    assert find_damage(path, STATE) == (None, None)
    copy = changed(path, "state/w/c.0.0", "removed")
    others = {name: leaf for name, leaf in STATE.items() if name != "w"}
    met, elsewhere = find_damage(copy, others)
    assert met is None
    assert elsewhere
    met, elsewhere = find_damage(copy, {"w": STATE["w"]})
    assert "state/w/c.0.0" in met
    assert elsewhere is None


@pytest.mark.parametrize("is_old", [False, True])
def test_checks_database_for_each_of_its_leaves(tmp_path, is_old):
    path = tmp_path / "run"
    item = {"w": STATE["w"], "b": STATE["b"]}
    with flaxckpt.Checkpointer(
        path, items=("a", "b"), layout=LAYOUTS["database"]
    ) as ckpt:
        ckpt.save(1, {"a": item, "b": item})
    if is_old:
        old_stores.make_databases(path / "1", ["a", "b"])
    assert find_damage(path / "1", {"a": item, "b": item}) == (None, None)
    for data in (path / "1/b/d").iterdir():
        data.write_bytes(data.read_bytes()[:1000])
    met, elsewhere = find_damage(path / "1", {"a": item})
    assert met is None
    assert elsewhere
    met, _ = find_damage(path / "1", {"b": {"b": item["b"]}})  # with b/w
    assert ("at least 8192 bytes" if is_old else "b/d/0.small.0") in met


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_detects_missing_objects(codec):
    root = faulty.new_path("file-sizes")
    layout = flaxckpt.ArrayLayout(codec=codec)
    state = {"a": np.ones(3), "text": "a", "c": np.ones(3)}  # without arrays in between
    state |= {name: np.ones(2**18, "f4") for name in "de"}  # in objects of their own
    with flaxckpt.Checkpointer(root, items=("a", "b"), layout=layout) as ckpt:
        ckpt.save(1, {"a": state, "b": {"w": np.ones(3)}})
    path = root / "1"
    assert find_loss(path) is None
    for name in {*path.keys()}:
        key = f"{path.key}/{name}"
        content = path.store.read(key).value
        path.store.delete(key)
        assert find_loss(path), name
        path.store.write(key, content)
    assert find_loss(path) is None


def test_does_not_read_arrays(tmp_path):
    """But the tree of a database, an old small one, and what is not of arrays."""
    path = save(tmp_path / "zarr", "zarr 2")
    [chunk] = [file for file in (path / "state/w").iterdir() if file.name != ".zarray"]
    flip_bit(chunk)
    assert find_loss(path) is None
    flip_bit(path / "state/_strings.json")
    assert find_loss(path)
    path = save(tmp_path / "database", "database")
    flip_bit(path / "state/d/0.small.0")
    assert find_loss(path) is None
    flip_bit(path / "state/d/tree")
    assert "has changed since" in find_loss(path)
    path = save(tmp_path / "old", "database")
    old_stores.make_databases(path, digested=True)
    flip_bit(largest_file(path / "state/d"))
    assert "has changed since" in find_loss(path)
    path = save(faulty.new_path("file-sizes"), "database")
    flip_bit(max((path / "state/d").iterdir(), key=lambda file: len(file.read_bytes())))
    assert find_loss(path) is None


def test_checks_no_sizes_in_step_of_another_library(tmp_path):
    shutil.copytree(GOLDEN / "orbax-0.12.8" / "v0_files" / "7", tmp_path / "7")
    assert find_loss(tmp_path / "7") is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [4096, 70_000, 2**20])
@pytest.mark.parametrize("codec", ["compact", "zstd"])
def test_detects_wrong_size_of_compressed_chunks(tmp_path, codec, size):
    values = {
        "random": np.random.default_rng(0).bytes(size),
        "zeros": bytes(size),
        "mixed": bytes(size // 2) + np.random.default_rng(0).bytes(size // 2),
        "text": (b"0123456789abcdef" * size)[:size],
    }
    for version in (2, 3):
        layout = flaxckpt.ArrayLayout(codec=codec, zarr_version=version, checksum=False)
        path = tmp_path / f"zarr-{version}" / "1"
        arrays = {name: np.frombuffer(data, "u1") for name, data in values.items()}
        flaxckpt.save(path, arrays, layout=layout)
        old_stores.make_directories(path)
        assert find_loss(path) is None
        for name in values:
            [chunk] = (path / "state" / name).glob("*0")
            content = chunk.read_bytes()
            for other in (content + b"\0", content[:-1], content[:4], bytes(99)):
                chunk.write_bytes(other)
                assert f"state/{name}/" in find_loss(path)
            chunk.write_bytes(content)


def test_reports_damaged_items(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, items=("a", "b")) as ckpt:
        ckpt.save(1, {"a": {"w": np.ones(2)}, "b": {"w": np.ones(2)}})
    shutil.rmtree(tmp_path / "1" / "b")
    assert "has damaged items" in find_loss(tmp_path / "1")
