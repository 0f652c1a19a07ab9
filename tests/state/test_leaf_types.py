"""Leaf types of users: saved as their parts, restored as themselves."""

from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, struct
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import errors
from flaxckpt.transforms import cast, drop, rename
from tests.helpers import programs, seams, strategies

few_examples = hypothesis.settings(
    max_examples=20, suppress_health_check=list(hypothesis.HealthCheck)
)


class Quantized:
    """Values of a few bits and their scale, as libraries of quantization have them."""

    def __init__(self, values, scale):
        self.values, self.scale = values, scale

    def parts(self):
        return {"values": self.values, "scale": self.scale}

    @classmethod
    def of(cls, parts):
        values, scale = parts["values"], parts["scale"]
        if values.ndim and values.shape[-1:] != scale.shape:
            raise ValueError(f"{scale.shape} scales of {values.shape} values")
        return cls(values, scale)


class Tokenizer:
    """An object that changes in place, of text, numbers and nested containers."""

    def __init__(self, vocabulary=(), state=None):
        self.vocabulary, self.state = list(vocabulary), state

    def parts(self):
        return {"vocabulary": self.vocabulary, "state": self.state}

    @classmethod
    def of(cls, parts):
        return cls(**parts)


class Marker:
    """An object without parts."""


class Picky:
    """An object whose parts can be told to be wrong."""

    def __init__(self, parts):
        self._parts = parts

    def parts(self):
        return self._parts() if callable(self._parts) else self._parts


for registered in (Quantized, Tokenizer):
    flaxckpt.register_leaf(
        registered, to_arrays=registered.parts, from_arrays=registered.of
    )
flaxckpt.register_leaf(Marker, to_arrays=lambda _: {}, from_arrays=lambda _: Marker())
flaxckpt.register_leaf(Picky, to_arrays=Picky.parts, from_arrays=Picky)


class Pair(NamedTuple):
    one: Any
    two: Any


@struct.dataclass
class Record:
    leaf: Any
    others: Any
    name: str = struct.field(pytree_node=False, default="")


def quantized(rows=3, value=1, dtype=jnp.int8):
    return Quantized(jnp.full((rows, 2), value, dtype), jnp.full(2, 0.5))


def parts_of(state):
    """The state with all leaves of the types here as tuples: class, parts."""
    kinds = (Quantized, Tokenizer, Marker)

    def split(leaf):
        if isinstance(leaf, Quantized | Tokenizer):
            return type(leaf), parts_of(leaf.parts())
        return (type(leaf),) if isinstance(leaf, Marker) else leaf

    return jax.tree.map(split, state, is_leaf=lambda leaf: isinstance(leaf, kinds))


def assert_same(wanted, found):
    wanted, found = parts_of(wanted), parts_of(found)
    assert jax.tree.structure(wanted) == jax.tree.structure(found)
    for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert type(one) is type(other)
        if isinstance(one, type | str):
            assert one == other
        else:
            strategies.assert_same_bits(one, other)


leaf_types_here = st.one_of(
    st.builds(quantized, st.integers(0, 4), st.integers(-128, 127)),
    st.builds(Quantized, strategies.arrays, st.just(np.float32(2))).filter(
        lambda leaf: leaf.values.ndim == 0
    ),
    st.builds(
        Tokenizer,
        st.lists(st.text(max_size=3), max_size=3),
        st.none()
        | strategies.arrays
        | st.dictionaries(st.just("a"), st.integers(0, 2**63 - 1)),
    ),
    st.builds(Marker),
)


def containers(children):
    return st.one_of(
        strategies.containers(children),
        st.dictionaries(strategies.names, children, max_size=3).map(FrozenDict),
        st.builds(Pair, children, children),
        st.builds(Record, children, children, st.text(max_size=3)),
    )


states = st.recursive(
    leaf_types_here | strategies.leaves, containers, max_leaves=8
).map(lambda tree: {"leaf": quantized(), "tree": tree})


