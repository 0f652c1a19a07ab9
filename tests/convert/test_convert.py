"""Checkpoints of one format become such of another, exactly, and after a kill too."""

import json
import signal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen, serialization
from flax.core import FrozenDict
from flax.training import train_state
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding
from safetensors import numpy as safetensors

import flaxckpt
from flaxckpt import errors, transforms
from tests import GOLDEN
from tests.convert.reads import trace_reads, trace_sizes
from tests.golden import make_flaxckpt, make_safetensors
from tests.helpers import chunks, old_stores, programs, seams, strategies

ocp = pytest.importorskip("orbax.checkpoint")

TEMPORARY = ".flaxckpt-convert-tmp"
"""How the name of an unfinished conversion ends."""

from tests.helpers.orbax_readers import READERS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")

METADATA = {"note": "ü", "numbers": [1, 2.5, None]}
LAYOUTS = {
    "none": flaxckpt.ArrayLayout(),
    "small chunks": flaxckpt.ArrayLayout(chunk_bytes=64),
    "compact": flaxckpt.ArrayLayout(codec="compact"),
    "zstd": flaxckpt.ArrayLayout(codec="zstd"),
    "zarr 2": flaxckpt.ArrayLayout(zarr_version=2),
    "zarr 2 small chunks": flaxckpt.ArrayLayout(zarr_version=2, chunk_bytes=1024),
}


def train():
    params = {
        "dense": {
            "kernel": jnp.arange(3000.0).reshape(60, 50) / 7,
            "bias": jnp.linspace(0, 1, 50, dtype=jnp.bfloat16),
        }
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    made = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    return made.apply_gradients(grads=jax.tree.map(jnp.cos, params))


def state():
    """All kinds of leaves that safetensors holds."""
    return {
        "train": train(),
        "dropout": jax.random.key(5),
        "legacy key": jax.random.key_data(jax.random.key(6)),
        "step": 7,
        "lr": 0.1,
        "best": True,
        "numpy": [np.arange(3), np.float16(0.5), np.array(2**40)],
        "weak": jnp.asarray(3),
        "name": "run/1 ü\n",
        "none": None,
        "empty": ({}, [], (), optax.EmptyState()),
        "int keys": {3: jnp.zeros(2), 1: jnp.ones((0, 4))},
        "a%b": FrozenDict({"%": np.array([True, False])}),
    }


def test_converts_arrays_without_values(tmp_path):
    state = {"x": np.zeros((0, 4))}
    flaxckpt.save(tmp_path / "a", state)
    flaxckpt.convert(tmp_path / "a", tmp_path / "b")
    strategies.assert_same(state, flaxckpt.load(tmp_path / "b"))


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    flaxckpt.save(path, state(), metadata=METADATA)
    return path


def assert_equal(one, other):
    """Compares two checkpoints: values, types, and what else is known."""
    found = flaxckpt.load(other)
    strategies.assert_same_state(flaxckpt.load(one), found)
    assert jax.tree.structure(found) == jax.tree.structure(flaxckpt.load(one))
    ours, theirs = flaxckpt.metadata(one), flaxckpt.metadata(other)
    assert ours.custom == theirs.custom
    assert list(ours.leaves) == list(theirs.leaves)
    for path, info in ours.leaves.items():
        assert theirs.leaves[path].role == info.role
        assert theirs.leaves[path].spec == info.spec


# ---- safetensors ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["m.safetensors", "directory"])
@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 2000])
def test_orbax_to_safetensors_and_back_is_exact(
    source, tmp_path, name, max_shard_bytes
):
    middle, back = tmp_path / name, tmp_path / "back"
    flaxckpt.convert(
        source, middle, format="safetensors", max_shard_bytes=max_shard_bytes
    )
    assert_equal(source, middle)
    flaxckpt.convert(middle, back)
    assert_equal(source, back)
    assert flaxckpt.metadata(back).format == "flaxckpt"


