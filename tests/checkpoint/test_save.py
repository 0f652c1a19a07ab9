"""What is saved is the state as it was at the call, whole and durable."""

import dataclasses
import functools
import json
import random
import re
import typing
from collections import OrderedDict

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx, struct
from flax.core import FrozenDict
from flax.training import dynamic_scale, train_state
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors, transforms
from tests.helpers import (
    chunks,
    dtypes,
    old_stores,
    programs,
    seams,
    strategies,
    system_calls,
)

# ---- every kind of state and leaf -------------------------------------------------


@hypothesis.settings(max_examples=40)
@hypothesis.given(strategies.trees)
def test_any_tree_round_trips_without_template(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("tree") / "c"
    try:
        flaxckpt.save(path, tree)
    except errors.LeafNameError:
        hypothesis.reject()
    strategies.assert_same(tree, flaxckpt.load(path))


def test_every_stored_dtype_round_trips(tmp_path):
    names = dtypes.ALL
    tree = {n: np.array([[0, 1], [1, 0]], np.dtype(n)) for n in names}
    tree["on jax"] = {
        n: jnp.asarray(tree[n])
        for n in names
        if "64" not in n and "128" not in n and "float6" not in n and n[-1] != "1"
    }
    flaxckpt.save(tmp_path / "c", tree)
    strategies.assert_same(tree, flaxckpt.load(tmp_path / "c"))
    strategies.assert_same(tree, flaxckpt.load(tmp_path / "c", tree))


LEAVES = {
    "empty": jnp.zeros((0,)),
    "empty2": np.zeros((3, 0), np.int8),
    "scalar": jnp.float32(2.5),
    "numpy scalar": np.float16(1.5),
    "numpy 0-d": np.array(7),
    "int": -3,
    "float": float("inf"),
    "bool": True,
    "complex": 1 - 2j,
    "str": "a/b ~ü\n\0",
    "none": None,
    "nodes": [{}, [], (), optax.EmptyState(), optax.MaskedNode()],
    "key": jax.random.key(3),
    "keys": jax.random.split(jax.random.key(4, impl="rbg"), (2, 3)),
    "weak": jnp.asarray(5),
    "weak array": jnp.stack([jnp.asarray(1.0), jnp.asarray(2.0)]),
    "not contiguous": np.arange(12.0).reshape(3, 4).T[::2],
    "big endian": np.arange(3, dtype=">f4"),
}


def test_every_kind_of_leaf_round_trips(tmp_path):
    flaxckpt.save(tmp_path / "c", LEAVES)
    found = flaxckpt.load(tmp_path / "c")
    again = flaxckpt.load(tmp_path / "c", LEAVES)
    wanted = {**LEAVES, "big endian": LEAVES["big endian"].astype("f4")}
    strategies.assert_same(wanted, found)
    strategies.assert_same(wanted, again)


class State(train_state.TrainState):
    batch_stats: dict
    ema: FrozenDict
    dropout_key: jax.Array
    scale: dynamic_scale.DynamicScale
    name: str = struct.field(pytree_node=False, default="run")


class Net(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool):
        init = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "mp"))
        x = linen.Dense(4, kernel_init=init)(x)
        return linen.BatchNorm(use_running_average=not train)(x)


def linen_state():
    net = Net()
    variables = net.init(jax.random.key(0), jnp.ones((2, 3)), train=False)
    return State.create(
        apply_fn=net.apply,
        params=variables["params"],
        tx=optax.chain(optax.clip(1.0), optax.adamw(1e-3)),
        batch_stats=variables["batch_stats"],
        ema=FrozenDict({"kernel": jnp.ones(3, jnp.bfloat16)}),
        dropout_key=jax.random.key(1),
        scale=dynamic_scale.DynamicScale(),
    )


@pytest.mark.parametrize(
    "state",
    [
        jnp.ones(3),
        nnx.Param(jnp.ones(3), axes=("a", ("b", None))),
        {"": jnp.ones(3), "empty": FrozenDict({}), "ordered": OrderedDict()},
        (optax.EmptyState(), nnx.State({}), [FrozenDict({"a": {}})]),
    ],
    ids=["array", "variable", "empty names and containers", "empty classes"],
)
def test_bare_leaves_and_empty_containers_round_trip(tmp_path, state):
    flaxckpt.save(tmp_path / "c", state)
    for found in (flaxckpt.load(tmp_path / "c"), flaxckpt.load(tmp_path / "c", state)):
        assert jax.tree.structure(found) == jax.tree.structure(state)
        strategies.assert_same_state(state, found)


def test_modules_without_variables_round_trip(tmp_path):
    model, _ = nnx_state()
    state = {"a": model, "b": model, "nothing": nnx.List([])}
    flaxckpt.save(tmp_path / "c", state)
    found = flaxckpt.load(tmp_path / "c", state)
    assert found["a"] is found["b"]
    assert len(found["nothing"]) == 0


