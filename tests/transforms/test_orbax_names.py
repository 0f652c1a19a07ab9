"""Orbax restores leaves with its own names into NNX states, and flaxckpt both names."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from hypothesis import example, given
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import errors
from flaxckpt.integrations.orbax import CheckpointHandler, SaveArgs
from flaxckpt.transforms import cast, inverse, rename, transpose, use_orbax_names
from tests.helpers import optax_zoo, strategies
from tests.transforms.states import apply, leaf_table

# Orbax warns whenever an array is read without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")

NAMES = [use_orbax_names()]
BOXES = (nnx.Variable, linen.Partitioned)


class Model(nnx.Module):
    """Variables of several classes; of a tree, of None, of random keys; tuple keys."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.quantized = nnx.Param({"q": jnp.arange(4), "scale": jnp.ones(2)})
        self.bias = nnx.Param(None)
        self.spectral = nnx.SpectralNorm(nnx.Linear(3, 3, rngs=rngs), rngs=rngs)


class Plain(nnx.Module):
    """The parameters of `Model` of floats."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 3, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def filled(tree):
    """Returns the tree with float leaves that all differ."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(
        leaf + i if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        for i, leaf in enumerate(leaves)
    )


def train_state():
    """Returns a state with the params in an `nnx.State`, and counters in none."""
    params = nnx.state(Plain(nnx.Rngs(0)), nnx.Param)
    state = TrainState.create(apply_fn=None, params=params, tx=TX)
    return filled(state.replace(step=jnp.int32(3)))


def optimizer_state():
    return filled(nnx.state(nnx.Optimizer(Plain(nnx.Rngs(0)), TX, wrt=nnx.Param)))


def boxed():
    def box(value):
        return linen.Partitioned(value, names=(None,))

    return {
        "box": box(jnp.ones(2)),
        "of_tree": box({"a": jnp.ones(2), "b": (jnp.zeros(1), None)}),
        "in_variable": nnx.Param(box(jnp.ones(3))),
        "plain": {"value": jnp.ones(4), "values": {"value": jnp.ones(5)}},
    }


STATES = {
    "state": lambda: filled(nnx.state(Model(nnx.Rngs(0)))),
    "optimizer": optimizer_state,
    "TrainState": train_state,
    "boxes": boxed,
    "variable": lambda: nnx.Param(jnp.arange(3)),
    "variable of a tree": lambda: nnx.Param({"a": jnp.arange(3)}),
    "pure dict": lambda: nnx.to_pure_dict(nnx.state(Plain(nnx.Rngs(0)))),
}


@pytest.fixture(params=sorted(STATES))
def state(request):
    return STATES[request.param]()


def orbax_saved(path, state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
    return path


def orbax_restored(path, state):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, blank(state))


def blank(state):
    return jax.tree.map(
        lambda x: (
            jax.random.key(9)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else jnp.zeros_like(x)
        ),
        state,
    )


def names(item):
    """Returns the keys and types of the leaves in Orbax's metadata of an item."""
    rows = json.loads((item / "_METADATA").read_text())["tree_metadata"].values()
    return {
        tuple((key["key"], key["key_type"]) for key in row["key_metadata"]): row[
            "value_metadata"
        ]["value_type"]
        for row in rows
    }


