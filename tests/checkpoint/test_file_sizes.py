"""Before older steps go, the new one is looked at: no file is missing or too short."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import flaxckpt
from flaxckpt import _zarr, errors
from flaxckpt._checkpoint import file_sizes
from flaxckpt._formats import locate
from flaxckpt._storage.storage import LOCAL
from tests import GOLDEN
from tests.helpers import faulty_store as faulty
from tests.helpers import old_stores

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
    """A copy of a checkpoint with a change of one file."""
    copy = path.with_name("copy")
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_file_may_be_missing_or_empty(tmp_path, layout):
    path = save(tmp_path / "c", layout, metrics={"loss": 1.0})
    file_sizes.check(path, None)
    for name in {*LOCAL.files_below(path)} - METRICS:
        for change in ("removed", "empty"):
            if (name, change) == ("commit_success.txt", "removed"):
                continue  # on a disk, the name of the directory says so
            with pytest.raises(errors.DamagedCheckpointError):
                file_sizes.check(changed(path, name, change), None)


@pytest.mark.parametrize("change", ["longer", "shorter"])
def test_files_of_a_database_have_their_sizes(tmp_path, change):
    path = save(tmp_path / "c", "database")
    for name in ("state/d/0.small.0", "state/d/tree"):
        with pytest.raises(errors.DamagedCheckpointError, match=name):
            file_sizes.check(changed(path, name, change), None)


@pytest.mark.parametrize("layout", ["files", "no checksums"])
@pytest.mark.parametrize("change", ["longer", "shorter"])
def test_chunks_have_their_sizes(tmp_path, layout, change):
    path = save(tmp_path / "c", layout)
    name = "state/b/c.0"
    size = (path / name).stat().st_size
    found = size + (1 if change == "longer" else -1)
    message = rf"b is incomplete; .*\n.*c\.0: wanted {size} bytes, found {found}"
    with pytest.raises(errors.DamagedCheckpointError, match=message):
        file_sizes.check(changed(path, name, change), None)


def test_all_faults_of_an_array_are_reported(tmp_path):
    path = save(tmp_path / "c", "compressed")
    copy = changed(path, "state/w/c.0.0", "removed")
    (copy / "state/w/zarr.json").unlink()
    with pytest.raises(errors.DamagedCheckpointError) as told:
        file_sizes.check(copy, None)
    assert "c.0.0: wanted some bytes, found none" in str(told.value)
    assert "zarr.json is missing or empty" in str(told.value)


def test_an_old_database_without_digests_holds_its_large_arrays(tmp_path):
    path = save(tmp_path / "c", "database")
    old_stores.make_databases(path)
    file_sizes.check(path, None)
    for data in (path / "state/d").iterdir():
        data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(errors.DamagedCheckpointError, match=r"at least 8192 bytes, fo"):
        file_sizes.check(path, None)
    (path / "state/manifest.ocdbt").write_bytes(b"")
    with pytest.raises(
        errors.DamagedCheckpointError, match="incomplete: wanted a data"
    ):
        file_sizes.check(path, None)
    small = tmp_path / "small"
    with flaxckpt.Checkpointer(small, layout=LAYOUTS["database"]) as ckpt:
        ckpt.save(1, {"b": STATE["b"]})
    old_stores.make_databases(small / "1")
    file_sizes.check(small / "1", None)
    shutil.rmtree(small / "1/state/d")
    with pytest.raises(
        errors.DamagedCheckpointError, match="at least 0 bytes, found 0"
    ):
        file_sizes.check(small / "1", None)


def test_deleted_items_do_not_count_as_missing(tmp_path):
    path = tmp_path / "run"
    with flaxckpt.Checkpointer(path, items=("params", "opt")) as ckpt:
        ckpt.save(1, {"params": STATE, "opt": STATE}).wait()
        ckpt.delete(1, item="opt")
    file_sizes.check(path / "1", None)
    shutil.rmtree(path / "1" / "params")
    with pytest.raises(errors.CheckpointError):
        file_sizes.check(path / "1", None)


@pytest.mark.parametrize("layout", ["files", "compressed"])
def test_only_the_files_of_some_leaves_are_checked(tmp_path, layout):
    path = save(tmp_path / "c", layout)
    file_sizes.check_leaves(path, [*STATE])
    copy = changed(path, "state/w/c.0.0", "removed")
    file_sizes.check_leaves(copy, [name for name in STATE if name != "w"])
    with pytest.raises(errors.DamagedCheckpointError, match=r"w is incomplete"):
        file_sizes.check_leaves(copy, ["w"])


@pytest.mark.parametrize("is_old", [False, True])
def test_a_database_is_checked_for_each_of_its_leaves(tmp_path, is_old):
    path = tmp_path / "run"
    item = {"w": STATE["w"], "b": STATE["b"]}
    with flaxckpt.Checkpointer(
        path, items=("a", "b"), layout=LAYOUTS["database"]
    ) as ckpt:
        ckpt.save(1, {"a": item, "b": item})
    if is_old:
        old_stores.make_databases(path / "1", ["a", "b"])
    leaves = [*flaxckpt.metadata(path / "1").leaves]
    file_sizes.check_leaves(path / "1", leaves)
    for data in (path / "1/b/d").iterdir():
        data.write_bytes(data.read_bytes()[:1000])
    file_sizes.check_leaves(path / "1", [leaf for leaf in leaves if leaf[0] == "a"])
    told = "at least 8192 bytes, found" if is_old else r"b/d/0\.small\.0: wanted"
    with pytest.raises(errors.DamagedCheckpointError, match=told):
        file_sizes.check_leaves(path / "1", ["b/b"])  # in the database with b/w


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_no_object_may_be_missing(codec):
    root = faulty.new_path("file-sizes")
    layout = flaxckpt.ArrayLayout(codec=codec)
    flaxckpt.save(root / "1", STATE | {"large": np.ones(2**18, "f4")}, layout=layout)
    path = root / "1"
    file_sizes.check(path, None)
    for name in {*path.keys()}:
        key = f"{path.key}/{name}"
        content = path.store.read(key).value
        path.store.delete(key)
        with pytest.raises(errors.CheckpointError):
            file_sizes.check(path, None)
        path.store.write(key, content)
    file_sizes.check(path, None)


def flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def test_arrays_are_not_read(tmp_path):
    """But the tree of a database, an old small one, and what is not of arrays."""
    path = save(tmp_path / "zarr", "zarr 2")
    [chunk] = [file for file in (path / "state/w").iterdir() if file.name != ".zarray"]
    chunk.write_bytes(flip(chunk.read_bytes()))
    file_sizes.check(path, None)
    strings = path / "state/_strings.json"
    strings.write_bytes(flip(strings.read_bytes()))
    with pytest.raises(errors.DamagedCheckpointError):
        file_sizes.check(path, None)
    path = save(tmp_path / "database", "database")
    data, tree = path / "state/d/0.small.0", path / "state/d/tree"
    data.write_bytes(flip(data.read_bytes()))
    file_sizes.check(path, None)
    tree.write_bytes(flip(tree.read_bytes()))
    with pytest.raises(errors.DamagedCheckpointError, match="has changed since"):
        file_sizes.check(path, None)
    path = save(tmp_path / "old", "database")
    old_stores.make_databases(path, digested=True)
    data = max((path / "state/d").iterdir(), key=lambda file: file.stat().st_size)
    data.write_bytes(flip(data.read_bytes()))
    with pytest.raises(errors.DamagedCheckpointError, match="has changed since"):
        file_sizes.check(path, None)
    path = save(faulty.new_path("file-sizes"), "database")
    data = max((path / "state/d").iterdir(), key=lambda file: len(file.read_bytes()))
    data.write_bytes(flip(data.read_bytes()))
    file_sizes.check(path, None)


def test_only_checkpoints_of_flaxckpt_are_whole(tmp_path):
    path = save(tmp_path / "c", "database")
    (path / "flaxckpt.json").unlink()
    with pytest.raises(
        errors.DamagedCheckpointError, match=r"flaxckpt.json is missing"
    ):
        file_sizes.check(path, None)


@pytest.mark.parametrize("codec", ["compact", "zstd"])
@pytest.mark.parametrize("size", [4096, 70_000, 2**20])
def test_a_compressed_chunk_knows_its_size(tmp_path, codec, size):
    values = {
        "random": np.random.default_rng(0).bytes(size),
        "zeros": bytes(size),
        "mixed": bytes(size // 2) + np.random.default_rng(0).bytes(size // 2),
        "text": (b"0123456789abcdef" * size)[:size],
    }
    for version in (2, 3):
        layout = flaxckpt.ArrayLayout(codec=codec, zarr_version=version, checksum=False)
        path = tmp_path / str(version)
        arrays = {name: np.frombuffer(data, "u1") for name, data in values.items()}
        flaxckpt.save(path, arrays, layout=layout)
        old_stores.make_directories(path)
        file_sizes.check(path, None)
        for name in values:
            [chunk] = (path / "state" / name).glob("*0")
            content = chunk.read_bytes()
            found = _zarr.chunk_headers.compressed_bytes(chunk, codec)
            assert found == len(content)
            for other in (content + b"\0", content[:-1], content[:4], bytes(99)):
                chunk.write_bytes(other)
                found = _zarr.chunk_headers.compressed_bytes(chunk, codec)
                assert found != len(other)


def test_the_size_of_a_chunk_is_known_unless_it_is_compressed(tmp_path):
    for layout, size in {
        "files": 2048 * 4 + 4,
        "no checksums": 2048 * 4,
        "compressed": 0,
    }.items():
        path = save(tmp_path / layout, layout)
        info = flaxckpt.metadata(path).leaves["w"]
        encoding = locate.read_without_classes(path).manifest.encoding
        assert file_sizes.chunk_bytes(encoding, info) == size


def test_items_that_are_damaged_are_reported(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, items=("a", "b")) as ckpt:
        ckpt.save(1, {"a": {"w": np.ones(2)}, "b": {"w": np.ones(2)}})
    shutil.rmtree(tmp_path / "1" / "b")
    with pytest.raises(errors.DamagedCheckpointError, match="has damaged items"):
        file_sizes.check(tmp_path / "1", None)


def test_a_step_of_another_library_is_not_one_of_ours(tmp_path):
    shutil.copytree(GOLDEN / "orbax-0.12.8" / "v0_files" / "7", tmp_path / "1")
    with pytest.raises(errors.DamagedCheckpointError, match=r"flaxckpt\.json is miss"):
        file_sizes.check(tmp_path / "1", None)


@pytest.mark.parametrize(
    ("size", "least"), [(1024, 4096), (1023, 1)], ids=["in files", "in nodes"]
)
def test_a_database_has_at_least_the_bytes_of_arrays_outside_its_nodes(
    tmp_path, size, least
):
    layout = flaxckpt.ArrayLayout(codec="none", checksum=False)
    flaxckpt.save(tmp_path / "c", {"w": np.zeros(size, "f4")}, layout=layout)
    info = flaxckpt.metadata(tmp_path / "c").leaves["w"]
    encoding = _zarr.metadata.Encoding("none", checksum=False)
    root = tmp_path / "state"
    (root / "d").mkdir(parents=True)
    (root / "manifest.ocdbt").write_bytes(b"1")
    (root / "d" / "0").write_bytes(b"1" * least)
    file_sizes._check_database(root, encoding, [info])
    (root / "d" / "0").write_bytes(b"1" * (least - 1))
    with pytest.raises(errors.DamagedCheckpointError, match="incomplete"):
        file_sizes._check_database(root, encoding, [info])


def test_objects_are_missed_beside_leaves_without_arrays():
    """The leaves before and after a string, and the manifest of a database."""
    root = faulty.new_path("file-sizes")
    state = {"a": np.ones(3), "b": "text", "c": np.ones(3)}
    state |= {name: np.ones(2**18, "f4") for name in "de"}  # in objects of their own
    flaxckpt.save(root, state)
    file_sizes.check(root, None)
    for name in ("0.small.0", "0.0/d", "0.0/e"):
        file = root / "state" / "d" / name
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(errors.DamagedCheckpointError, match=f"{name} is missing"):
            file_sizes.check(root, None)
        file.write_bytes(content)
        file_sizes.check(root, None)


@pytest.mark.parametrize("item", ["a", "b"])
def test_each_database_in_a_store_has_its_manifest(item):
    root = faulty.new_path("file-sizes")
    layout = LAYOUTS["database"]
    with flaxckpt.Checkpointer(root, items=("a", "b"), layout=layout) as ckpt:
        ckpt.save(1, {name: {"w": np.ones(3)} for name in "ab"})
    file_sizes.check(root / "1", None)
    (root / "1" / item / "manifest.ocdbt").unlink()
    told = rf"{item}/manifest\.ocdbt is missing"
    with pytest.raises(errors.DamagedCheckpointError, match=told):
        file_sizes.check(root / "1", None)