def test_train_state_subclass_keeps_its_class(tmp_path):
    state = linen_state()
    flaxckpt.save(tmp_path / "c", state)
    found = flaxckpt.load(tmp_path / "c", state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    strategies.assert_same_state(state, found)
    abstract = jax.eval_shape(lambda: state)
    found = flaxckpt.load(tmp_path / "c", abstract)
    assert isinstance(found, State)
    assert found.apply_fn is state.apply_fn
    assert isinstance(found.step, jax.Array)
    assert found.step.weak_type


def test_flax_and_optax_field_classes_need_no_template(tmp_path, caplog):
    state = linen_state()
    flaxckpt.save(tmp_path / "c", state)
    found = flaxckpt.load(tmp_path / "c")
    assert "test_save:State" in caplog.text
    strategies.assert_same_state(found["opt_state"], state.opt_state)
    assert jax.tree.structure(found["opt_state"]) == jax.tree.structure(state.opt_state)
    assert type(found["ema"]) is FrozenDict
    assert found["scale"] == state.scale
    assert type(found["params"]["Dense_0"]["kernel"]) is linen.Partitioned


def test_restores_user_classes_listed_in_types(tmp_path, caplog):
    state = linen_state()
    flaxckpt.save(tmp_path / "c", {"state": state, "pair": Pair(1, 2)})
    found = flaxckpt.load(tmp_path / "c", types=[State, Pair])
    assert not caplog.records
    assert type(found["state"]) is State
    assert found["pair"] == Pair(1, 2)
    assert found["state"].apply_fn is None
    strategies.assert_same_state(state, found["state"])


@struct.dataclass
class Layered:
    layers: list
    pair: tuple
    sizes: tuple = struct.field(pytree_node=False)


def test_dataclass_fields_keep_lists_and_tuples(tmp_path):
    state = Layered([1, 2.5], (3, [4]), sizes=(5, (6, 7)))
    flaxckpt.save(tmp_path / "c", state)
    found = flaxckpt.load(tmp_path / "c", types=[Layered])
    assert found == state
    assert type(found.layers) is list
    assert found.sizes == (5, (6, 7))


def test_class_with_changed_fields_becomes_dict(tmp_path, caplog):
    class Changed(typing.NamedTuple):
        uno: int

    flaxckpt.save(tmp_path / "c", {"pair": Pair(1, 2)})
    Changed.__qualname__, Changed.__module__ = "Pair", __name__
    found = flaxckpt.load(tmp_path / "c", types=[Changed])
    assert found == {"pair": {"one": 1, "other": 2}}
    assert "returning a dict" in caplog.text


@jax.tree_util.register_pytree_node_class
class ByIndex:
    def __init__(self, weights, sizes):
        self.weights, self.sizes = weights, sizes

    def tree_flatten(self):
        return (self.weights,), {"sizes": self.sizes}

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children, **aux)


@jax.tree_util.register_pytree_with_keys_class
class ByName:
    def __init__(self):
        raise AssertionError("only tree_unflatten rebuilds it")

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey("weights")
        return ((key, self.weights),), (self.name, [1, (2.5, None)])

    @classmethod
    def tree_unflatten(cls, aux, children):
        new = object.__new__(cls)
        (new.weights,), new.name = children, aux[0]
        return new


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class FieldsByIndex:
    weights: jax.Array
    size: int = 3

    def tree_flatten(self):
        return (self.weights,), self.size

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children, aux)


@dataclasses.dataclass(frozen=True)
class OwnInit:  # as Equinox makes its modules
    weights: jax.Array
    size: int
    act: object = None

    def __init__(self, key):
        object.__setattr__(self, "weights", jax.random.normal(key, (3,)))
        object.__setattr__(self, "size", 3)


jax.tree_util.register_dataclass(OwnInit, ["weights"], ["size", "act"])


class ByFunctions:
    pass


def make_by_functions(aux, children):
    new = ByFunctions()
    new.children, new.aux = children, aux
    return new


jax.tree_util.register_pytree_node(
    ByFunctions, lambda x: (x.children, x.aux), make_by_functions
)

REGISTERED = [ByIndex, ByName, FieldsByIndex, OwnInit, ByFunctions]


def test_rebuilds_registered_classes_as_jax_does(tmp_path, caplog):
    named = object.__new__(ByName)
    named.weights, named.name = {"w": jnp.ones(2)}, "n"
    state = {
        "index": ByIndex([jnp.ones(2), FieldsByIndex(jnp.zeros(1), 4)], (2, 1)),
        "name": named,
        "init": OwnInit(jax.random.key(0)),
        "functions": make_by_functions(("a", {1: True}), (jnp.ones(1), named)),
    }
    flaxckpt.save(tmp_path / "c", state)
    found = flaxckpt.load(tmp_path / "c", types=REGISTERED)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    strategies.assert_same_state(state, found)
    part = flaxckpt.load(
        tmp_path / "c", types=REGISTERED, transforms=[transforms.keep("init/.*")]
    )
    assert type(part["init"]) is OwnInit
    assert not caplog.records


