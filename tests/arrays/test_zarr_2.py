"""Checkpoints of zarr 2, for readers that do not know zarr 3."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax.sharding import SingleDeviceSharding

import flaxckpt
from tests.helpers import chunks, dtypes, strategies

ocp = pytest.importorskip("orbax.checkpoint")

from tests.helpers.orbax_readers import READERS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")

CODECS = ("none", "compact", "zstd")


def layout(codec="none", **more):
    return flaxckpt.ArrayLayout(codec=codec, zarr_version=2, **more)


def all_types():
    """Every element type that is stored, on both sides of what is compressed."""
    found = {}
    for name in dtypes.ALL:
        dtype = np.dtype(name)
        found[name] = {n: (np.arange(n) % 2).astype(dtype) for n in (3, 5000)}
    return found


def state():
    params = {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.zeros(4, jnp.bfloat16)}
    tx = optax.adamw(1e-3)
    made = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    grads = jax.tree.map(jnp.ones_like, params)
    return {
        "train": made.apply_gradients(grads=grads),
        "dropout": jax.random.key(3),
        "epoch": 7,
        "done": None,
        "empty": {},
        "none_at_all": jnp.zeros((0, 3)),
    }


@pytest.mark.parametrize("codec", CODECS)
def test_all_dtypes_round_trip(tmp_path, codec):
    wanted = all_types()
    flaxckpt.save(tmp_path / "c", wanted, layout=layout(codec))
    strategies.assert_same(wanted, flaxckpt.load(tmp_path / "c"))


def test_files_declare_zarr_2(tmp_path):
    flaxckpt.save(tmp_path / "c", state(), layout=layout())
    described = json.loads((tmp_path / "c" / "state" / "_METADATA").read_text())
    assert described["use_zarr3"] is False
    assert described["store_array_data_equal_to_fill_value"] is True
    manifest = json.loads((tmp_path / "c" / "flaxckpt.json").read_text())
    assert manifest["encoding"] == {
        "codec": "none",
        "checksum": False,
        "zarr_version": 2,
    }
    assert not list(tmp_path.rglob("zarr.json"))
    values = chunks.read_tree(tmp_path / "c/state")
    array = json.loads(values["train.params.w/.zarray"])
    assert array["zarr_format"] == 2
    assert array["dtype"] == "<f4"


def test_splits_large_array_into_chunks(tmp_path):
    wanted = {"w": jnp.arange(2**16, dtype=jnp.float32).reshape(256, 256)}
    small = layout(chunk_bytes=2**14)
    flaxckpt.save(tmp_path / "c", wanted, layout=small)
    assert len(chunks.read_tree(tmp_path / "c/state")) == 1 + 16
    strategies.assert_same_state(wanted, flaxckpt.load(tmp_path / "c"))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "reader", ["v0_pytree", "v0_standard_target", "v1_load_target"]
)
def test_stock_orbax_reads_checkpoint(tmp_path, codec, reader):
    wanted = state()
    flaxckpt.save(tmp_path / "5", wanted, layout=layout(codec))
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
    ours, theirs = jax.tree.leaves(wanted), jax.tree.leaves(found)
    if reader.endswith("_target"):
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert len(ours) == len(theirs)
    as_bytes = [
        sorted(np.asarray(values(leaf)).tobytes() for leaf in leaves)
        for leaves in (ours, theirs)
    ]
    assert as_bytes[0] == as_bytes[1]


def values(leaf):
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def test_rejects_unknown_version():
    with pytest.raises(flaxckpt.errors.OptionError, match="zarr_version"):
        flaxckpt.ArrayLayout(zarr_version=1)