def test_safetensors_library_reads_converted_file(source, tmp_path):
    flaxckpt.convert(source, tmp_path / "m.safetensors", format="safetensors")
    found = safetensors.load_file(tmp_path / "m.safetensors")
    wanted = {
        ".".join(str(k.name) for k in leaf.keys): leaf
        for leaf in flaxckpt.metadata(source).leaves.values()
        if leaf.dtype is not None
    }
    assert found.keys() == wanted.keys()
    params = state()["train"].params["dense"]
    kernel = found["train.params.dense.kernel"]
    np.testing.assert_array_equal(kernel, params["kernel"])
    bias = found["train.params.dense.bias"]
    assert bias.view(np.uint16).tobytes() == np.asarray(params["bias"]).tobytes()


def test_shards_follow_huggingface_layout(source, tmp_path):
    flaxckpt.convert(
        source, tmp_path / "m", format="safetensors", max_shard_bytes=20_000
    )
    index = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())
    names = sorted(p.name for p in (tmp_path / "m").glob("*.safetensors"))
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    assert len(names) > 2
    assert set(index["weight_map"].values()) == set(names)
    total = 0
    for name in names:
        found = safetensors.load_file(tmp_path / "m" / name)
        assert all(index["weight_map"][key] == name for key in found)
        total += sum(array.nbytes for array in found.values())
        with safetensors.safe_open(tmp_path / "m" / name, "np") as file:
            assert file.metadata()["format"] == "flax"
    assert index["metadata"]["total_size"] == total


def test_small_directory_has_one_file_and_no_index(source, tmp_path):
    flaxckpt.convert(source, tmp_path / "m", format="safetensors")
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["model.safetensors"]


def test_bytes_are_deterministic_and_aligned(source, tmp_path):
    for name, limit in (("one", 2**30), ("two", 4096)):
        flaxckpt.convert(
            source,
            tmp_path / f"{name}.safetensors",
            format="safetensors",
            max_concurrent_bytes=limit,
        )
    content = (tmp_path / "one.safetensors").read_bytes()
    assert content == (tmp_path / "two.safetensors").read_bytes()
    assert (8 + int.from_bytes(content[:8], "little")) % 64 == 0
    table = flaxckpt.metadata(tmp_path / "one.safetensors").leaves
    assert {info.kind for info in table.values()} == {
        *("array", "scalar", "prng_key", "string", "empty")
    }


def test_safetensors_do_not_depend_on_source_layout(tmp_path):
    contents = set()
    for name, layout in LAYOUTS.items():
        flaxckpt.save(tmp_path / name, state(), layout=layout)
        for store in ("database", "directories"):
            if store == "directories":
                old_stores.make_directories(tmp_path / name)
            result = tmp_path / f"{name} {store}.safetensors"
            flaxckpt.convert(tmp_path / name, result, format="safetensors")
            contents.add(result.read_bytes())
    assert len(contents) == 1


def test_real_model_converts_to_orbax_and_back(tmp_path):
    silero = GOLDEN / "safetensors" / "silero_vad_16k.safetensors"
    flaxckpt.convert(silero, tmp_path / "orbax")
    wanted = safetensors.load_file(silero)
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "orbax" / "state")
    flat, _ = jax.tree_util.tree_flatten_with_path(found)
    assert {".".join(key.key for key in path) for path, _ in flat} == wanted.keys()
    flaxckpt.convert(
        tmp_path / "orbax", tmp_path / "b.safetensors", format="safetensors"
    )
    again = safetensors.load_file(tmp_path / "b.safetensors")
    for name, array in wanted.items():
        strategies.assert_same_bits(array, again[name], name)


def test_reads_own_golden_files():
    runs = sorted((GOLDEN / "safetensors").glob("ours-*"))
    assert runs
    for run in runs:
        found, wanted = flaxckpt.load(run), make_safetensors.state()
        for name in wanted:
            strategies.assert_same_state(wanted[name], found[name])
        assert flaxckpt.metadata(run).custom == make_flaxckpt.METADATA


