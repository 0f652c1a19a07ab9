"""What a conversion refuses, and what it leaves alone."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors

import flaxckpt
from flaxckpt import errors, transforms
from tests import GOLDEN
from tests.convert.reads import stopping, trace_sizes
from tests.helpers import old_stores, seams, strategies


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    flaxckpt.save(path, {"a": jnp.arange(40.0), "b": jnp.ones(30), "n": 3})
    return path


@pytest.fixture
def index(tmp_path, source):
    flaxckpt.convert(
        source, tmp_path / "shards", format="safetensors", max_shard_bytes=100
    )
    return tmp_path / "shards" / "model.safetensors.index.json"


# ---- what is replaced -------------------------------------------------------------


def project(path):
    path.mkdir()
    safetensors.save_file({"w": np.ones(2)}, path / "model.safetensors")
    (path / "thesis.tex").write_text("words")


def run(path):
    path.mkdir()
    safetensors.save_file({"w": np.ones(2)}, path / "model.safetensors")
    flaxckpt.convert(
        path / "model.safetensors", path / "checkpoint_1", format="msgpack"
    )


def own(path):
    flaxckpt.save(path, {"w": jnp.ones(2)})
    (path / "notes").mkdir()


def shards(path):
    made = path.parent / "made"
    flaxckpt.save(made, {"a": jnp.ones(40), "b": jnp.ones(30)})
    flaxckpt.convert(made, path, format="safetensors", max_shard_bytes=100)
    (path / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (project, "thesis.tex"),
        (run, "checkpoint_1"),
        (own, "notes"),
        (shards, "config.json"),
    ],
)
@pytest.mark.parametrize("format_name", ["orbax", "safetensors", "msgpack"])
def test_overwrite_keeps_directories_with_foreign_files(
    source, tmp_path, make, name, format_name
):
    make(tmp_path / "d")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(errors.CheckpointExistsError, match=name):
        flaxckpt.convert(source, tmp_path / "d", format=format_name, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["orbax-0.12.8", "t5x-3", "safetensors", "flaxckpt-1"])
def test_overwrite_replaces_golden_checkpoints(source, tmp_path, name):
    found = [p for p in (GOLDEN / name).rglob("*") if p.is_dir()]
    wholes = [p for p in found if flaxckpt_of(p)]
    assert wholes
    for i, whole in enumerate(wholes):
        shutil.copytree(whole, tmp_path / str(i))
        flaxckpt.convert(source, tmp_path / str(i), overwrite=True)
        assert flaxckpt.load(tmp_path / str(i))["n"] == 3


def flaxckpt_of(path):
    names = {p.name for p in path.iterdir()}
    is_shards = any(name.endswith(".index.json") for name in names)
    is_t5x = "checkpoint" in names and any(
        (path / n / ".zarray").is_file() for n in names
    )
    return (
        is_shards or is_t5x or bool(names & {"flaxckpt.json", "_CHECKPOINT_METADATA"})
    )


def test_overwrite_keeps_non_checkpoint_files(source, tmp_path):
    for name in ("thesis.tex", "x.msgpack"):
        (tmp_path / name).write_text("words")
        with pytest.raises(errors.CheckpointExistsError, match="is not a checkpoint"):
            flaxckpt.convert(source, tmp_path / name, format="msgpack", overwrite=True)
        assert (tmp_path / name).read_text() == "words"


@pytest.mark.parametrize("format_name", ["orbax", "safetensors", "msgpack"])
def test_overwrite_keeps_files_added_during_conversion(source, tmp_path, format_name):
    target = tmp_path / "d"
    flaxckpt.save(target, {"w": jnp.ones(2)})

    def add(done, total):
        (target / "thesis.tex").write_text("words")

    with pytest.raises(errors.CheckpointExistsError, match=r"thesis\.tex"):
        flaxckpt.convert(
            source, target, format=format_name, overwrite=True, progress=add
        )
    assert (target / "thesis.tex").read_text() == "words"
    assert flaxckpt.load(target)["w"].shape == (2,)


# ---- sources ----------------------------------------------------------------------


def test_rejects_target_within_source(index, tmp_path):
    wanted = {p.name: p.read_bytes() for p in index.parent.iterdir()}
    (tmp_path / "link").symlink_to(index.parent)
    shard = "model-00001-of-00003.safetensors"
    assert shard in wanted
    for target in (
        index.parent / shard,
        tmp_path / "link" / shard,
        tmp_path / "link" / index.name,
    ):
        with pytest.raises(errors.OptionError, match=r"another path|beside it"):
            flaxckpt.convert(index, target, format="safetensors", overwrite=True)
    for source, target in (
        (tmp_path / "link", index.parent),
        (index.parent, tmp_path / "link" / "inner"),
        (index, index.parent),
    ):
        with pytest.raises(errors.OptionError, match=r"another path|beside it"):
            flaxckpt.convert(source, target, format="safetensors", overwrite=True)
    assert {p.name: p.read_bytes() for p in index.parent.iterdir()} == wanted


def test_rejects_merged_source_as_target(source, tmp_path):
    other = tmp_path / "other"
    flaxckpt.save(other, {"c": jnp.ones(3)})
    merge = [transforms.merge(other)]
    with pytest.raises(errors.OptionError, match="beside it"):
        flaxckpt.convert(source, other, transforms=merge, overwrite=True)


def stopped(source, target, **options):
    with stopping(0) as stop:
        flaxckpt.convert(
            source, target, progress=stop, max_concurrent_bytes=100, **options
        )
    temporary = target.with_name(f"{target.name}.flaxckpt-convert-tmp")
    assert (temporary / "done.txt").read_text()


def negate(file):
    found = safetensors.load_file(file)
    safetensors.save_file(
        {name: np.asarray(-array) for name, array in found.items()}, file
    )


def test_changed_shards_start_over(index, tmp_path):
    target = tmp_path / "m.safetensors"
    stopped(index, target, format="safetensors")
    content = {}
    for shard in sorted(index.parent.glob("*.safetensors")):
        negate(shard)
        content |= safetensors.load_file(shard)
    flaxckpt.convert(index, target, format="safetensors", max_concurrent_bytes=100)
    for name, array in safetensors.load_file(target).items():
        np.testing.assert_array_equal(array, content[name])


def test_rejects_source_changed_during_conversion(index, tmp_path):
    target = tmp_path / "m.safetensors"
    shard = sorted(index.parent.glob("*.safetensors"))[0]

    def change(done, total):
        os.utime(shard, ns=(done, done))

    for source in (index, index.parent):
        os.utime(shard)
        with pytest.raises(errors.DamagedCheckpointError, match=shard.name):
            flaxckpt.convert(source, target, format="safetensors", progress=change)
        assert not target.exists()


@pytest.mark.parametrize("store", ["database", "directories"])
def test_detects_chunks_changed_during_conversion(source, tmp_path, store):
    chunk = source / "state/d/0.small.0"
    if store == "directories":
        old_stores.make_directories(source)
        chunk = source / "state/a/c.0"

    def change(done, total):
        os.utime(chunk, ns=(done, done))

    with pytest.raises(errors.DamagedCheckpointError, match="changed"):
        flaxckpt.convert(source, tmp_path / "c", progress=change)
    assert not (tmp_path / "c").exists()


# ---- errors -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ValueError, OSError, KeyError, MemoryError])
def test_error_of_progress_propagates(source, tmp_path, kind):
    raised = kind("mine")

    def fail(done, total):
        raise raised

    with pytest.raises(kind) as caught:
        flaxckpt.convert(source, tmp_path / "c", progress=fail)
    assert caught.value is raised
    flaxckpt.convert(source, tmp_path / "c")


def test_error_omits_finished_work_if_there_is_none(source, tmp_path, monkeypatch):
    def fail(directory, work, **options):
        raise OSError("no space left")

    seams.replace(monkeypatch, "convert.journal", fail)
    with pytest.raises(errors.SaveFailedError, match="no space left") as caught:
        flaxckpt.convert(source, tmp_path / "c")
    assert "What is done" not in str(caught.value)


def test_overwrite_keeps_files_not_named_in_index(source, tmp_path):
    (tmp_path / "d").mkdir()
    text = json.dumps({"weight_map": {"a": "../source"}})
    (tmp_path / "d" / "model.safetensors.index.json").write_text(text)
    (tmp_path / "d" / "a.safetensors").write_bytes(b"")
    with pytest.raises(errors.CheckpointExistsError, match=r"a\.safetensors"):
        flaxckpt.convert(source, tmp_path / "d", overwrite=True)


# ---- leaves -----------------------------------------------------------------------

FORMATS = ("orbax", "safetensors", "msgpack")


def made_of_nothing(state):
    return {
        "a": state["a"],
        "zeros": jnp.zeros((3, 4), jnp.bfloat16),
        "more": {"ones": jnp.ones(5) * 2, "three": 3},
    }


@pytest.mark.parametrize("limit", [2**30, 10])
@pytest.mark.parametrize("format_name", FORMATS)
def test_writes_leaves_created_by_function(source, tmp_path, format_name, limit):
    change = [transforms.from_function(made_of_nothing)]
    flaxckpt.convert(
        source,
        tmp_path / "d",
        format=format_name,
        transforms=change,
        max_concurrent_bytes=limit,
    )
    found = flaxckpt.load(tmp_path / "d")
    np.testing.assert_array_equal(found["a"], np.arange(40.0))
    assert found["zeros"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["zeros"], np.zeros((3, 4)))
    np.testing.assert_array_equal(found["more"]["ones"], np.full(5, 2.0))
    assert found["more"]["three"] == 3


@pytest.mark.sampled(5)
@pytest.mark.parametrize("chunk_bytes", [2**26, 1000])
@pytest.mark.parametrize("format_name", FORMATS)
def test_splits_long_rows(tmp_path, monkeypatch, format_name, chunk_bytes):
    wanted = {
        "long": np.arange(5000, dtype=np.float32).reshape(2, 2500),
        "deep": np.arange(6000, dtype=np.int16).reshape(1, 3, 2, 1000, 1),
        "keys": jax.random.split(jax.random.key(0), 400),
    }
    layout = flaxckpt.ArrayLayout(chunk_bytes=chunk_bytes)
    flaxckpt.save(tmp_path / "a", wanted, layout=layout)
    sizes = trace_sizes(monkeypatch)
    flaxckpt.convert(
        tmp_path / "a",
        tmp_path / "b",
        format=format_name,
        max_concurrent_bytes=3000,
        layout=flaxckpt.ArrayLayout(chunk_bytes=900),
    )
    assert max(sizes) <= 1500
    found = flaxckpt.load(tmp_path / "b")
    for name in ("long", "deep"):
        np.testing.assert_array_equal(found[name], wanted[name])
    keys = found["keys"]
    if format_name != "msgpack":
        keys = jax.random.key_data(keys)
    np.testing.assert_array_equal(keys, jax.random.key_data(wanted["keys"]))


# ---- what would not come back -----------------------------------------------------


def refused(tmp_path, tree):
    flaxckpt.save(tmp_path / "a", tree, overwrite=True)
    with pytest.raises((errors.LeafNameError, errors.UnsupportedLeafError)) as caught:
        flaxckpt.convert(tmp_path / "a", tmp_path / "b", format="msgpack")
    assert not (tmp_path / "b").exists()
    assert not list(tmp_path.glob("*tmp*"))
    error = caught.value
    return set(error.names if isinstance(error, errors.LeafNameError) else error.leaves)


ARRAYS = {"x": np.ones(2), "y": {}}


@pytest.mark.parametrize(
    ("tree", "wanted"),
    [
        (np.ones(3), {""}),
        ({}, {""}),
        ([], {""}),
        ({"k" * 5000: 1, "ok": 1}, {"k" * 5000}),
        ({"": ARRAYS, "ok": 1}, {"/x", "/y"}),
        (
            {"version": 2, "optimizer": ARRAYS},
            {"version", "optimizer/x", "optimizer/y"},
        ),
        ({"optimizer": 1.5, "version": np.ones(2)}, {"version", "optimizer"}),
        (
            {"version": 2, "optimizer": ARRAYS, "rest": 3},
            {"version", "optimizer/x", "optimizer/y", "rest"},
        ),
        (
            {"o": [{"name": "adam", "fields": {"0": "mu"}, "values": {"0": 1}}]},
            {"o/0/name", "o/0/fields/0", "o/0/values/0"},
        ),
        (
            {"o": {"name": "adam", "fields": {}, "values": {}}},
            {"o/name", "o/fields", "o/values"},
        ),
        (
            {"a": {"__msgpack_chunked_array__": True, "z": 1}},
            {"a/__msgpack_chunked_array__", "a/z"},
        ),
        ({"s": "//GDAPlaceholder:x", "t": ["//GDAPlaceholder:"], "u": 1}, {"s", "t/0"}),
    ],
)
def test_rejects_leaves_without_msgpack_round_trip(tmp_path, tree, wanted):
    assert refused(tmp_path, tree) == wanted


@pytest.mark.parametrize(
    "tree",
    [
        {"name": "a", "fields": {"f": "x"}, "values": {"f": 1}, "more": 1},
        {"name": np.ones(2), "fields": {"x": 1}, "values": {"x": 2}},
        {"name": "a", "fields": 1, "values": {"x": 2}},
        {"a": {"version": 1, "optimizer": {"x": 2}}},
        {"version": 1, "rest": 2, "optimizer": 3},
        {"a": " //GDAPlaceholder:", "b": "", "c": None, "d": {}},
        {"é %.-": {"k" * 4000: np.ones((0, 3))}},
        {"a/b": 1, "a": {"b": 2}, "c/~/d": ARRAYS, "e": {"/": None}, "a%2Fb": 3},
        [{"a": 1}, "x", 1j],
    ],
)
def test_harmless_lookalikes_round_trip_through_msgpack(tmp_path, tree):
    flaxckpt.save(tmp_path / "a", tree)
    flaxckpt.convert(tmp_path / "a", tmp_path / "b", format="msgpack")
    strategies.assert_same(tree, flaxckpt.load(tmp_path / "b"))


@pytest.mark.parametrize("depth", [64, 65])
def test_rejects_too_deeply_nested_containers(tmp_path, depth):
    flaxckpt.save(tmp_path / "a", {"x": 1})
    options = {"transforms": [transforms.rename("x", "/".join("a" * depth))]}
    options["format"] = "msgpack"
    if depth > 64:
        with pytest.raises(errors.LeafNameError, match="nested"):
            flaxckpt.convert(tmp_path / "a", tmp_path / "b", **options)
        return
    flaxckpt.convert(tmp_path / "a", tmp_path / "b", **options)
    assert next(iter(flaxckpt.metadata(tmp_path / "b").leaves)) == "/".join("a" * 64)


def test_advice_for_numbers_works(tmp_path):
    tree = {
        "c": 1 + 2j,
        "n": np.complex128(0.1 - 1j),
        "f": ml_dtypes.float8_e3m4(1.5),
        "w": np.ones(1),
    }
    flaxckpt.save(tmp_path / "a", tree)
    with pytest.raises(errors.UnsupportedLeafError, match="use map_leaf") as caught:
        flaxckpt.convert(tmp_path / "a", tmp_path / "b", format="safetensors")
    assert caught.value.leaves.keys() == {"c", "n", "f"}
    changes = [
        transforms.map_leaf(path, eval(text.split("use map_leaf with ")[1]))
        for path, text in caught.value.leaves.items()
    ]
    flaxckpt.convert(
        tmp_path / "a", tmp_path / "b", format="safetensors", transforms=changes
    )
    found = flaxckpt.load(tmp_path / "b")
    np.testing.assert_array_equal(found["c"], [1.0, 2.0])
    np.testing.assert_array_equal(found["n"], [0.1, -1.0])
    assert found["f"] == 1.5


# ---- options ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"max_concurrent_bytes": "x"},
        {"max_concurrent_bytes": True},
        {"max_shard_bytes": 1.5},
        {"layout": {"codec": "zstd"}},
        {"layout": {}},
        {"format": ["orbax"]},
        {"format": ""},
        {"progress": "yes"},
    ],
)
def test_rejects_arguments_of_wrong_types(source, tmp_path, options):
    [name] = options
    with pytest.raises(errors.OptionError, match=name):
        flaxckpt.convert(source, tmp_path / "c", **options)
    assert not list(tmp_path.glob("c*"))


def test_path_determines_format(source, tmp_path):
    for name, wanted in (
        ("a.safetensors", "safetensors"),
        ("b.msgpack", "msgpack"),
        ("c", "flaxckpt"),
    ):
        flaxckpt.convert(source, tmp_path / name)
        assert flaxckpt.metadata(tmp_path / name).format == wanted
    for name, format_name in (
        ("d.safetensors", "orbax"),
        ("d.safetensors", "msgpack"),
        ("d.msgpack", "orbax"),
        ("d.msgpack", "safetensors"),
    ):
        with pytest.raises(errors.OptionError, match="ends in"):
            flaxckpt.convert(source, tmp_path / name, format=format_name)
    with pytest.raises(errors.OptionError, match="format must be"):
        flaxckpt.convert(source, tmp_path / "d.msgpack", format=["orbax"])
    assert not list(tmp_path.glob("d*"))