def test_unserializable_aux_data_becomes_dict_with_warning(tmp_path, caplog):
    cycle = []
    cycle.append(cycle)
    for name, aux in (
        ("function", (len,)),
        ("cycle", cycle),
        ("long", "x" * 2**21),
        ("pair", Pair(1, 2)),
    ):
        state = make_by_functions(aux, (jnp.ones(1),))
        flaxckpt.save(tmp_path / name, state)
        caplog.clear()
        assert flaxckpt.load(tmp_path / name, types=REGISTERED).keys() == {0}
        assert "pass a state" in caplog.text
        found = flaxckpt.load(tmp_path / name, state)
        assert found.aux is aux


@struct.dataclass
class Activated:
    w: jax.Array
    act: object = struct.field(pytree_node=False, default=jnp.sin)
    loss: object = struct.field(pytree_node=False, default=None)
    width: int = struct.field(pytree_node=False, default=3)


@dataclasses.dataclass(frozen=True)
class OwnInitActivated:
    w: jax.Array
    act: object = "relu"

    def __init__(self, size):
        raise AssertionError("only the fields are set")


jax.tree_util.register_dataclass(OwnInitActivated, ["w"], ["act"])


def test_warns_about_default_used_for_unsaved_value(tmp_path, caplog):
    own = object.__new__(OwnInitActivated)
    object.__setattr__(own, "w", jnp.ones(2))
    object.__setattr__(own, "act", jnp.tanh)
    flax = Activated(jnp.ones(2), jnp.tanh, jnp.tanh, 5)
    flaxckpt.save(tmp_path / "c", {"flax": [flax, flax], "own": own})
    found = flaxckpt.load(tmp_path / "c", types=[Activated, OwnInitActivated])
    assert found["flax"][1].act is jnp.sin
    assert (found["flax"][1].loss, found["flax"][1].width) == (None, 5)
    assert found["own"].act == "relu"
    messages = [record.getMessage() for record in caplog.records]
    assert [m.partition(" ")[0] for m in messages] == [
        "Activated.act",
        "Activated.loss",
        "OwnInitActivated.act",
    ]
    caplog.clear()
    template = {"flax": [flax, flax]}
    found = flaxckpt.load(tmp_path / "c", template, unused="ignore")
    assert found["flax"][0].act is jnp.tanh
    assert not caplog.records


@struct.dataclass
class WithoutDefault:
    w: jax.Array
    act: object = struct.field(pytree_node=False)


class OwnTrainState(train_state.TrainState):
    pass


def test_warns_about_unsaved_value_without_default(tmp_path, caplog):
    tx, params = optax.sgd(0.1), {"w": jnp.ones(2)}
    own = OwnTrainState.create(apply_fn=jnp.tanh, params=params, tx=tx)
    state = {"own": own, "act": WithoutDefault(jnp.ones(2), jnp.tanh)}
    flaxckpt.save(tmp_path / "c", state)
    found = flaxckpt.load(tmp_path / "c", types=[OwnTrainState, WithoutDefault])
    assert (found["act"].act, found["own"].tx) == (None, None)
    [told] = [record.getMessage() for record in caplog.records]
    assert told.startswith("WithoutDefault.act is not in the checkpoint")


def test_checkpoint_does_not_overwrite_run(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        run.save(1, {"w": jnp.ones(2)})
    told = "is a run with steps, so it is not overwritten: save a step of it"
    with pytest.raises(errors.CheckpointExistsError, match=told):
        flaxckpt.save(tmp_path / "run", {"w": jnp.ones(2)}, overwrite=True)
    assert run.steps() == [1]


def test_load_sets_no_attributes_beyond_declared_fields(tmp_path, caplog):
    class Renamed(OwnInit):
        pass

    flaxckpt.save(tmp_path / "c", OwnInit(jax.random.key(0)))
    Renamed.__dataclass_fields__ = {
        name: field
        for name, field in OwnInit.__dataclass_fields__.items()
        if name != "size"
    }
    Renamed.__qualname__ = "OwnInit"
    assert type(flaxckpt.load(tmp_path / "c", types=[Renamed])) is dict
    assert "fields have changed" in caplog.text


def assign(generator, state):
    getattr(generator, "bit_generator", generator).state = state
    return generator


GENERATORS = {
    **{
        kind.__name__: (lambda seed, kind=kind: kind(seed), assign)
        for kind in (
            np.random.PCG64,
            np.random.PCG64DXSM,
            np.random.MT19937,
            np.random.Philox,
            np.random.SFC64,
        )
    },
    "default_rng": (np.random.default_rng, assign),
    "Generator of MT19937": (
        lambda seed: np.random.Generator(np.random.MT19937(seed)),
        assign,
    ),
    "RandomState": (np.random.RandomState, lambda rng, state: rng.set_state(state)),
    "RandomState of PCG64": (
        lambda seed: np.random.RandomState(np.random.PCG64(seed)),
        lambda rng, state: rng.set_state(state),
    ),
    "SeedSequence": (
        np.random.SeedSequence,
        lambda _, state: np.random.SeedSequence(**state),
    ),
    "SeedSequence of an array": (
        lambda seed: np.random.SeedSequence(np.array([seed, 2], np.uint32)),
        lambda _, state: np.random.SeedSequence(**state),
    ),
    "Random": (
        random.Random,
        lambda rng, state: rng.setstate((state[0], tuple(state[1]), state[2])),
    ),
}


def draw(generator):
    if isinstance(generator, np.random.SeedSequence):
        return [*generator.generate_state(4)]
    if isinstance(generator, np.random.BitGenerator):
        return [*generator.random_raw(9)]
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1) for _ in range(3)]
    return [*generator.normal(size=3)]