@pytest.mark.slow
@few_examples
@hypothesis.given(state=states)
def test_leaves_round_trip_in_any_container(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("a") / "a"
    try:
        flaxckpt.save(path, state)
    except errors.LeafNameError:  # whatever holds such a key
        hypothesis.reject()
    assert_same(state, flaxckpt.load(path, state))
    assert_same(state, flaxckpt.load(path, types=[Pair, Record]))
    assert flaxckpt.verify(path).ok
    copy = path.with_name("copy")
    flaxckpt.convert(path, copy)
    assert_same(state, flaxckpt.load(copy, types=[Pair, Record]))


def test_conversion_keeps_leaves(tmp_path):
    state = {"q": quantized(), "t": Tokenizer(["a"], np.ones(2))}
    flaxckpt.save(tmp_path / "a", state)
    flaxckpt.convert(tmp_path / "a", tmp_path / "a.safetensors")
    assert_same(state, flaxckpt.load(tmp_path / "a.safetensors"))
    flaxckpt.convert(tmp_path / "a", tmp_path / "a.msgpack")
    assert_same(state, flaxckpt.load(tmp_path / "a.msgpack", state))


def test_orbax_reads_parts_as_dict(tmp_path):
    state = {"q": quantized(), "t": Tokenizer(["a", "é"], {"n": 3}), "m": Marker()}
    flaxckpt.save(tmp_path / "a", state)
    wanted = {"q/values", "q/scale", "t/vocabulary/0", "t/vocabulary/1", "t/state/n"}
    assert wanted < set(flaxckpt.metadata(tmp_path / "a").leaves)
    restored = ocp.StandardCheckpointer().restore(tmp_path / "a" / "state")
    assert (restored["q"]["values"] == 1).all()
    assert restored["t"] == {"vocabulary": ["a", "é"], "state": {"n": 3}}
    plain = {"q": {"values": jnp.zeros((3, 2), jnp.int8), "scale": jnp.zeros(2)}}
    found = flaxckpt.load(tmp_path / "a", plain, unused="ignore")
    assert type(found["q"]) is dict
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", found)
    # From a dict, which need not have been such a leaf, by the template.
    again = flaxckpt.load(tmp_path / "orbax", {"q": quantized(value=9)})
    assert_same({"q": quantized()}, again)


def test_leaf_of_unknown_class_becomes_dict(tmp_path, caplog, monkeypatch):
    flaxckpt.save(tmp_path / "a", {"q": quantized()})
    name = f"{Quantized.__module__}:{Quantized.__qualname__}"
    seams.replace(monkeypatch, "leaf_types.by_class", {})
    seams.replace(monkeypatch, "leaf_types.by_name", {})
    found = flaxckpt.load(tmp_path / "a")
    assert type(found["q"]) is dict
    assert found["q"].keys() == {"values", "scale"}
    assert f"unknown classes, which become dicts: {name}" in caplog.text
    with pytest.raises(errors.UnsupportedLeafError, match="register_leaf") as caught:
        flaxckpt.save(tmp_path / "b", {"q": quantized()})
    assert caught.value.leaves == {"q": f"a {name.replace(':', '.')}"}


@pytest.mark.slow
def test_other_program_needs_only_registration(tmp_path):
    code = """
        import sys, flaxckpt
        class Own:
            def __init__(self, parts):
                self.parts = parts
        if "save" in sys.argv:
            flaxckpt.register_leaf(
                Own, to_arrays=lambda own: own.parts, from_arrays=Own
            )
            flaxckpt.save(sys.argv[1], {"own": Own({"a": 1})})
        else:
            assert flaxckpt.load(sys.argv[1])["own"] == {"a": 1}
            flaxckpt.register_leaf(
                Own, to_arrays=lambda own: own.parts, from_arrays=Own
            )
            assert flaxckpt.load(sys.argv[1])["own"].parts == {"a": 1}
    """
    for verb in ("save", "load"):
        programs.run_text(code, tmp_path / "a", verb)


# ---- states of training ----------------------------------------------------------


def train_state(value, tx):
    dense = jnp.full((2, 2), value, jnp.float32)
    params = {"dense": dense, "frozen": quantized(value=int(value))}
    return TrainState.create(apply_fn=None, params=params, tx=tx)


def optimizer(*before):
    is_trained = {"dense": True, "frozen": False}
    return optax.chain(*before, optax.masked(optax.adam(0.1), is_trained))


def test_restores_and_matches_optimizers_with_custom_leaves(tmp_path):
    state = train_state(3.0, optimizer())
    grads = {"dense": jnp.ones((2, 2)), "frozen": quantized()}
    updates, opt_state = state.tx.update(grads, state.opt_state, state.params)
    assert updates["dense"].shape == (2, 2)
    state = state.replace(opt_state=opt_state, step=1)
    flaxckpt.save(tmp_path / "a", state)
    assert_same(state.params, flaxckpt.load(tmp_path / "a").params)
    assert_same(state, flaxckpt.load(tmp_path / "a", train_state(0.0, state.tx)))
    clipped = train_state(0.0, optimizer(optax.scale_by_schedule(lambda _: 1.0)))
    matched = flaxckpt.load(tmp_path / "a", clipped)
    assert_same(opt_state[0], matched.opt_state[1])
    # tx.init runs on the restored parameters, leaves of registered classes included.
    anew = flaxckpt.load(tmp_path / "a", clipped, optimizer="reinit")
    assert_same(state.params, anew.params)
    assert not any(map(jnp.any, jax.tree.leaves(anew.opt_state)))


class Model(nnx.Module):
    def __init__(self, value):
        self.dense = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.frozen = nnx.Variable(quantized(value=value))
        self.table = nnx.data([nnx.Variable(Tokenizer(["a", str(value)]))])


def test_nnx_objects_hold_custom_leaves(tmp_path):
    model = Model(3)
    tx = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    flaxckpt.save(tmp_path / "a", (model, tx))
    new = Model(1)
    new, new_tx = flaxckpt.load(
        tmp_path / "a", (new, nnx.Optimizer(new, optax.adam(0.1), wrt=nnx.Param))
    )
    assert_same(model.frozen.get_value(), new.frozen.get_value())
    assert new.table[0].get_value().vocabulary == ["a", "3"]
    assert_same(nnx.to_pure_dict(nnx.state(tx)), nnx.to_pure_dict(nnx.state(new_tx)))
    state = flaxckpt.load(tmp_path / "a")[0]
    assert_same(model.frozen.get_value(), state["frozen"].get_value())


def test_variable_beside_its_module_stays_shared(tmp_path):
    model = Model(2)
    flaxckpt.save(tmp_path / "a", (model, {"frozen": model.frozen}))
    new = Model(1)
    new, beside = flaxckpt.load(tmp_path / "a", (new, {"frozen": new.frozen}))
    assert new.frozen is beside["frozen"]


def test_loop_saves_leaf_of_last_reported_step(tmp_path):
    tokenizer = Tokenizer(state=np.zeros(3))
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=2)
        state, _ = on_step.restore_or_init({"t": tokenizer, "w": jnp.zeros(2)})
        for step in range(1, 4):
            tokenizer.state += 1
            on_step(step, {"t": tokenizer, "w": state["w"] + step})
        tokenizer.state += 10  # after the report: not part of step 3
        ckpt.wait()
    assert ckpt.steps() == [2, 3]
    for step in (2, 3):
        found = flaxckpt.load(tmp_path / "run", step=step)["t"]
        assert isinstance(found, Tokenizer)
        assert (found.state == step).all()


