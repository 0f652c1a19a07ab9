"""Small values of a database, read without TensorStore: the same bytes, or an error."""

import functools
import os
import random

import numpy as np
import pytest
import tensorstore as ts

import flaxckpt
from flaxckpt._arrays import read_files
from flaxckpt._arrays.read_files import Database, Databases, check_digests
from flaxckpt._arrays.write import choose_sizes, make_index
from flaxckpt._storage.storage import LOCAL
from flaxckpt._zarr import btree, metadata, ocdbt
from flaxckpt._zarr.metadata import Encoding, RawArray
from tests.arrays.test_read_parts import host, info_of, read, write
from tests.helpers import old_stores, seams


def make_database(root, values):
    """A database of several levels, with values in nodes and in files."""
    spec = {
        "driver": "ocdbt",
        "base": f"file://{root}/",
        "config": {"max_decoded_node_bytes": 3000, "max_inline_value_bytes": 20},
    }
    store = ts.KvStore.open(spec).result()
    with ts.Transaction() as transaction:
        for key, value in values.items():
            store.with_transaction(transaction)[key] = value
    return root


def make_one_file(root, values):
    """A database with all values side by side in a file: TensorStore makes several."""
    places, content = {}, b""
    for key, value in values.items():
        places[key.encode()] = btree.Place("d/values", len(content), len(value))
        content += value
    (root / "d").mkdir()
    (root / "d/values").write_bytes(content)
    for name, content in make_index(places).files.items():
        (root / name).write_bytes(content)
    return root


@pytest.fixture
def values():
    sizes = random.Random(0)
    return {
        f"params/block_{i // 100}/leaf_{i % 100}/c.0": os.urandom(sizes.randrange(60))
        for i in range(3000)
    }


def test_index_contains_all_keys_of_deep_tree(tmp_path, values):
    root = make_database(tmp_path, values)
    index = ocdbt.read_tree(root)
    assert index.keys() == {key.encode() for key in values}
    inline = {key.encode(): v for key, v in values.items() if len(v) <= 20}
    assert {k: v for k, v in index.items() if isinstance(v, bytes)} == inline


def test_empty_database_has_no_values(tmp_path):
    root = make_database(tmp_path, {"a": b"1"})
    store = old_stores.open_database(root)
    store.delete_range(ts.KvStore.KeyRange()).result()
    assert ocdbt.read_tree(root) == {}


@pytest.mark.parametrize("part", [1, 7, 400])
def test_reads_requested_values_in_few_calls(tmp_path, values, part):
    database = Database(make_database(tmp_path, values))
    wanted = list(values)[::part]
    random.Random(part).shuffle(wanted)
    for key in wanted:
        database.request(key, 60)
    reading = database.reading()
    files = len([*(tmp_path / "d").iterdir()])  # TensorStore may make several
    assert 1 <= len(reading.tasks) <= files < len(values) / 100
    read_files.run([reading])
    assert {key: database.value(key) for key in wanted} == {
        key: values[key] for key in wanted
    }
    assert not database.reading().tasks


def test_reads_values_file_by_file(tmp_path):
    values = [{f"{part}{n}": bytes([n]) * 200 for n in range(3)} for part in "ab"]
    for some in values:
        make_database(tmp_path / "d", some)
    database = Database(tmp_path / "d")
    for n in range(3):
        for part in "ba":
            database.request(f"{part}{n}", 200)
    files = {place.file for place in database._requested.values()}
    reading = database.reading()
    assert len(reading.tasks) == len(files) >= 2
    read_files.run([reading])
    for key, value in (values[0] | values[1]).items():
        assert database.value(key) == value


def test_splits_large_reads_into_several_calls(tmp_path):
    values = {f"{i:03}": os.urandom(2**16) for i in range(100)}
    database = Database(make_one_file(tmp_path, values))
    for key in values:
        database.request(key, 2**16)
    reading = database.reading()
    assert len(reading.tasks) == 7
    read_files.run([reading])
    assert {key: database.value(key) for key in values} == values


@pytest.mark.parametrize(("key", "tasks"), [("003", 1), ("004", 2)])
def test_reads_across_gaps_of_64_kib(tmp_path, key, tasks):
    values = {f"{i:03}": os.urandom(2**15) for i in range(10)}
    database = Database(make_one_file(tmp_path, values))
    for wanted in ("000", key):
        database.request(wanted, 2**15)
    assert len(database.reading().tasks) == tasks


@pytest.mark.parametrize(("count", "tasks"), [(16, 1), (17, 2)])
def test_reads_one_mib_per_call(tmp_path, count, tasks):
    values = {f"{i:03}": os.urandom(2**16) for i in range(20)}
    database = Database(make_one_file(tmp_path, values))
    for key in list(values)[:count]:
        database.request(key, 2**16)
    assert len(database.reading().tasks) == tasks