@pytest.mark.parametrize("kind", GENERATORS)
def test_advice_for_random_generator_works(tmp_path, kind):
    make, restore = GENERATORS[kind]
    generator = make(3)
    draw(generator)
    found = set()
    for state, more in (
        ({"rng": generator}, {}),
        ({}, {"metadata": {"rng": generator}}),
        ({}, {"json": {"item": {"rng": generator}}}),
    ):
        with pytest.raises(errors.CheckpointError) as caught:
            flaxckpt.save(tmp_path / "c", {"n": 1, **state}, **more)
        advice = r"save its (\S+) (in|as leaves, not in) metadata=,"
        found.add(re.search(advice, str(caught.value)).groups())
    [(name, place)] = found
    value = eval(f"generator.{name}", {"generator": generator})
    metadata = {"rng": value} if place == "in" else {}
    leaves = {"n": 1} if metadata else {"n": 1, "rng": value}
    flaxckpt.save(tmp_path / "c", leaves, metadata=metadata)
    parts = [flaxckpt.metadata(tmp_path / "c").custom] if metadata else []
    parts = parts or [
        flaxckpt.load(tmp_path / "c"),
        flaxckpt.load(tmp_path / "c", leaves),
    ]
    wanted = draw(generator)
    for part in parts:
        other = make(4)
        assert draw(restore(other, part["rng"]) or other) == wanted


def test_rejects_template_with_function(tmp_path):
    flaxckpt.save(tmp_path / "c", {"w": jnp.ones(2)})
    template = {"w": jnp.ones(2), "act": len}
    told = r"1 leaf cannot be restored into(?s:.*)act: found .*len(?s:.*)eqx\.filter"
    for read in (flaxckpt.load, flaxckpt.plan, flaxckpt.load_async):
        with pytest.raises(errors.UnsupportedLeafError, match=told):
            read(tmp_path / "c", template)
    with pytest.raises(errors.UnsupportedLeafError, match="cannot be saved"):
        flaxckpt.save(tmp_path / "d", template)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(-3), -3),
        (np.bool_(True), True),
        (np.array(7, np.uint8), 7),
        (jnp.bfloat16(0.5), 0.5),
        (jnp.asarray(3), 3),
        (2**127, 2**127),
    ],
)
def test_metadata_accepts_numpy_and_jax_scalars(tmp_path, value, plain):
    given = {"a": value, "b": {"c": [value]}}
    flaxckpt.save(tmp_path / "c", {"w": 1}, metadata=given, json={"config": given})
    metadata = flaxckpt.metadata(tmp_path / "c")
    for found in (metadata.custom, metadata.json["config"]):
        assert found == {"a": plain, "b": {"c": [plain]}}
        assert type(found["a"]) is type(plain)


def test_error_suggests_place_for_numpy_generator_state(tmp_path):
    rng = np.random.default_rng(3)
    state = {"w": jnp.ones(2), "rng": rng}
    with pytest.raises(errors.UnsupportedLeafError, match=r"bit_generator\.state in m"):
        flaxckpt.save(tmp_path / "c", state)
    state["rng"] = rng.bit_generator.state
    with pytest.raises(errors.UnsupportedLeafError, match="or in metadata="):
        flaxckpt.save(tmp_path / "c", state)
    flaxckpt.save(tmp_path / "c", {}, metadata={"rng": rng.bit_generator.state})
    other = np.random.default_rng()
    other.bit_generator.state = flaxckpt.metadata(tmp_path / "c").custom["rng"]
    assert other.random() == rng.random()
    with pytest.raises(errors.OptionError, match=r"\.tolist\(\)"):
        flaxckpt.save(tmp_path / "d", {}, metadata={"a": np.ones(3)})


class Pair(typing.NamedTuple):
    one: int
    other: int


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.tied = self.layers[0].kernel