def test_error_names_all_dtypes_missing_in_safetensors(tmp_path):
    tree = {
        "a": jnp.zeros(2, jnp.int4),
        "b": np.zeros(2, np.complex128),
        "c": np.zeros(2, ml_dtypes.float8_e3m4),
        "d": jnp.zeros(2),
    }
    flaxckpt.save(tmp_path / "c", tree)
    with pytest.raises(errors.UnsupportedLeafError, match="cast it to int8") as caught:
        flaxckpt.convert(tmp_path / "c", tmp_path / "m", format="safetensors")
    assert caught.value.leaves.keys() == {"a", "b", "c"}
    casts = [
        transforms.cast("a", "int8", lossy=True),
        transforms.cast("b", "complex64", lossy=True),
        transforms.cast("c", "float16"),
    ]
    flaxckpt.convert(
        tmp_path / "c", tmp_path / "m", format="safetensors", transforms=casts
    )
    assert flaxckpt.load(tmp_path / "m")["c"].dtype == np.float16


def test_error_names_all_colliding_names(tmp_path):
    tree = {"a": {"b": np.zeros(1)}, "a.b": np.ones(1), "__metadata__": np.ones(1)}
    source = tmp_path / "source"
    source.write_bytes(serialization.msgpack_serialize(tree))
    for format_name, names in (
        ("safetensors", {"a.b", "__metadata__"}),
        ("orbax", {"a.b"}),
    ):
        with pytest.raises(errors.LeafNameError) as caught:
            flaxckpt.convert(source, tmp_path / "m", format=format_name)
        assert caught.value.names.keys() == names
    flaxckpt.convert(source, tmp_path / "m.msgpack", format="msgpack")
    assert (tmp_path / "m.msgpack").read_bytes() == source.read_bytes()


# ---- Orbax ------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize("store", ["database", "directories"])
@pytest.mark.parametrize("limit", [2**30, 2000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_holds_same_values(source, tmp_path, layout, limit, store):
    flaxckpt.convert(
        source, tmp_path / "c", layout=LAYOUTS[layout], max_concurrent_bytes=limit
    )
    if store == "directories":
        old_stores.make_directories(tmp_path / "c")
    assert_equal(source, tmp_path / "c")
    flaxckpt.convert(tmp_path / "c", tmp_path / "d", max_concurrent_bytes=limit)
    assert_equal(source, tmp_path / "d")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "reader", ["v0_pytree", "v0_standard_target", "v1_load_target"]
)
def test_stock_orbax_reads_converted_checkpoint(tmp_path, layout, reader):
    wanted = {"train": train(), "dropout": jax.random.key(5), "step": 7, "none": None}
    flaxckpt.save(tmp_path / "source", wanted)
    flaxckpt.convert(
        tmp_path / "source", tmp_path / "m.safetensors", format="safetensors"
    )
    flaxckpt.convert(
        tmp_path / "m.safetensors",
        tmp_path / "5",
        layout=LAYOUTS[layout],
        max_concurrent_bytes=4000,
    )
    sharding = SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            if isinstance(x, jax.Array)
            else x
        ),
        wanted,
    )
    found = READERS[reader](tmp_path, 5, abstract)
    if reader.endswith("_target"):
        strategies.assert_same_state(jax.tree.map(strong, wanted), found)
    kernel = jax.tree.leaves(jax.tree.map(key_data, found))
    assert any(
        np.array_equal(leaf, wanted["train"].params["dense"]["kernel"])
        for leaf in kernel
    )


def strong(leaf):
    is_weak = getattr(leaf, "weak_type", False)
    return jnp.asarray(np.asarray(leaf)) if is_weak else leaf


def key_data(leaf):
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )
    return jax.random.key_data(leaf) if is_key else leaf


def test_json_items_come_along(tmp_path):
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
        items = {
            "state": ocp.args.StandardSave({"w": np.ones(3)}),
            "extra": ocp.args.JsonSave({"a": 1}),
        }
        writer.save(tmp_path / "source", ocp.args.Composite(**items))
    flaxckpt.convert(tmp_path / "source", tmp_path / "c")
    assert flaxckpt.metadata(tmp_path / "c").json == {"extra": {"a": 1}}