def test_save_in_progress_keeps_values_of_call(tmp_path):
    tokenizer = Tokenizer(["a"], np.zeros(1000))
    handle = flaxckpt.save_async(tmp_path / "a", {"t": tokenizer})
    tokenizer.state += 1
    tokenizer.vocabulary.append("b")
    handle.wait()
    found = flaxckpt.load(tmp_path / "a")["t"]
    assert found.vocabulary == ["a"]
    assert not found.state.any()


# ---- restores of a part, transforms, templates -----------------------------------


def test_transforms_reach_parts(tmp_path):
    state = {"a": quantized(), "b": {"w": jnp.ones(3)}}
    flaxckpt.save(tmp_path / "a", state, transforms=[cast(".*/scale", "bfloat16")])
    found = flaxckpt.load(tmp_path / "a")["a"]
    assert isinstance(found, Quantized)
    assert found.scale.dtype == jnp.bfloat16
    template = {"c": quantized(dtype=jnp.int32)}
    found = flaxckpt.load(
        tmp_path / "a", template, transforms=[rename({"a/(.*)": r"c/\1"})]
    )
    assert found["c"].values.dtype == jnp.int32
    assert found["c"].scale.dtype == jnp.float32
    moved = flaxckpt.load(tmp_path / "a", transforms=[rename({"b/w": "v"})])
    assert isinstance(moved["a"], Quantized)
    # Without all its parts, it is no leaf of this class any more.
    assert (
        type(flaxckpt.load(tmp_path / "a", transforms=[drop("a/scale")])["a"]) is dict
    )