def nnx_state():
    model = Classifier(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def test_restored_nnx_objects_are_new_and_share_variables(tmp_path):
    model, optimizer = nnx_state()
    wanted = {"model": model, "optimizer": optimizer, "rngs": nnx.Rngs(7), "n": 3}
    flaxckpt.save(tmp_path / "c", wanted)
    blank = nnx.eval_shape(nnx_state)
    template = {"model": blank[0], "optimizer": blank[1], "rngs": nnx.Rngs(0), "n": 0}
    found = flaxckpt.load(tmp_path / "c", template)
    assert found["n"] == 3
    assert found["model"] is not model
    assert found["model"].tied is found["model"].layers[0].kernel
    for name in ("model", "optimizer", "rngs"):
        strategies.assert_same_state(nnx.state(wanted[name]), nnx.state(found[name]))
    assert jax.random.key_data(found["rngs"]()) == pytest.approx(
        jax.random.key_data(wanted["rngs"]())
    )


def test_nnx_state_round_trips_without_template(tmp_path):
    model, _ = nnx_state()
    state = nnx.state(model)
    flaxckpt.save(tmp_path / "c", state)
    found = flaxckpt.load(tmp_path / "c")
    assert type(found) is nnx.State
    strategies.assert_same_state(state, found)
    assert type(found["norm"]["mean"]) is nnx.BatchStat


def test_module_state_and_pure_dict_share_leaf_paths(tmp_path):
    model, _ = nnx_state()
    forms = (model, nnx.state(model), nnx.to_pure_dict(nnx.state(model)))
    paths = []
    for i, form in enumerate(forms):
        flaxckpt.save(tmp_path / str(i), {"model": form})
        paths.append(sorted(flaxckpt.metadata(tmp_path / str(i)).leaves))
    assert paths[0] == paths[1] == paths[2]
    assert "model/layers/0/kernel" in paths[0]


# ---- sharded ---------------------------------------------------------------------


@pytest.mark.parametrize("spec", [P(), P("x"), P("x", "y"), P(None, ("x", "y"))])
def test_shards_restore_onto_any_mesh(tmp_path, spec):
    mesh = jax.make_mesh(
        (2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    array = jax.device_put(
        jnp.arange(16 * 8.0).reshape(16, 8), NamedSharding(mesh, spec)
    )
    flaxckpt.save(tmp_path / "c", {"w": array})
    np.testing.assert_array_equal(flaxckpt.load(tmp_path / "c")["w"], array)
    other = jax.make_mesh((8,), ("z",), axis_types=(jax.sharding.AxisType.Auto,))
    for sharding in (
        array.sharding,
        NamedSharding(other, P("z")),
        NamedSharding(other, P(None, "z")),
        NamedSharding(other, P()),
        jax.sharding.SingleDeviceSharding(jax.devices()[5]),
    ):
        wanted = jax.ShapeDtypeStruct(array.shape, jnp.float32, sharding=sharding)
        found = flaxckpt.load(tmp_path / "c", {"w": wanted})["w"]
        assert found.sharding == sharding
        np.testing.assert_array_equal(found, array)


def test_chunks_follow_shards_and_byte_limit(tmp_path):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    array = jax.device_put(jnp.ones((16, 1024)), NamedSharding(mesh, P("x")))
    small = flaxckpt.ArrayLayout(chunk_bytes=4096)
    flaxckpt.save(tmp_path / "whole", {"w": array})
    flaxckpt.save(tmp_path / "small", {"w": array}, layout=small)
    whole = flaxckpt.metadata(tmp_path / "whole").leaves["w"]
    cut = flaxckpt.metadata(tmp_path / "small").leaves["w"]
    assert whole.chunk_shape == (2, 1024)
    assert cut.chunk_shape == (1, 1024)
    np.testing.assert_array_equal(flaxckpt.load(tmp_path / "small")["w"], array)


def test_uncommitted_array_stays_uncommitted(tmp_path):
    flaxckpt.save(tmp_path / "c", {"a": jnp.ones(3)})
    assert not flaxckpt.load(tmp_path / "c")["a"].committed
    assert not flaxckpt.load(tmp_path / "c", {"a": jnp.zeros(3)})["a"].committed


# ---- torn saves ------------------------------------------------------------------


@functools.partial(jax.jit, donate_argnums=0)
def donating_step(state):
    return jax.tree.map(lambda x: x * 2 + 1, state)


@pytest.mark.parametrize("devices", [1, 8])
def test_saves_donated_arrays_as_of_call(tmp_path, devices):
    mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices])
    sharding = NamedSharding(mesh, P("x"))
    state = {
        f"w{i}": jax.device_put(jnp.full((64, 512), float(i)), sharding)
        for i in range(8)
    }
    wanted = {name: np.array(value, copy=True) for name, value in state.items()}
    handle = flaxckpt.save_async(tmp_path / "c", state)
    for _ in range(50):
        state = donating_step(state)
    handle.wait()
    found = flaxckpt.load(tmp_path / "c")
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


def test_donation_works_again_after_save(tmp_path):
    state = {"w": jnp.ones((64, 64))}
    flaxckpt.save_async(tmp_path / "c", state).wait()
    donating_step(state)
    assert state["w"].is_deleted()


def test_saves_mutated_numpy_leaves_as_of_call(tmp_path):
    array = np.zeros((512, 512))
    handle = flaxckpt.save_async(tmp_path / "c", {"a": array, "view": array[::2].T})
    array += 1
    handle.wait()
    found = flaxckpt.load(tmp_path / "c")
    assert not found["a"].any()
    assert not found["view"].any()


def test_saves_trained_nnx_objects_as_of_call(tmp_path):
    model, optimizer = nnx_state()

    @nnx.jit
    def train_step(model, optimizer):
        grads = nnx.grad(lambda m: jnp.sum(m.layers[0](jnp.ones((2, 3)))))(model)
        optimizer.update(model, grads)

    def values(model, optimizer):
        kinds = (nnx.Param, nnx.BatchStat, nnx.OptState)
        return jax.tree.map(np.array, nnx.state((model, optimizer.opt_state), kinds))

    handles, wanted = [], []
    for i in range(5):
        wanted.append(values(model, optimizer))
        handles.append(flaxckpt.save_async(tmp_path / str(i), (model, optimizer)))
        for _ in range(3):
            train_step(model, optimizer)
            model.layers[1].bias[...] += 1
    for handle in handles:
        handle.wait()
    for i in range(5):
        model, optimizer = flaxckpt.load(tmp_path / str(i), nnx.eval_shape(nnx_state))
        assert optimizer.step[...] == 3 * i
        strategies.assert_same_state(wanted[i], values(model, optimizer))


def test_deleted_array_raises_error_immediately(tmp_path):
    state = {"w": jnp.ones(3), "v": jnp.ones(3)}
    state["w"].delete()
    with pytest.raises(errors.UnsupportedLeafError, match="w: found an array that was"):
        flaxckpt.save_async(tmp_path / "c", state)


# ---- bad states ------------------------------------------------------------------


def test_error_names_all_unsupported_leaves(tmp_path):
    state = {
        "f": sum,
        "o": np.array([object()]),
        "s": np.array(["a"]),
        "i": 2**63,
        "b": b"bytes",
        "ok": 1,
    }
    with pytest.raises(errors.UnsupportedLeafError) as info:
        flaxckpt.save(tmp_path / "c", state)
    assert list(info.value.leaves) == ["f", "o", "s", "i", "b"]
    assert isinstance(info.value, TypeError)
    assert len(str(info.value).splitlines()) < 15
    assert not list(tmp_path.iterdir())


def test_rejects_abstract_leaves(tmp_path):
    state = jax.eval_shape(lambda: {"a": jnp.ones(3)})
    deleted = jnp.ones(3)
    deleted.delete()
    for leaf, found in ((state["a"], "an abstract leaf"), (deleted, "an array that")):
        with pytest.raises(errors.UnsupportedLeafError) as told:
            flaxckpt.save(tmp_path / "c", {"a": leaf})
        assert f"a: found {found}" in str(told.value)
        advice = str(told.value).splitlines()[-1]
        assert advice.startswith("Pass a state with values, such as the last")


def test_rejects_traced_values(tmp_path):
    @jax.jit
    def train(x):
        flaxckpt.save(tmp_path / "c", {"x": x})
        return x

    with pytest.raises(errors.UnsupportedLeafError, match=r"traced.* outside of jit"):
        train(jnp.ones(3))


PAIR = "\ud83d\ude00"  # two code units; JSON makes one character of them
LONE = "a\udc80b"  # of a file name that is no UTF-8, as os.fsdecode gives it
EMOJI = "\N{GRINNING FACE}"


@struct.dataclass
class Named:
    x: typing.Any
    name: typing.Any = struct.field(pytree_node=False, default="")


@pytest.mark.parametrize("text", [LONE, EMOJI, "a\0b", LONE * 2, "\ude00\ud83d"])
def test_texts_round_trip_exactly(tmp_path, text):
    state = Named({"text": text, "list": [text], "w": jnp.ones(2)}, text)
    flaxckpt.save(tmp_path / "c", state, metadata={text: [text]})
    for found in (
        flaxckpt.load(tmp_path / "c", state),
        flaxckpt.load(tmp_path / "c", types=[Named]),
    ):
        assert found.x["text"] == found.x["list"][0] == found.name == text
    assert flaxckpt.metadata(tmp_path / "c").custom == {text: [text]}


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": {"text": f"x{PAIR}"}}, "a/text"),
        ([FrozenDict(text=PAIR)], "0/text"),
        (Named({"text": PAIR}), "x/text"),
        ({"a": Named(jnp.ones(2), PAIR)}, "a"),
        ({"a": Named(jnp.ones(2), (1, (PAIR,)))}, "a"),
        ({"a": nnx.Param(jnp.ones(2), tag=PAIR)}, "a"),
        ({"a": linen.Partitioned(jnp.ones(2), names=(PAIR,))}, "a"),
    ],
)
def test_rejects_texts_with_surrogates(tmp_path, state, path):
    with pytest.raises(errors.UnsupportedLeafError, match="surrogates") as info:
        flaxckpt.save(tmp_path / "c", state)
    assert list(info.value.leaves) == [path]
    str(info.value).encode()  # it can be printed
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("text", [LONE, PAIR, "\udc80"])
def test_rejects_non_unicode_keys(tmp_path, text):
    for value in (jnp.ones(2), "text", 1, {}):
        with pytest.raises(errors.LeafNameError, match="not valid Unicode"):
            flaxckpt.save(tmp_path / "c", {"a": {text: value}})
    with pytest.raises(errors.OptionError, match="metadata"):
        flaxckpt.save(tmp_path / "c", {"a": 1}, metadata={"a": PAIR})