def test_convert_keeps_metadata_metrics_and_dataset(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        batches = flaxckpt.datasets.StepIndexed(lambda i: i)
        next(batches)
        beside = {"metrics": {"loss": 0.5}, "dataset": batches, "metadata": METADATA}
        ckpt.save(3, {"w": jnp.ones(2)}, **beside)
    flaxckpt.convert(tmp_path / "run", tmp_path / "new" / "3")
    assert flaxckpt.metadata(tmp_path / "new").custom == METADATA
    with flaxckpt.Checkpointer(tmp_path / "new", read_only=True) as ckpt:
        batches = flaxckpt.datasets.StepIndexed(lambda i: i)
        ckpt.restore(dataset=batches)
        assert next(batches) == 1
        assert ckpt.metrics(3) == {"loss": 0.5}


def layers():
    return {
        f"layer_{i}": {"w": jnp.full((3, 4), i, jnp.float32), "b": jnp.arange(4.0)}
        for i in range(3)
    }


@pytest.mark.parametrize("limit", [2**30, 100])
@pytest.mark.parametrize("format_name", ["orbax", "safetensors"])
def test_transforms_change_names_shapes_and_types(tmp_path, format_name, limit):
    flaxckpt.save(
        tmp_path / "c", {"params": layers(), "n": 3, "key": jax.random.key(1)}
    )
    changes = [
        transforms.stack(r"params/layer_(\d+)/(.*)", r"params/layers/\2", axis=0),
        transforms.map_leaf("params/layers/b", lambda x: x * 2),
        transforms.cast("params/.*", "bfloat16"),
        transforms.rename("n", "step"),
    ]
    flaxckpt.convert(
        tmp_path / "c",
        tmp_path / "d",
        format=format_name,
        transforms=changes,
        max_concurrent_bytes=limit,
    )
    found = flaxckpt.load(tmp_path / "d")
    wanted = {
        "params": {
            "layers": {
                "w": jnp.stack([layers()[f"layer_{i}"]["w"] for i in range(3)]),
                "b": jnp.stack([jnp.arange(4.0) * 2] * 3),
            }
        }
    }
    wanted = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wanted)
    wanted |= {"step": 3, "key": jax.random.key(1)}
    strategies.assert_same_state(wanted, found)
    assert len(flaxckpt.metadata(tmp_path / "d").transforms) == 4
    flaxckpt.convert(
        tmp_path / "d",
        tmp_path / "e",
        format=format_name,
        transforms=[
            transforms.unstack("params/layers/(.*)", r"params/layer_{i}/\1", axis=0)
        ],
        max_concurrent_bytes=limit,
    )
    again = flaxckpt.load(tmp_path / "e")["params"]
    assert again.keys() == layers().keys()
    for name, layer in layers().items():
        strategies.assert_same_bits(layer["w"].astype(jnp.bfloat16), again[name]["w"])


def test_drop_keeps_classes_of_remaining_leaves(source, tmp_path):
    """A leaf that is dropped takes the class of its own container with it only."""
    drop = [transforms.drop("dropout"), transforms.drop("best")]
    for format_name in ("orbax", "safetensors"):
        target = tmp_path / format_name
        flaxckpt.convert(source, target, format=format_name, transforms=drop)
        found, wanted = flaxckpt.load(target), flaxckpt.load(source)
        assert "dropout" not in found
        for name in ("train", "empty", "a%b", "int keys"):
            structure = jax.tree.structure(wanted[name])
            assert jax.tree.structure(found[name]) == structure
            strategies.assert_same_state(wanted[name], found[name])


def test_lists_with_holes_become_dicts_and_empty_containers_vanish(tmp_path):
    tree = {
        "l": [1, 2, 3],
        "t": (4, {"x": 5}),
        "g": {"a": {"b": 6}, "c": {}},
        "n": None,
    }
    flaxckpt.save(tmp_path / "c", tree)
    drop = [transforms.drop("l/1|t/1/x|g/a/b")]
    for format_name in ("orbax", "safetensors"):
        target = tmp_path / format_name
        flaxckpt.convert(tmp_path / "c", target, format=format_name, transforms=drop)
        found = flaxckpt.load(target)
        wanted = {"l": {"0": 1, "2": 3}, "t": {"0": 4}, "g": {"c": {}}, "n": None}
        assert found == wanted
    with ocp.PyTreeCheckpointer() as checkpointer:
        assert checkpointer.restore(tmp_path / "orbax" / "state") == wanted