def test_memory_error_fails_each_value(tmp_path, monkeypatch):
    values = {"a": bytes(50), "b": bytes(50)}
    database = Database(make_database(tmp_path, values))

    def fail(*args, **options):
        raise MemoryError

    seams.replace(monkeypatch, "disk.read_range", fail)
    for key in values:
        database.request(key, 50)
    read_files.run([database.reading()])
    for key in values:
        with pytest.raises(MemoryError):
            database.value(key)


def test_rejects_missing_and_oversized_values(tmp_path):
    database = Database(make_database(tmp_path, {"a": bytes(50)}))
    with pytest.raises(ValueError, match=r"^b is missing"):
        database.request("b", 50)
    with pytest.raises(ValueError, match=r"^a has 50 bytes instead of 49"):
        database.request("a", 49)


@pytest.mark.parametrize("place", ["nothing", "a FIFO"])
def test_fails_each_value_of_lost_file(tmp_path, values, place):
    root = make_database(tmp_path, values)
    database = Database(root)
    large = [key for key, value in values.items() if len(value) > 20][:3]
    for file in (root / "d").iterdir():
        file.unlink()
        if place == "a FIFO":
            os.mkfifo(file)
    for key in large:
        database.request(key, 60)
    read_files.run([database.reading()])
    error, told = (ValueError, "regular") if place == "a FIFO" else (OSError, "No such")
    for key in large:
        with pytest.raises(error, match=told) as info:
            database.value(key)
        assert isinstance(info.value, FileNotFoundError) == (place == "nothing")


# ---- databases of a restore -------------------------------------------------------


def digests_of(root):
    return {
        f"{file.relative_to(root)}": LOCAL.digest_file(file, max_bytes=2**30)
        for file in root.rglob("*")
        if file.is_file()
    }


def test_opens_each_database_once(tmp_path):
    databases = Databases()
    roots = [make_database(tmp_path / name, {name: bytes(50)}) for name in "ab"]
    first, other = (databases.open(root, root) for root in roots)
    assert databases.open(roots[0], roots[0]) is first
    first.request("a", 50)
    other.request("b", 50)
    read_files.run(databases.readings())
    assert (first.value("a"), other.value("b")) == (bytes(50), bytes(50))


def test_missing_database_fails_each_array(tmp_path):
    databases = Databases()
    found = []
    for _ in range(2):
        with pytest.raises((ValueError, OSError)) as info:
            databases.open(tmp_path / "a", tmp_path)
        found.append(info.value)
        make_database(tmp_path / "a", {"a": b"1"})  # not looked for again
    assert found[0] is found[1]
    good = make_database(tmp_path / "b", {"b": b"1"})
    assert databases.open(good, tmp_path)


def test_failed_check_keeps_database_rejected(tmp_path):
    root = make_database(tmp_path / "a", {"a": bytes(50)})
    digests = digests_of(root)
    check = functools.partial(check_digests, root, digests, max_bytes=2**30)
    databases = Databases()
    assert databases.open(root, tmp_path, check=check)
    digests.update(dict.fromkeys(digests, "sha256:0"))
    databases = Databases()
    found = []
    for again in (check, None):
        with pytest.raises(ValueError, match="has changed") as info:
            databases.open(root, tmp_path, check=again)
        found.append(info.value)
    assert found[0] is found[1]


def test_rejects_database_outside_checkpoint(tmp_path):
    make_database(tmp_path / "other", {"a": b"1"})
    (tmp_path / "c").mkdir()
    (tmp_path / "c/state").symlink_to(tmp_path / "other")
    databases = Databases()
    with pytest.raises(ValueError, match="outside"):
        databases.open(tmp_path / "c/state", tmp_path / "c")