class Sub(np.ndarray):
    """A user's own array with a unit."""

    unit = "m"


class SubFloat(np.float64):
    """A user's own number."""


REFUSED = {
    "masked": np.ma.masked_array([1, 2, 3], [0, 1, 0]),
    "nothing masked": np.ma.masked_array([1.0, 2.0]),
    "masked constant": np.ma.masked,
    "matrix": np.ones((1, 2)).view(np.matrix),
    "records of one type": np.rec.fromarrays([[1.0], [2.0]], names="a,b"),
    "plain records": np.zeros(3).view(np.recarray),
    "own": np.arange(3).view(Sub),
    "own number": SubFloat(1.5),
    "structured": np.zeros(2, [("a", "f4")]),
    "date": np.array(["2020-01-01"], "M8[D]"),
    "duration": np.timedelta64(3, "s"),
    "text": np.array(["a"]),
    "bytes": np.bytes_(b"a"),
    "void": np.void(b"abc"),
    "objects": np.array([1, None], object),
    "long": np.zeros(2, np.longdouble),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rejects_numpy_values_without_exact_round_trip(tmp_path, name):
    value = REFUSED[name]
    for state in ({"a": {"b": value}, "c": 1}, FrozenDict(a=[value], c=1)):
        with pytest.raises(errors.UnsupportedLeafError) as info:
            flaxckpt.save(tmp_path / "c", state)
        [path] = info.value.leaves
        assert path in ("a/b", "a/0")
        assert ("mask" in info.value.leaves[path]) == ("mask" in name)
        with pytest.raises(errors.UnsupportedLeafError):
            flaxckpt.save_async(tmp_path / "c", state)
    assert not (tmp_path / "c").exists()


def test_advice_for_masked_array_works(tmp_path):
    array = np.ma.masked_array([1, 2, 3], [0, 1, 0])
    with pytest.raises(errors.UnsupportedLeafError, match="getmaskarray"):
        flaxckpt.save(tmp_path / "c", {"x": array})
    state = {"x": array.data, "mask": np.ma.getmaskarray(array)}
    flaxckpt.save(tmp_path / "c", state)
    strategies.assert_same(state, flaxckpt.load(tmp_path / "c"))


def test_saves_memory_map_as_plain_array(tmp_path):
    array = np.memmap(tmp_path / "file", np.float32, "w+", shape=(3,))
    array[:] = 1, 2, 3
    flaxckpt.save(tmp_path / "c", {"x": array})
    strategies.assert_same({"x": np.array(array)}, flaxckpt.load(tmp_path / "c"))


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": 1}, "a.b": 2},
        {"a": {"b": None}, "a.b": 2},
        {"~": "text"},
        {"a": "x", "a/b": "y"},
        {"nul\0": 1},
    ],
)
def test_rejects_colliding_and_unstorable_names(tmp_path, state):
    with pytest.raises(errors.LeafNameError) as info:
        flaxckpt.save(tmp_path / "c", state)
    assert len(info.value.names) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [2, 2**18])