def test_template_may_be_partial_or_abstract(tmp_path):
    state = {"a": quantized(), "b": [quantized(value=2), jnp.ones(4)]}
    flaxckpt.save(tmp_path / "a", state)
    assert_same({"a": state["a"]}, flaxckpt.load(tmp_path / "a", {"a": state["a"]}))
    abstract = flaxckpt.abstract_state(state)
    assert_same(state, flaxckpt.load(tmp_path / "a", abstract))
    assert not flaxckpt.plan(tmp_path / "a", abstract).problems
    own = {"a": Quantized(*map(jax.typeof, (state["a"].values, state["a"].scale)))}
    own = jax.tree.map(lambda _: quantized(), own)
    assert_same({"a": state["a"]}, flaxckpt.load(tmp_path / "a", own))
    infos = flaxckpt.parameter_infos(state)
    assert infos["a"]["values"].path == "a/values"
    assert flaxckpt.diff(tmp_path / "a", tmp_path / "a").is_empty


def test_leaf_may_be_whole_state(tmp_path):
    flaxckpt.save(tmp_path / "a", quantized())
    assert_same(quantized(), flaxckpt.load(tmp_path / "a"))
    assert_same(quantized(), flaxckpt.load(tmp_path / "a", quantized(value=0)))


def test_abstract_state_decides_sharding_of_parts(tmp_path):
    mesh = jax.make_mesh((len(jax.devices()),), ("x",))
    rows = len(jax.devices())
    state = {"q": quantized(rows)}
    flaxckpt.save(tmp_path / "a", state)
    spec = jax.sharding.PartitionSpec("x")
    abstract = flaxckpt.abstract_state(
        state,
        mesh=mesh,
        leaf_rules={"q/values": spec, ".*": jax.sharding.PartitionSpec()},
    )
    found = flaxckpt.load(tmp_path / "a", abstract)
    assert found["q"].values.sharding.spec == spec
    assert_same(state, jax.tree.map(lambda leaf: leaf, found))


# ---- errors ----------------------------------------------------------------------


def test_error_names_all_leaves_rejecting_their_parts(tmp_path):
    def wrong():
        return Quantized(jnp.ones((3, 2)), jnp.ones(5))

    flaxckpt.save(tmp_path / "a", {"x": {"a/b": wrong()}, "y": [wrong(), quantized()]})
    with pytest.raises(errors.RestoreMismatchError) as caught:
        flaxckpt.load(tmp_path / "a")
    assert [found.leaf for found in caught.value.mismatches] == ["x/a%2Fb", "y/0"]
    first = caught.value.mismatches[0]
    assert first.wanted.endswith("test_leaf_types:Quantized")
    assert first.found == (
        "values float32[3, 2], scale float32[5] (from_arrays raised ValueError:"
        " (5,) scales of (3, 2) values)"
    )
    assert len(str(caught.value).splitlines()) < 15
    dicts = {"x": {"a/b": {"scale": jnp.zeros(5)}}}
    assert flaxckpt.load(tmp_path / "a", dicts, unused="ignore")["x"]["a/b"][
        "scale"
    ].any()