# ---- damage and hostile content ---------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [4, 300])
@pytest.mark.parametrize("together", [True, False])
def test_changed_bytes_never_yield_wrong_values(tmp_path, size, together):
    """Without digests of the files: checksums of values and nodes find the change."""
    arrays = {f"a{i}": np.arange(i, i + size, dtype="<f4") for i in range(5)}
    encoding = Encoding("none", True)
    write(
        tmp_path,
        [host(name, array, (size,)) for name, array in arrays.items()],
        encoding=encoding,
        ocdbt=True,
    )

    def read_array(name):
        info = info_of(arrays[name], (size,))
        raw = RawArray(tmp_path, name, True, encoding, metadata.form_of(info))
        region = ((0, size),)
        return read(raw, info, [region], together=together)[region]

    for name, array in arrays.items():
        assert read_array(name).tobytes() == array.tobytes()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    whole = {file: file.read_bytes() for file in files}
    places = [(file, at) for file in files for at in range(len(whole[file]))]
    caught = 0
    for file, at in places[:: max(1, len(places) // 400)]:
        damaged = bytearray(whole[file])
        damaged[at] ^= 1 << at % 8
        file.write_bytes(damaged)
        for name, array in arrays.items():
            try:
                assert read_array(name).tobytes() == array.tobytes()
            except (ValueError, OSError):
                caught += 1
        file.write_bytes(whole[file])
    assert caught > 100


@pytest.mark.parametrize("verify", [True, False])
def test_reads_large_and_small_values_without_digests(tmp_path, verify):
    """Large values are blocks of their files; the metadata of all is in the tree."""
    random_numbers = np.random.default_rng(0)
    state = {
        f"a{i}": random_numbers.standard_normal(size, np.float32)
        for i, size in enumerate([2**19] * 4 + [10, 100, 10_000, 0] * 10)
    }
    path = tmp_path / "c"
    flaxckpt.save(path, state, layout=flaxckpt.ArrayLayout())
    found = flaxckpt.load(path, verify=verify)
    assert {k: v.tobytes() for k, v in found.items()} == {
        k: v.tobytes() for k, v in state.items()
    }


# ---- bad indexes --------------------------------------------------------------------


def write_index(root, nodes, manifest):
    (root / "d").mkdir()
    (root / "d/tree").write_bytes(nodes)
    (root / "manifest.ocdbt").write_bytes(manifest)


def test_rejects_keys_out_of_order_across_nodes(tmp_path):
    values = {key: bytes(60) for key in (b"a1", b"a2", b"b1", b"b2")}
    tree = btree.encode(values, "d/tree", node_bytes=100)
    first = len(btree.encode({k: values[k] for k in (b"a1", b"a2")}, "d/tree").nodes)
    nodes = tree.nodes
    swapped = nodes[first : 2 * first] + nodes[:first] + nodes[2 * first :]
    write_index(tmp_path, swapped, tree.manifest)
    with pytest.raises(ValueError, match="not in ascending order over all nodes"):
        ocdbt.read_tree(tmp_path)


@pytest.mark.parametrize("place", [(2**63, 1), (2**62, 2**62), (2**64 - 9, 8)])
def test_rejects_places_beyond_end_of_file(tmp_path, place):
    tree = btree.encode({b"w/c": btree.Place("d/0.0/w", *place)}, "d/tree")
    write_index(tmp_path, tree.nodes, tree.manifest)
    with pytest.raises(ValueError, match="behind the end of any file"):
        ocdbt.read_tree(tmp_path)


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("verify", [True, False])
def test_rejects_wrong_file_size_even_without_checksums(tmp_path, size, verify):
    state = {"small": np.ones(3), "large": np.ones(2**18)}
    layout = flaxckpt.ArrayLayout(checksum=False)
    flaxckpt.save(tmp_path / "c", state, layout=layout)
    file = {"small": "0.small.0", "large": "0.0/large"}[size]
    with (tmp_path / "c/state/d" / file).open("ab") as opened:
        opened.write(b"1234")
    name = file.rpartition("/")[2]
    with pytest.raises(flaxckpt.errors.DamagedCheckpointError) as info:
        flaxckpt.load(tmp_path / "c", state, verify=verify)
    assert f"{size}: {name} has {state[size].nbytes + 4} bytes instead of" in str(
        info.value
    )


# ---- what is written ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "in_store", "mib"),
    [
        (0, False, (1, 64, 1)),
        (2**30, False, (1, 64, 1)),
        (2**34, False, (16, 64, 16)),
        (2**37, False, (128, 128, 128)),
        (2**40, False, (1024, 256, 256)),
        (2**40, True, (1024, 64, 64)),
    ],
)
def test_large_states_use_larger_files(total, in_store, mib):
    sizes = choose_sizes(total, in_store=in_store)
    assert sizes == tuple(size * 2**20 for size in mib)


def test_records_files_in_name_order():
    """Not in the order in which threads have written them."""
    values = {b"a": btree.Place("d/0.0/b", 0, 1), b"b": btree.Place("d/0.0/a", 0, 1)}
    assert list(make_index(values).sizes) == ["d/0.0/a", "d/0.0/b"]


@pytest.mark.parametrize("codec", ["compact", "zstd"])
def test_reads_index_once_for_compressed_arrays(tmp_path, codec, monkeypatch):
    state = {f"w{n}": np.full(2**11, n, np.float32) for n in range(30)}
    flaxckpt.save(tmp_path / "c", state, layout=flaxckpt.ArrayLayout(codec=codec))
    reads = []
    read_tree = ocdbt._Tree.read
    seams.replace(
        monkeypatch,
        "ocdbt.read_tree",
        lambda *args: reads.append(args) or read_tree(*args),
    )
    found = flaxckpt.load(tmp_path / "c", state)
    assert all((found[name] == state[name]).all() for name in state)
    assert len(reads) == 1