def test_stores_names_invalid_as_file_names(tmp_path, size):
    names = ["a/b", "..", "_METADATA", "x" * 300, "a\\b", "a"]
    state = {name: np.full(size, n, "f4") for n, name in enumerate(names)}
    flaxckpt.save(tmp_path / "c", state)
    assert flaxckpt.verify(tmp_path / "c").ok
    strategies.assert_same(state, flaxckpt.load(tmp_path / "c"))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_concurrent_saves_to_one_path_do_not_mix(tmp_path):
    states = [{f"w{i}": np.full((64, 64), v) for i in range(8)} for v in range(6)]
    handles = [flaxckpt.save_async(tmp_path / "c", s, overwrite=True) for s in states]
    for handle in handles:
        handle.wait()
    found = flaxckpt.load(tmp_path / "c")
    strategies.assert_same(states[int(found["w0"][0, 0])], found)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_metadata_must_be_json(tmp_path):
    for strange in ({"f": sum}, {1: 2}, {"a": [{"b": {True: 1}}]}, 3):
        with pytest.raises(errors.OptionError, match="JSON"):
            flaxckpt.save(tmp_path / "c", {"a": 1}, metadata=strange)
        with pytest.raises(errors.OptionError, match="JSON"):
            flaxckpt.Checkpointer(tmp_path / "run", metadata=strange)
    flaxckpt.save(tmp_path / "c", {"a": 1}, metadata={"lr": 0.1, "tags": ["x"]})
    assert flaxckpt.metadata(tmp_path / "c").custom == {"lr": 0.1, "tags": ["x"]}


@pytest.mark.parametrize(
    "option", [{"chunk_bytes": 0}, {"store": "s3"}, {"codec": "x"}]
)
def test_rejects_invalid_layout(option):
    with pytest.raises(errors.OptionError, match=next(iter(option))):
        flaxckpt.ArrayLayout(**option)