def test_error_names_parts_not_matching_template(tmp_path):
    flaxckpt.save(tmp_path / "a", {"q": quantized(3)})
    with pytest.raises(errors.RestoreMismatchError, match="q/values: wanted int8"):
        flaxckpt.load(tmp_path / "a", {"q": quantized(4)})
    with pytest.raises(errors.RestoreMismatchError, match="t/vocabulary/0: wanted a s"):
        flaxckpt.load(tmp_path / "a", {"t": Tokenizer(["a"])})


@pytest.mark.parametrize("vocabulary", [[], ["a"]])
def test_partial_leaf_restore_requires_unused_ignore(tmp_path, vocabulary):
    flaxckpt.save(tmp_path / "a", {"t": Tokenizer(["a", "b"]), "w": 1})
    template = {"t": Tokenizer(vocabulary)}
    with pytest.raises(errors.RestoreMismatchError) as caught:
        flaxckpt.load(tmp_path / "a", template)
    wrong = ["t/vocabulary/0", "t/vocabulary/1"][len(vocabulary) :]
    assert [found.leaf for found in caught.value.mismatches] == wrong
    assert 'unused="ignore"' in str(caught.value)
    found = flaxckpt.load(tmp_path / "a", template, unused="ignore")
    assert found["t"].vocabulary == vocabulary


@pytest.mark.parametrize(
    ("parts", "path", "told"),
    [
        (lambda: 1 / 0, "x/p", "whose to_arrays raised ZeroDivisionError: division"),
        (lambda: [1, 2], "x/p", "whose to_arrays returned a list, not a dict"),
        (lambda: {1: 2}, "x/p", "a dict with the key 1, not a name"),
        ({"a": object()}, "x/p/a", "a builtins.object"),
        ({"a": {"b": lambda: 3}}, "x/p/a/b", "a function|the function"),
    ],
)
def test_error_names_leaf_with_unsavable_parts(tmp_path, parts, path, told):
    with pytest.raises(errors.UnsupportedLeafError, match=told) as caught:
        flaxckpt.save(tmp_path / "a", {"x": {"p": Picky(parts)}, "y": object()})
    assert list(caught.value.leaves) == [path, "y"]
    assert not list(tmp_path.iterdir())


def test_self_containing_leaf_raises_error(tmp_path):
    leaf = Picky({})
    leaf._parts = {"a": leaf}
    with pytest.raises(errors.LeafNameError, match="is nested"):
        flaxckpt.save(tmp_path / "a", {"x": leaf})


def test_from_arrays_must_return_its_class(tmp_path, monkeypatch):
    flaxckpt.save(tmp_path / "a", {"p": Picky({"a": 1})})
    with monkeypatch.context():
        flaxckpt.register_leaf(Picky, to_arrays=Picky.parts, from_arrays=dict)
    try:
        with pytest.raises(
            errors.RestoreMismatchError, match="from_arrays returned a dict instead"
        ):
            flaxckpt.load(tmp_path / "a")
    finally:
        flaxckpt.register_leaf(Picky, to_arrays=Picky.parts, from_arrays=Picky)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((quantized(), Quantized.parts, Quantized.of), "cls must be a class"),
        ((dict, dict, dict), "saved as it is"),
        ((Pair, Pair._asdict, Pair), "saved as it is"),
        ((np.float32, dict, dict), "saved as it is"),
        ((object, dict, dict), "saved as it is"),
        ((Quantized, None, Quantized.of), "to_arrays must be a function, got None"),
        ((Quantized, Quantized.parts, 1), "from_arrays must be a function, got 1"),
    ],
)
def test_register_leaf_rejects_native_classes_and_invalid_functions(given, told):
    cls, to_arrays, from_arrays = given
    with pytest.raises(errors.OptionError, match=told):
        flaxckpt.register_leaf(cls, to_arrays=to_arrays, from_arrays=from_arrays)
