"""The model decides how its state is split, on any mesh, for linen and NNX."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore as ts
from flax import linen, nnx
from flax.training import train_state
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors
from tests.helpers import seams, strategies

RULES = [("embed", "data"), ("mlp", "model"), ("batch", "data")]


def meshes():
    """A mesh of every kind, two of them without devices."""
    shape, names = (2, 4), ("data", "model")
    kinds = {"auto": (AxisType.Auto,) * 2, "explicit": (AxisType.Explicit,) * 2}
    for name, kind in kinds.items():
        yield name, jax.make_mesh(shape, names, axis_types=kind)
        yield f"abstract {name}", AbstractMesh(shape, names, axis_types=kind)


MESHES = dict(meshes())


class Linen(linen.Module):
    box: str = "logical"

    @linen.compact
    def __call__(self, x):
        init = linen.initializers.lecun_normal()
        if self.box == "logical":
            init = linen.with_logical_partitioning(init, ("embed", "mlp"))
        if self.box == "mesh":
            init = linen.with_partitioning(init, ("data", "model"))
        x = linen.Dense(16, kernel_init=init, name="inner")(x)
        return linen.Dense(2, name="outer")(x)


def linen_state(box="logical", tx=None):
    model = Linen(box)
    params = model.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    return train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=tx or optax.adamw(1e-3)
    )


class Nnx(nnx.Module):
    def __init__(self, rngs, names=("embed", "mlp"), width=16):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
        self.dense = nnx.Linear(8, width, rngs=rngs, kernel_init=init)
        self.tied = self.dense.kernel
        self.out = nnx.Linear(width, 2, rngs=rngs)


def nnx_state(width=16):
    model = Nnx(nnx.Rngs(0), width=width)
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def specs(state):
    """Leaf path -> what its spec splits."""
    infos = flaxckpt.parameter_infos(state)
    leaves = jax.tree.leaves(infos, is_leaf=lambda x: isinstance(x, flaxckpt.LeafInfo))
    return {
        info.path: tuple(info.spec)
        for info in leaves
        if info.spec is not None and any(info.spec)
    }


# ---- where specs come from ---------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_maps_linen_logical_axes_to_mesh_axes(mesh):
    found = flaxckpt.abstract_state(linen_state, mesh=mesh, rules=RULES)
    split = ("data", "model")
    assert specs(found) == {
        "params/inner/kernel": split,
        "opt_state/0/mu/inner/kernel": split,
        "opt_state/0/nu/inner/kernel": split,
    }
    assert isinstance(found, train_state.TrainState)
    assert type(found.params["inner"]["kernel"]) is linen.LogicallyPartitioned
    for leaf in jax.tree.leaves(found):
        assert isinstance(leaf, jax.ShapeDtypeStruct)
        assert leaf.sharding.mesh == mesh


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_maps_nnx_axis_names_to_mesh_axes(mesh):
    model, optimizer = flaxckpt.abstract_state(nnx_state, mesh=mesh, rules=RULES)
    split = ("data", "model")
    assert specs((model, optimizer)) == {
        "0/dense/kernel": split,
        "1/opt_state/0/mu/dense/kernel": split,
        "1/opt_state/0/nu/dense/kernel": split,
    }
    assert model.tied is model.dense.kernel


def test_accepts_mesh_axes_as_axis_names():
    mesh = MESHES["abstract auto"]
    found = flaxckpt.abstract_state(linen_state, "mesh", mesh=mesh)
    assert specs(found)["params/inner/kernel"] == ("data", "model")
    with nnx.use_eager_sharding(False):
        model = nnx.eval_shape(lambda: Nnx(nnx.Rngs(0), (None, "model")))
    found = flaxckpt.abstract_state(model, mesh=mesh)
    assert specs(found) == {"dense/kernel": (None, "model")}


def test_uses_each_mesh_axis_once_per_array():
    rules = [("embed", "model"), ("mlp", "model"), ("mlp", "data")]
    found = flaxckpt.abstract_state(linen_state, mesh=MESHES["auto"], rules=rules)
    assert specs(found)["params/inner/kernel"] == ("model", "data")


def test_first_matching_leaf_rule_wins():
    rules = [
        (r"params/outer/kernel", P("data")),
        (r".*/kernel", P("data", "model")),
        (r".*", P()),
    ]
    found = flaxckpt.abstract_state(
        lambda: linen_state("none"),
        mesh=MESHES["abstract auto"],
        leaf_rules=[*rules[:1], ("params/inner/kernel", P(None, "model")), *rules[2:]],
    )
    assert specs(found) == {
        "params/inner/kernel": (None, "model"),
        "params/outer/kernel": ("data",),
        "opt_state/0/mu/inner/kernel": (None, "model"),
        "opt_state/0/mu/outer/kernel": ("data", None),
        "opt_state/0/nu/inner/kernel": (None, "model"),
        "opt_state/0/nu/outer/kernel": ("data", None),
    }


def test_keeps_present_shardings_or_moves_them_to_mesh():
    mesh = MESHES["auto"]
    array = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data")))
    state = {"w": array, "n": 3, "s": "x", "host": np.ones(2)}
    same = flaxckpt.abstract_state(state)
    assert same["w"].sharding == array.sharding
    assert (same["n"], same["s"]) == (3, "x")
    assert same["host"] is state["host"]
    moved = flaxckpt.abstract_state(state, mesh=MESHES["abstract explicit"])
    assert moved["w"].sharding.spec == P("data")
    other = AbstractMesh((8,), ("x",))
    assert flaxckpt.abstract_state(state, mesh=other)["w"].sharding.spec == P()


def test_abstract_state_runs_and_places_nothing():
    def init():
        return {"w": jnp.ones((2**20, 2**20))}

    found = flaxckpt.abstract_state(init, mesh=MESHES["abstract auto"])
    assert found["w"].shape == (2**20, 2**20)


def test_always_replicates_keys_and_scalars():
    def init():
        return {"key": jax.random.key(0), "n": jnp.int32(3), "one": jnp.ones((1, 1))}

    rules = [("one|n|key", P("data", "model"))]
    found = flaxckpt.abstract_state(init, mesh=MESHES["auto"], leaf_rules=rules)
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(found)} == {P()}
    assert jnp.issubdtype(found["key"].dtype, jax.dtypes.prng_key)


# ---- infos -------------------------------------------------------------------------


def test_parameter_infos_agree_with_saved_metadata(tmp_path):
    state = linen_state()
    layout = flaxckpt.ArrayLayout(chunk_bytes=256)
    infos = flaxckpt.parameter_infos(state, layout=layout)
    kernel = infos.params["inner"]["kernel"].value
    assert kernel.path == "params/inner/kernel"
    assert (kernel.shape, kernel.dtype, kernel.chunk_shape) == (
        (8, 16),
        "float32",
        (4, 16),
    )
    flaxckpt.save(tmp_path / "c", state, layout=layout)
    saved = flaxckpt.metadata(tmp_path / "c").leaves
    assert saved["params/inner/kernel"].chunk_shape == (4, 16)


def test_chunks_follow_shards_on_abstract_mesh():
    mesh = MESHES["abstract auto"]
    found = flaxckpt.abstract_state(linen_state, mesh=mesh, rules=RULES)
    kernel = flaxckpt.parameter_infos(found).params["inner"]["kernel"].value
    assert kernel.spec == P("data", "model")
    assert kernel.chunk_shape == kernel.shard_shape == (4, 4)


def test_devices_with_same_data_share_writing(tmp_path):
    mesh = MESHES["auto"]
    array = jnp.arange(4 * 2**20, dtype=jnp.float32).reshape(1024, -1)
    state = {
        "copied": jax.device_put(array, NamedSharding(mesh, P())),
        "split": jax.device_put(array, NamedSharding(mesh, P("data"))),
        "small": jax.device_put(array[:1], NamedSharding(mesh, P())),
        "keys": jax.device_put(jax.random.key(0), NamedSharding(mesh, P())),
    }
    flaxckpt.save(tmp_path / "c", state)
    leaves = flaxckpt.metadata(tmp_path / "c").leaves
    assert leaves["copied"].chunk_shape == (128, 4096)  # an eighth each
    assert leaves["split"].chunk_shape == (128, 4096)  # a half, among four
    assert leaves["small"].chunk_shape == (1, 4096)
    strategies.assert_same(state, flaxckpt.load(tmp_path / "c", state))


# ---- bad rules ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"leaf_rules": [("params/.*/kernal", P())]},
            "matches no leaf.*nearest: params",
        ),
        ({"leaf_rules": [("(", P())]}, "not a valid regular expression"),
        ({"leaf_rules": {"params/.*/kernal": P()}}, "matches no leaf.*nearest: params"),
        ({"leaf_rules": [(".*", P()), (".*/bias", P("modle"))]}, "nearest: 'model'"),
        ({"leaf_rules": [(".*", P("dta"))]}, "'dta'.*nearest: 'data'"),
        ({"leaf_rules": [(".*", P()), ("host/.*", P())]}, "host/w is float32"),
        ({"leaf_rules": ["params/.*"]}, "leaf_rules must be pairs.*or a dict"),
        ({"leaf_rules": "params/.*"}, "leaf_rules must be pairs.*got 'params"),
        ({"leaf_rules": P("data")}, "leaf_rules must be pairs"),
        ({"leaf_rules": {".*": "data"}}, "PartitionSpec, got 'data'"),
        (
            {"leaf_rules": {".*": ("data", None)}},
            "must map '.*' to a jax.sharding.PartitionSpec",
        ),
        ({"leaf_rules": [(1, P())]}, "pattern must be a regular expression"),
        ({"rules": ["embed"]}, "rules must be pairs.*or a dict"),
        ({"rules": {"embed": 3}}, "rules must map each logical axis to a mesh"),
        ({"rules": {"embed": "modle"}}, "'modle', the mesh has.*nearest: 'model'"),
        ({"leaf_rules": [(".*", P()), ("0", P())]}, "0: matches no leaf"),
        ({"leaf_rules": [(".*/kernel", P("data"))]}, "inner/bias.*no rule.*outer/bias"),
        (
            {"leaf_rules": [(".*", P("rows"))]},
            "inner/bias.*inner/kernel.*outer/bias.*outer/kernel.*'rows', the mesh has",
        ),
        ({"leaf_rules": [(".*", P("data", "data"))]}, "axis of the mesh twice"),
        ({"leaf_rules": [(".*", P(None, "model"))]}, "more parts than"),
        ({"leaf_rules": [(".*", P(("data", "model")))]}, "cannot split 2 into 8 equal"),
        ({"rules": [("embed", "rows"), ("mlp", None)]}, "'rows', the mesh has"),
        ({}, "'embed', the mesh has"),
    ],
)
def test_misfit_rules_raise_one_error_naming_every_leaf(options, message):
    if "rules" not in options and "leaf_rules" not in options:
        with nnx.use_eager_sharding(False):
            state = nnx.eval_shape(lambda: Nnx(nnx.Rngs(0)))
    else:
        state = jax.eval_shape(lambda: {"params": linen_state().params})
        state["host"] = {"w": np.ones(3, "float32")}
    with pytest.raises(
        (errors.PartitionError, errors.OptionError), match=f"(?s){message}"
    ) as info:
        flaxckpt.abstract_state(state, mesh=MESHES["abstract auto"], **options)
    assert isinstance(info.value, ValueError)
    assert len(str(info.value).splitlines()) < 15


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_accepts_rules_as_dicts(kind):
    state = linen_state()
    if kind == "nnx":
        with nnx.use_eager_sharding(False):
            state = nnx.eval_shape(lambda: Nnx(nnx.Rngs(0)))
    mesh = MESHES["abstract auto"]
    leaf_rules = [(".*/kernel", P("data")), (".*", P())]
    for given in ({"rules": RULES}, {"leaf_rules": leaf_rules}):
        [(name, pairs)] = given.items()
        wanted = flaxckpt.abstract_state(state, mesh=mesh, **given)
        found = flaxckpt.abstract_state(state, mesh=mesh, **{name: dict(pairs)})
        for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
            assert getattr(a, "sharding", None) == getattr(b, "sharding", None)


@pytest.mark.parametrize("given", [{"rules": RULES}, {"leaf_rules": {".*": P()}}])
def test_rejects_rules_without_mesh(given):
    with pytest.raises(errors.OptionError, match="pass mesh="):
        flaxckpt.abstract_state({"w": jnp.ones(4)}, **given)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"embd": "data", "mlp": "model"}, "'embed' has no rule; nearest: 'embd'"),
        ({"heads": "model"}, "none of the rules names an axis.*embed, mlp"),
        ({"embed": None, "mlp": None, "heads": "tensor"}, "'heads' names 'tensor'"),
        ({"embed": "data", "mlp": None, "batch": "dat"}, "nearest: 'data'"),
    ],
)
def test_warns_about_axis_rules_without_effect(caplog, rules, message):
    mesh = MESHES["abstract auto"]
    flaxckpt.abstract_state({"params": linen_state().params}, mesh=mesh, rules=rules)
    [told] = [r.getMessage() for r in caplog.records if "rules" in r.getMessage()]
    assert re.search(message, told, re.DOTALL), told


def test_does_not_warn_about_rules_for_activations(caplog):
    mesh = MESHES["abstract auto"]
    flaxckpt.abstract_state({"params": linen_state().params}, mesh=mesh, rules=RULES)
    assert "rules" not in caplog.text
    flaxckpt.abstract_state({"params": {"w": jnp.ones(4)}}, mesh=mesh, rules=RULES)
    assert "no axis has a name" in caplog.text


# ---- moving between meshes ---------------------------------------------------------


def mesh_of(*shape):
    names = ("data", "model")[: len(shape)]
    kinds = (AxisType.Auto,) * len(shape)
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=kinds, devices=devices)


PAIRS = [
    ((8, 1), (1, 8)),
    ((1, 8), (2, 4)),
    ((2, 4), (4, 2)),
    ((4, 2), (1, 1)),
    ((1, 1), (2, 4)),
    ((2, 2), (8, 1)),
    ((8, 1), (2, 2)),
]


TX = optax.adam(1e-3)


def big():
    """A state large enough that what is read can be told apart."""
    params = {
        "w": (jnp.arange(256 * 512.0) % 251).reshape(256, 512),
        "b": jnp.arange(512.0),
    }
    return train_state.TrainState.create(apply_fn=None, params=params, tx=TX)


BIG_RULES = [("params/w", P("data", "model")), ("params/b", P("model"))]


blocks_read = []
"""Sizes of the blocks that were read or verified in place, without TensorStore."""


@pytest.fixture(autouse=True)
def count_blocks(monkeypatch):
    def counting(function):
        def counted(block, *args, **kwargs):
            blocks_read.append(block.size)
            return function(block, *args, **kwargs)

        return counted

    for seam in ("chunk_file.read", "chunk_file.verify_mapped"):
        seams.replace(monkeypatch, seam, counting(seams.current(seam)))
    real = seams.current("disk.read_range")

    def read_range(*args, **options):
        content = real(*args, **options)
        blocks_read.append(len(content))  # small values of a database
        return content

    seams.replace(monkeypatch, "disk.read_range", read_range)


def bytes_read():
    """What has been read from files so far, by us and by TensorStore."""
    name = "/tensorstore/kvstore/file/bytes_read"
    return sum(blocks_read) + sum(
        value["value"]
        for metric in ts.experimental_collect_matching_metrics(name)
        for value in metric["values"]
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("saved", "wanted"), PAIRS)
def test_linen_state_moves_between_meshes_bit_for_bit(tmp_path, saved, wanted):
    rules = [*BIG_RULES, ("step", P())]
    here = flaxckpt.abstract_state(big, mesh=mesh_of(*saved), leaf_rules=rules)
    state = jax.tree.map(
        lambda x, to: jax.device_put(x, to.sharding),
        jax.tree.map(jnp.asarray, big()),
        here,
    )
    flaxckpt.save(tmp_path / "c", state)
    there = flaxckpt.abstract_state(big, mesh=mesh_of(*wanted), leaf_rules=rules)
    before = bytes_read()
    found = flaxckpt.load(tmp_path / "c", there)
    read = bytes_read() - before
    for one, two, to in zip(*map(jax.tree.leaves, (state, found, there)), strict=True):
        assert two.sharding == to.sharding
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))
    # Each byte is read once by this process, however many devices hold it.
    total = flaxckpt.metadata(tmp_path / "c").total_bytes
    assert flaxckpt.plan(tmp_path / "c", there).bytes_here == total
    assert total <= read <= 1.05 * total + 50_000


def test_reads_only_chunks_needed_by_devices(tmp_path):
    mesh = mesh_of(8)
    array = jax.device_put(jnp.ones((1024, 1024)), NamedSharding(mesh, P("data")))
    flaxckpt.save(tmp_path / "c", {"w": array, "other": array})
    before = bytes_read()
    store = flaxckpt.open_leaf(tmp_path / "c", "w")
    np.testing.assert_array_equal(store[:128].read().result(), np.ones((128, 1024)))
    assert bytes_read() - before < 1.1 * array.nbytes / 8
    before = bytes_read()
    flaxckpt.load(tmp_path / "c", {"w": array})
    assert bytes_read() - before < 1.1 * array.nbytes


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("saved", "wanted"), PAIRS)
def test_nnx_state_moves_between_meshes_bit_for_bit(tmp_path, saved, wanted):
    rules = [(r".*dense/kernel", P("data", "model")), (".*", P())]
    width = 16_384
    here, there = (
        flaxckpt.abstract_state(
            nnx_state, width, mesh=mesh_of(*shape), leaf_rules=rules
        )
        for shape in (saved, wanted)
    )
    with nnx.use_eager_sharding(False):
        flaxckpt.save(tmp_path / "a", nnx_state(width))
    state = flaxckpt.load(tmp_path / "a", here)
    flaxckpt.save(tmp_path / "b", state)
    before = bytes_read()
    found = flaxckpt.load(tmp_path / "b", there)
    read = bytes_read() - before
    for one, two, to in zip(
        *map(jax.tree.leaves, map(nnx.state, (state, found, there))), strict=True
    ):
        assert two.sharding == to.sharding
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))
    assert found[0].tied is found[0].dense.kernel
    total = flaxckpt.metadata(tmp_path / "b").total_bytes
    assert total <= read <= 1.05 * total + 50_000


def test_loads_checkpoint_of_8_devices_on_one_device_and_host(tmp_path):
    sharding = NamedSharding(mesh_of(8), P("data"))
    array = jax.device_put(jnp.arange(64.0), sharding)
    flaxckpt.save(tmp_path / "c", {"w": array})
    alone = flaxckpt.load(tmp_path / "c")["w"]
    assert len(alone.sharding.device_set) == 1
    template = {"w": jax.ShapeDtypeStruct((64,), jnp.float32)}
    alone = flaxckpt.load(tmp_path / "c", template)["w"]
    assert len(alone.sharding.device_set) == 1
    host = flaxckpt.load(tmp_path / "c", {"w": np.zeros(64, np.float32)})["w"]
    assert type(host) is np.ndarray
    for found in (alone, host):
        np.testing.assert_array_equal(np.asarray(found), np.arange(64))