def test_keeps_leaf_with_empty_key(tmp_path):
    flaxckpt.save(tmp_path / "c", {"": 1, "b": {"": 2, "c": 3}})
    drop = [transforms.drop("b/c")]
    flaxckpt.convert(tmp_path / "c", tmp_path / "d", transforms=drop)
    assert flaxckpt.load(tmp_path / "d") == {"": 1, "b": {"": 2}}


def test_keeps_list_order_after_renames(tmp_path):
    flaxckpt.save(tmp_path / "c", {"l": [10, 11, 12], "m": [20, 21]})
    swap = [
        transforms.rename("l/0", "l/9"),
        transforms.rename("l/1", "l/0"),
        transforms.rename("l/9", "l/1"),
        transforms.rename("m/0", "x"),
    ]
    flaxckpt.convert(tmp_path / "c", tmp_path / "d", transforms=swap)
    wanted = {"l": [11, 10, 12], "m": {"1": 21}, "x": 20}
    assert flaxckpt.load(tmp_path / "d") == wanted
    with ocp.PyTreeCheckpointer() as checkpointer:
        assert checkpointer.restore(tmp_path / "d" / "state") == wanted


def test_moved_empty_containers_keep_their_class(source, tmp_path):
    moved = [transforms.rename("train/(.*)", r"model/\1")]
    flaxckpt.convert(source, tmp_path / "c", transforms=moved)
    clip = flaxckpt.load(tmp_path / "c")["model"]["opt_state"][0]
    assert isinstance(clip, optax.EmptyState)


@pytest.mark.parametrize("name", ["c", "c.safetensors"])
def test_file_without_tensors_becomes_empty_dict(tmp_path, name):
    safetensors.save_file({}, tmp_path / "empty.safetensors")
    flaxckpt.convert(tmp_path / "empty.safetensors", tmp_path / name)
    assert flaxckpt.load(tmp_path / name) == {}
    assert flaxckpt.load(tmp_path / "empty.safetensors", {}) == {}


# ---- msgpack ----------------------------------------------------------------------


def flax_state():
    """All that Flax serializes itself: no typed keys."""
    params = {
        "boxed": linen.Partitioned(jnp.ones((2, 3)), names=("x", None)),
        "plain": jnp.arange(3, dtype=jnp.bfloat16),
    }
    tx = optax.adamw(1e-3)
    return {
        "train": train_state.TrainState.create(apply_fn=None, params=params, tx=tx),
        "big": jnp.arange(70_000, dtype=jnp.int32),
        "scalar": (1, -5, 2**40, 0.5, True, 1 + 2j, np.float32(2), jnp.float32(1)),
        "text": "ü" * 300,
        "empty": (None, {}, [], (), optax.EmptyState(), jnp.zeros((0, 2))),
        "sizes": [np.zeros(n, np.uint8) for n in (0, 1, 5, 12, 200, 300)],
        "int keys": {10: 1, 9: 2},
        "mlp/~/linear_0": {"w": jnp.ones(2)},
    }


@pytest.mark.sampled(5)
@pytest.mark.parametrize("max_bytes", [2**30, 1000, 10])
@pytest.mark.parametrize("limit", [2**30, 10_000])
def test_msgpack_bytes_equal_those_of_flax(tmp_path, monkeypatch, max_bytes, limit):
    wanted = flax_state()
    flaxckpt.save(tmp_path / "c", wanted)
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", max_bytes)
    seams.replace(monkeypatch, "msgpack.max_chunk_bytes", max_bytes)
    path = tmp_path / "state.msgpack"
    flaxckpt.convert(tmp_path / "c", path, format="msgpack", max_concurrent_bytes=limit)
    content = path.read_bytes()
    assert content == serialization.to_bytes(wanted)
    strategies.assert_same_state(
        jax.tree.map(np.asarray, wanted, is_leaf=lambda x: isinstance(x, str)),
        jax.tree.map(
            np.asarray,
            serialization.from_bytes(wanted, content),
            is_leaf=lambda x: isinstance(x, str),
        ),
    )