@pytest.mark.parametrize("codec", ["none", "compact", "zstd"])
@pytest.mark.parametrize("checksum", [True, False])
def test_every_codec_preserves_values(tmp_path, codec, checksum):
    chosen = flaxckpt.ArrayLayout(codec=codec, checksum=checksum)
    state = {"w": np.random.default_rng(0).normal(size=(64, 64)), "b": np.ones(3) > 0}
    flaxckpt.save(tmp_path / "c", state, layout=chosen)
    strategies.assert_same(state, flaxckpt.load(tmp_path / "c"))
    codecs = json.loads(chunks.read_tree(tmp_path / "c/state")["w/zarr.json"])["codecs"]
    assert ("crc32c" in [codec["name"] for codec in codecs]) == checksum


def test_saves_array_larger_than_memory_budget(tmp_path):
    state = {f"w{i}": np.full((64, 64), i) for i in range(5)}
    with flaxckpt.Checkpointer(tmp_path, max_concurrent_bytes=1000) as ckpt:
        ckpt.save(1, state)
        strategies.assert_same(state, ckpt.restore())


# ---- durable ---------------------------------------------------------------------


def test_syncs_files_before_commit_and_parent_after(tmp_path, monkeypatch):
    """Holds the order of syncs and renames at the system calls of our process."""
    calls = system_calls.record(monkeypatch, "fsync", "rename")
    run = tmp_path / "new" / "run"
    flaxckpt.save(run / "c", {"w": jnp.ones((8, 8)), "s": "x"})
    final = str(run / "c")
    [commit] = [i for i, call in enumerate(calls) if call[2:] == (final,)]
    temporary = calls[commit][1]
    assert ("fsync", str(run)) in calls[commit:]
    synced = {path for kind, path, *_ in calls[:commit] if kind == "fsync"}
    written = {
        str(path).replace(final, temporary, 1) for path in (run / "c").rglob("*")
    }
    assert written | {temporary, str(tmp_path), str(tmp_path / "new")} <= synced


def test_failed_save_leaves_no_files_and_names_cause(tmp_path, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    seams.replace(monkeypatch, "disk.sync_tree", full)
    handle = flaxckpt.save_async(tmp_path / "c", {"a": jnp.ones(3)})
    with pytest.raises(errors.SaveFailedError, match="No space left") as info:
        handle.wait()
    assert isinstance(info.value, OSError)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    flaxckpt.save(tmp_path / "c", {"a": jnp.ones(3)})


def test_exiting_script_finishes_its_save(tmp_path):
    programs.run_text(
        """
        import sys, jax.numpy as jnp, flaxckpt
        state = {f"w{i}": jnp.full((256, 256), float(i)) for i in range(40)}
        flaxckpt.Checkpointer(sys.argv[1]).save(3, state)
        """,
        tmp_path,
    )
    assert float(flaxckpt.load(tmp_path)["w39"][0, 0]) == 39


def test_exiting_script_fails_if_its_save_fails(tmp_path):
    done = programs.run_text(
        """
        import resource, signal, sys, jax.numpy as jnp, flaxckpt
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        flaxckpt.save_async(sys.argv[1] + "/c", {"w": jnp.ones((512, 512))})
        """,
        tmp_path,
        code=1,
    )
    assert "could not be saved" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("other", ["c.0", "zarr.json", "c", "b"])
def test_array_with_empty_name_stays_separate(tmp_path, codec, other):
    state = {"": np.arange(2048.0), other: np.ones(2048)}
    layout = flaxckpt.ArrayLayout(codec=codec)
    with flaxckpt.Checkpointer(tmp_path / "run", layout=layout) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state).wait()
            strategies.assert_same(ckpt.restore(), state)
    flaxckpt.save(tmp_path / "alone", {"": state[""]}, layout=layout)
    strategies.assert_same(flaxckpt.load(tmp_path / "alone")[""], state[""])
    old_stores.make_directories(tmp_path / "alone")
    strategies.assert_same(flaxckpt.load(tmp_path / "alone")[""], state[""])


@pytest.mark.parametrize("name", ["/", "a/", "//", "/a/"])
def test_rejects_array_names_unreadable_by_orbax(tmp_path, name):
    with pytest.raises(errors.LeafNameError, match="ends in '/'"):
        flaxckpt.save(tmp_path / "c", {name: np.ones(2)})
    flaxckpt.save(tmp_path / "c", {name: {"b": np.ones(2)}, "/a": np.ones(2)})
    assert list(flaxckpt.load(tmp_path / "c")) == [name, "/a"]


@pytest.mark.parametrize("suffix", ["safetensors", "msgpack", "npz", "pt", "H5", "bin"])
def test_rejects_path_with_file_suffix(tmp_path, suffix):
    path = tmp_path / f"model.{suffix}"
    with pytest.raises(errors.OptionError, match="writes a directory") as info:
        flaxckpt.save(path, {"w": np.ones(3)}, overwrite=True)
    assert ("flaxckpt.convert(" in str(info.value)) == (len(suffix) > 3)
    assert not path.exists()
    flaxckpt.save(tmp_path / "model.v1.5", {"w": np.ones(3)})