def check(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(strategies.assert_same_bits, wanted, found)


def classes(state):
    """Returns the classes of the variables and boxes."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, BOXES))
    return [type(node) for node in nodes]


# ---- with Orbax ---------------------------------------------------------------------


def test_orbax_restores_state_under_its_own_names(tmp_path, state):
    flaxckpt.save(tmp_path / "ours", state, transforms=NAMES)
    orbax_saved(tmp_path / "orbax", state)
    assert names(tmp_path / "ours" / "state") == names(tmp_path / "orbax")
    check(orbax_restored(tmp_path / "ours" / "state", state), state)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("source", ["ours", "renamed", "orbax"])
@pytest.mark.parametrize("undone", [False, True])
def test_flaxckpt_restores_all_names(tmp_path, state, source, undone):
    path = tmp_path / source
    if source == "orbax":
        orbax_saved(path, state)
    else:
        flaxckpt.save(path, state, transforms=NAMES if source == "renamed" else ())
    undo = inverse(NAMES) if undone else []
    check(flaxckpt.load(path, blank(state), transforms=undo), state)
    plan = flaxckpt.plan(path, blank(state), transforms=undo)
    assert {leaf.actions[0] for leaf in plan.leaves.values()} == {"loaded"}


def test_load_without_template_restores_classes(tmp_path, state):
    flaxckpt.save(tmp_path / "plain", state)
    flaxckpt.save(tmp_path / "renamed", state, transforms=NAMES)
    wanted = flaxckpt.load(tmp_path / "plain")
    found = flaxckpt.load(tmp_path / "renamed")
    keys = [jax.tree_util.tree_leaves_with_path(tree) for tree in (found, wanted)]
    assert [key for key, _ in keys[0]] == [key for key, _ in keys[1]]
    for (_, one), (_, other) in zip(*keys, strict=True):
        strategies.assert_same_bits(one, other)
    assert type(found) is type(wanted)
    assert classes(found) == classes(wanted)


def test_pure_dict_takes_values_of_variables(tmp_path):
    state = nnx.state(Plain(nnx.Rngs(0)))
    flaxckpt.save(tmp_path / "c", state, transforms=NAMES)
    orbax_saved(tmp_path / "orbax", state)
    wanted = nnx.to_pure_dict(state)
    for path in (tmp_path / "c", tmp_path / "orbax"):
        for undo in ((), inverse(NAMES)):
            check(flaxckpt.load(path, blank(wanted), transforms=undo), wanted)


def test_restores_module_with_its_sharing(tmp_path):
    model = Plain(nnx.Rngs(0))
    model.layers[1] = model.layers[0]
    flaxckpt.save(tmp_path / "c", model, transforms=NAMES)
    check(orbax_restored(tmp_path / "c" / "state", nnx.state(model)), nnx.state(model))
    other = Plain(nnx.Rngs(1))
    other.layers[1] = other.layers[0]
    found = flaxckpt.load(tmp_path / "c", other)
    assert found.layers[0] is found.layers[1]
    check(nnx.state(found), nnx.state(model))


def test_converts_checkpoint_to_orbax_names_and_back(tmp_path, state):
    flaxckpt.save(tmp_path / "ours", state)
    flaxckpt.convert(tmp_path / "ours", tmp_path / "theirs", transforms=NAMES)
    check(orbax_restored(tmp_path / "theirs" / "state", state), state)
    flaxckpt.convert(tmp_path / "theirs", tmp_path / "back", transforms=inverse(NAMES))
    back = flaxckpt.metadata(tmp_path / "back").leaves
    is_plain = isinstance(state, dict) and "plain" in state
    if not is_plain:  # a dict of `value` looks like a box
        assert back.keys() == flaxckpt.metadata(tmp_path / "ours").leaves.keys()
    check(flaxckpt.load(tmp_path / "theirs", blank(state)), state)


def test_checkpoint_manager_with_our_handler_saves_orbax_names(tmp_path):
    state = train_state()
    handler = CheckpointHandler(transforms=NAMES)
    with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        manager.save(1, args=SaveArgs(state))
    with ocp.CheckpointManager(tmp_path) as manager:
        args = ocp.args.StandardRestore(blank(state))
        check(manager.restore(1, args=args), state)


# ---- in a run -----------------------------------------------------------------------


def test_run_resumes_from_its_own_and_orbax_steps(tmp_path, state):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
    with flaxckpt.Checkpointer(tmp_path, items="default", transforms=NAMES) as run:
        check(run.restore(blank(state)), state)
        run.save(2, state).wait()
        check(run.restore(blank(state)), state)
        assert run.metadata(2).transforms == ("use_orbax_names()",)
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            args = ocp.args.StandardRestore(blank(state))
            check(manager.restore(step, args=args), state)


def test_resumed_run_loses_no_leaf(tmp_path, caplog, state):
    kinds = [NAMES]
    if all(x.dtype == jnp.float32 for x in jax.tree.leaves(state)):
        kinds.append([cast(".*", "bfloat16"), *NAMES])
    for n, changes in enumerate(kinds):
        with flaxckpt.Checkpointer(tmp_path / str(n), transforms=changes) as run:
            run.save(1, state)
    assert not caplog.records


# ---- optimizers ---------------------------------------------------------------------


def in_variables(tree):
    return jax.tree.map(nnx.Param, tree)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted(optax_zoo.ZOO))
def test_moments_stay_with_their_parameters(tmp_path, name):
    if name == "masked by a tree":
        pytest.skip("its mask has no variables")
    params = in_variables(optax_zoo.PARAMS)
    opt_state = optax_zoo.ZOO[name].init(params)
    state = filled({"params": params, "opt_state": opt_state})
    table = leaf_table(state)
    renamed = apply(NAMES, table)
    back = apply(inverse(NAMES), renamed, table)
    assert [leaf.info.role for leaf in back.values()] == [
        leaf.info.role for leaf in table.values()
    ]
    flaxckpt.save(tmp_path / "c", state, transforms=NAMES)
    stored = flaxckpt.metadata(tmp_path / "c").leaves
    assert {path: leaf.role for path, leaf in stored.items()} == {
        path: renamed[path].info.role for path in stored
    }
    check(flaxckpt.load(tmp_path / "c", blank(state)), state)


def test_finds_moments_in_another_chain_and_transforms_them(tmp_path):
    params = in_variables({"w": jnp.arange(6.0).reshape(2, 3)})
    tx = optax.adam(1e-2)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    state = state.apply_gradients(grads=params)
    flaxckpt.save(tmp_path / "c", state, transforms=NAMES)

    other = optax.chain(optax.clip(1.0), tx)
    wanted = TrainState.create(apply_fn=None, params=params, tx=other)
    found = flaxckpt.load(tmp_path / "c", wanted)
    check(found.opt_state[1][0], state.opt_state[0])

    flaxckpt.save(tmp_path / "plain", state)
    turned = jax.tree.map(lambda x: jnp.matrix_transpose(x), params)
    wanted = TrainState.create(apply_fn=None, params=turned, tx=tx)
    for path, name in (("plain", "params/w"), ("c", "params/w/value")):
        change = transpose(name)
        found = flaxckpt.load(tmp_path / path, wanted, transforms=[change])
        for moments, old in (
            (found.opt_state[0].mu, state.opt_state[0].mu),
            (found.opt_state[0].nu, state.opt_state[0].nu),
        ):
            np.testing.assert_array_equal(moments["w"][...], old["w"][...].T)


# ---- tables -------------------------------------------------------------------------

FIELDS = st.sampled_from(("value", "raw_value", "a", "b/c"))


def containers(children):
    return st.one_of(
        st.dictionaries(FIELDS, children, min_size=1, max_size=2),
        st.lists(children, min_size=1, max_size=2).map(tuple),
        children.map(lambda value: linen.Partitioned(value, names=())),
        children.filter(lambda value: not has_variable(value)).map(nnx.Param),
    )


def has_variable(tree):
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return any(isinstance(leaf, nnx.Variable) for leaf in leaves)


trees = st.recursive(
    st.builds(lambda n: np.arange(n), st.integers(0, 3)), containers, max_leaves=6
)


def join(names):
    """Returns the leaf path of keys with these names."""
    return "/".join(str(name).replace("%", "%25").replace("/", "%2F") for name in names)


@given(tree=trees)
@example(  # the name of one leaf with fields is the path of the other
    tree=linen.Partitioned(
        {"raw_value": np.arange(0), "value": {"raw_value": np.arange(0)}}, names=()
    )
)
def test_names_match_jax_and_are_undone(tree):
    table = leaf_table(tree)
    renamed = apply(NAMES, table)
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    assert sorted(renamed) == sorted(
        join(jax.tree_util.keystr((key,), simple=True) for key in path)
        for path, _ in paths
    )
    assert [
        leaf.source is old.source
        for leaf, old in zip(renamed.values(), table.values(), strict=True)
    ] == [True] * len(table)
    for path, leaf in renamed.items():
        assert join(key.name for key in leaf.info.keys) == path
    assert apply(NAMES, renamed) == renamed
    back = apply(inverse(NAMES), renamed, table)
    assert list(back) == list(table)
    for path, leaf in back.items():
        assert [k.name for k in leaf.info.keys] == [
            k.name for k in table[path].info.keys
        ]


def test_adds_names_after_other_transforms():
    table = leaf_table({"params": in_variables({"dense": {"kernel": np.ones((2, 3))}})})
    for change, wanted in (
        (rename("params/(.*)", r"model/\1"), "model/dense/kernel/value"),
        (rename("params/dense/kernel", "w"), "w/value"),
        (cast(".*", "bfloat16"), "params/dense/kernel/value"),
        (transpose(".*"), "params/dense/kernel/value"),
    ):
        assert [*apply([change, *NAMES], table)] == [wanted]


def test_colliding_names_raise_error():
    table = leaf_table({"a": nnx.Param({"b": np.ones(1)}), "c": np.ones(2)})
    with pytest.raises(errors.OptionError, match=r"a/value/b: by a/b, a/value/b"):
        apply([rename("c", "a/value/b"), *NAMES], table)