def test_converts_key_to_msgpack(tmp_path):
    key = jax.random.key(3)
    flaxckpt.save(tmp_path / "b", {"key": key})
    flaxckpt.convert(tmp_path / "b", tmp_path / "b.msgpack", format="msgpack")
    found = serialization.msgpack_restore((tmp_path / "b.msgpack").read_bytes())
    np.testing.assert_array_equal(found["key"], jax.random.key_data(key))


# ---- any tree ---------------------------------------------------------------------


def without_complex128(tree):
    flat, _ = jax.tree_util.tree_flatten(tree)
    return all(np.asarray(leaf).dtype != np.complex128 for leaf in flat)


@pytest.mark.slow
@settings(max_examples=30)
@given(strategies.trees.filter(without_complex128), st.sampled_from([2**30, 30]))
def test_any_tree_round_trips_through_all_formats(tmp_path_factory, tree, limit):
    root = tmp_path_factory.mktemp("any")
    try:
        flaxckpt.save(root / "a", tree)
    except errors.CheckpointError:
        return  # what cannot be saved cannot be converted
    wanted = flaxckpt.load(root / "a")
    options = {"max_concurrent_bytes": limit}
    try:
        flaxckpt.convert(root / "a", root / "b", format="safetensors", **options)
    except errors.LeafNameError:
        return
    flaxckpt.convert(root / "b", root / "c", **options)
    strategies.assert_same(wanted, flaxckpt.load(root / "c"))
    try:
        flaxckpt.convert(root / "c", root / "d", format="msgpack", **options)
    except (errors.LeafNameError, errors.UnsupportedLeafError):
        return  # of what Flax would not read as the same
    flaxckpt.load(root / "d")
    wanted_bytes = serialization.to_bytes(wanted) if is_flax(tree) else None
    if wanted_bytes is not None:
        assert (root / "d").read_bytes() == wanted_bytes


def is_flax(tree):
    try:
        serialization.to_bytes(tree)
    except (ValueError, TypeError, OverflowError):
        return False
    return True


# ---- interrupted ------------------------------------------------------------------

KILLED = """
import os, signal, sys
import flaxckpt
def progress(done, total):
    if done >= total * 0.5:
        os.kill(os.getpid(), signal.SIGKILL)
flaxckpt.convert({src!r}, {dst!r}, format={format!r}, max_concurrent_bytes=2**17,
    layout=flaxckpt.ArrayLayout(**{layout!r}), progress=progress)
"""


def big_source(tmp_path):
    arrays = {f"w{i}": jnp.arange(2**16, dtype=jnp.float32) + i for i in range(6)}
    flaxckpt.save(tmp_path / "source", arrays | {"n": 1, "s": "x"})
    return tmp_path / "source"


def kill_halfway(source, target, format_name, layout):
    code = KILLED.format(
        src=str(source), dst=str(target), format=format_name, layout=layout
    )
    programs.run("-c", code, code=-signal.SIGKILL)
    assert not target.exists()
    return target.with_name(target.name + TEMPORARY)


def files_with(done, root):
    """The files of an unfinished database that have these pieces and no others."""
    found = set()
    for batch in root.glob("d/*.batch"):
        data = json.loads(batch.read_text())
        if set(data["pieces"]) <= set(done):
            found |= {
                root / place[0]  # file, offset, size
                for _, place in data["written"]["values"]
                if not isinstance(place, str)
            }
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format_name", "name", "layout"),
    [
        ("safetensors", "m.safetensors", {}),
        ("msgpack", "m.msgpack", {}),
        ("orbax", "c", {}),
        ("orbax", "c", {"chunk_bytes": 2**14}),
        ("orbax", "c", {"zarr_version": 2}),
    ],
)
def test_killed_conversion_resumes_where_it_stopped(
    tmp_path, monkeypatch, format_name, name, layout
):
    source, target = big_source(tmp_path), tmp_path / "new" / name
    temporary = kill_halfway(source, target, format_name, layout)
    done = (temporary / "done.txt").read_text().splitlines()
    assert done
    files = {
        path: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in files_with(done, temporary / "out/state")
    }
    assert bool(files) == (format_name == "orbax")
    read = trace_reads(monkeypatch)
    flaxckpt.convert(
        source,
        target,
        format=format_name,
        max_concurrent_bytes=2**17,
        layout=flaxckpt.ArrayLayout(**layout),
    )
    assert not temporary.exists()
    assert set(read).isdisjoint(done)
    assert read
    for path, stamp in files.items():
        moved = target / path.relative_to(temporary / "out")
        assert (moved.stat().st_ino, moved.stat().st_mtime_ns) == stamp
    fresh = tmp_path / "fresh" / name
    flaxckpt.convert(
        source, fresh, format=format_name, layout=flaxckpt.ArrayLayout(**layout)
    )
    if format_name == "orbax":
        assert_equal(source, target)
        report = flaxckpt.verify(target)
        assert (report.problems, report.extra) == ({}, ())
    else:
        assert target.read_bytes() == fresh.read_bytes()


@pytest.mark.slow
def test_another_conversion_starts_over(tmp_path, monkeypatch):
    source, target = big_source(tmp_path), tmp_path / "m.safetensors"
    kill_halfway(source, target, "safetensors", {})
    cast = transforms.cast("w.*", "bfloat16")
    flaxckpt.convert(source, target, format="safetensors", transforms=[cast])
    assert flaxckpt.load(target)["w1"].dtype == jnp.bfloat16
    wanted = (np.arange(2**16, dtype=np.float32) + 1).astype(jnp.bfloat16)
    np.testing.assert_array_equal(flaxckpt.load(target)["w1"], wanted)


@pytest.mark.slow
def test_changed_source_starts_over(tmp_path):
    source, target = big_source(tmp_path), tmp_path / "m.safetensors"
    kill_halfway(source, target, "safetensors", {})
    changed = jax.tree.map(
        lambda x: -x if isinstance(x, jax.Array) else x, flaxckpt.load(source)
    )
    flaxckpt.save(source, changed, overwrite=True)
    flaxckpt.convert(source, target, format="safetensors")
    strategies.assert_same_state(changed, flaxckpt.load(target))


@pytest.mark.parametrize("fault", ["write", "finish"])
@pytest.mark.parametrize("format_name", ["orbax", "safetensors", "msgpack"])
def test_conversion_resumes_after_error(tmp_path, monkeypatch, format_name, fault):
    source, target = big_source(tmp_path), tmp_path / "new"
    temporary = target.with_name("new" + TEMPORARY)
    options = {"format": format_name, "max_concurrent_bytes": 2**17}
    seam = {"write": "convert.journal_add", "finish": "disk.sync_tree"}[fault]
    real = seams.current(seam)

    def fail(first, *rest):
        if first == temporary / "out" or (temporary / "done.txt").stat().st_size:
            raise OSError("no space left")
        return real(first, *rest)

    with monkeypatch.context() as patch:
        seams.replace(patch, seam, fail)
        with pytest.raises(errors.SaveFailedError, match="no space left"):
            flaxckpt.convert(source, target, **options)
    assert not target.exists()
    done = (temporary / "done.txt").read_text().splitlines()
    assert done
    read = trace_reads(monkeypatch)
    flaxckpt.convert(source, target, **options)
    assert set(read).isdisjoint(done)
    assert read or fault == "finish"
    assert not temporary.exists()
    flaxckpt.convert(source, tmp_path / "fresh", **options)
    strategies.assert_same_state(
        flaxckpt.load(tmp_path / "fresh"), flaxckpt.load(target)
    )
    if format_name != "msgpack":
        assert_equal(source, target)


@pytest.mark.parametrize("format_name", ["orbax", "safetensors", "msgpack"])
def test_moved_result_is_converted_again(tmp_path, monkeypatch, format_name):
    """As if it was killed after the last step, and the result then removed."""
    source, target = big_source(tmp_path), tmp_path / "x"
    with monkeypatch.context() as patch:
        seams.replace(patch, "convert.journal_remove", lambda journal: None)
        flaxckpt.convert(source, target, format=format_name)
    target.rename(tmp_path / "moved")
    flaxckpt.convert(source, target, format=format_name)
    if target.is_file():
        assert target.read_bytes() == (tmp_path / "moved").read_bytes()
    else:
        assert_equal(source, target)


def test_rejects_concurrent_conversions(source, tmp_path):
    target = tmp_path / "m.safetensors"

    def again(done, total):
        with pytest.raises(errors.CheckpointExistsError, match="another process uses"):
            flaxckpt.convert(source, target, format="safetensors")

    flaxckpt.convert(source, target, format="safetensors", progress=again)


# ---- the rest ---------------------------------------------------------------------


@pytest.mark.parametrize("store", ["database", "directories"])
def test_rejects_damaged_source(tmp_path, store):
    source = big_source(tmp_path)
    if store == "directories":
        old_stores.make_directories(source)
    chunks.flip(source / "state", "w3/c.0", at=100)
    for limit in (2**30, 2**17):
        with pytest.raises(errors.DamagedCheckpointError, match="w3"):
            flaxckpt.convert(
                source,
                tmp_path / "m.safetensors",
                format="safetensors",
                max_concurrent_bytes=limit,
            )
    assert not (tmp_path / "m.safetensors").exists()


def test_progress_reaches_end(source, tmp_path, capsys):
    seen = []
    flaxckpt.convert(
        source,
        tmp_path / "a",
        max_concurrent_bytes=5000,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0
    assert len(seen) > 5
    flaxckpt.convert(source, tmp_path / "b", progress=True)
    assert "100%" in capsys.readouterr().out


def test_pieces_stay_within_memory_limit(source, tmp_path, monkeypatch):
    sizes = trace_sizes(monkeypatch)
    path = tmp_path / "m.safetensors"
    flaxckpt.convert(source, path, format="safetensors", max_concurrent_bytes=4000)
    flaxckpt.convert(path, tmp_path / "m", format="msgpack", max_concurrent_bytes=4000)
    assert max(sizes) <= 2000
    assert len(sizes) > 10


def test_convert_replaces_targets_only_with_overwrite(source, tmp_path):
    for name, format_name in (
        ("c", "orbax"),
        ("m", "safetensors"),
        ("m.safetensors", "safetensors"),
    ):
        target = tmp_path / name
        flaxckpt.convert(source, target, format=format_name)
        with pytest.raises(errors.CheckpointExistsError, match="overwrite"):
            flaxckpt.convert(source, target, format=format_name)
        flaxckpt.save(tmp_path / "other", {"w": jnp.ones(3)}, overwrite=True)
        flaxckpt.convert(tmp_path / "other", target, format=format_name, overwrite=True)
        assert_equal(tmp_path / "other", target)
    assert not list(tmp_path.glob("*tmp*"))


def test_file_and_directory_replace_each_other(source, tmp_path):
    target = tmp_path / "x"
    flaxckpt.convert(source, target)
    flaxckpt.convert(source, target, format="msgpack", overwrite=True)
    assert target.is_file()
    flaxckpt.convert(source, target, overwrite=True)
    assert_equal(source, target)


def test_rejects_invalid_arguments(source, tmp_path):
    with pytest.raises(errors.OptionError, match="format"):
        flaxckpt.convert(source, tmp_path / "x", format="pickle")
    with pytest.raises(errors.OptionError, match="whole number of at least 1"):
        flaxckpt.convert(source, tmp_path / "x", max_shard_bytes=0)
    for target in (source, source / "inner", tmp_path):
        with pytest.raises(errors.OptionError, match="beside"):
            flaxckpt.convert(source, target)
    with pytest.raises(errors.OptionError, match="remove all leaves"):
        flaxckpt.convert(source, tmp_path / "x", transforms=[transforms.drop(".*")])
    with pytest.raises(errors.CheckpointNotFoundError):
        flaxckpt.convert(tmp_path / "nothing", tmp_path / "x")
    assert not list(tmp_path.glob("*tmp*"))


@pytest.mark.slow
def test_unfinished_conversion_is_not_step_of_run(tmp_path):
    source = big_source(tmp_path)
    temporary = kill_halfway(source, tmp_path / "run" / "7", "orbax", {})
    assert temporary.is_dir()
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.steps() == []
        ckpt.save(8, {"w": jnp.ones(2)})
    assert temporary.is_dir()
