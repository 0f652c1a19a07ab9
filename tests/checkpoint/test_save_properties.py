"""Whatever is saved without an error comes back equal, or was refused at the save."""

import contextlib
import json

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import errors
from tests.helpers import strategies

pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
]

few_examples = hypothesis.settings(
    max_examples=25,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.data_too_large,
        hypothesis.HealthCheck.filter_too_much,
    ],
)
widths = pytest.mark.parametrize(
    "x64",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["32 bits", "64 bits"],
)


@contextlib.contextmanager
def x64_set(value):
    """jax with or without 64 bits."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", value)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def has_module(state):
    """Whether a state comes back without a template as another class."""
    return isinstance(state, dict) and isinstance(state.get("model"), strategies.Module)


def abstract(state):
    """A state with the shapes and types of its arrays of jax."""
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=_is_weak(leaf))
            if isinstance(leaf, jax.Array)
            else leaf
        ),
        state,
    )


def _is_weak(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return not is_key and leaf.weak_type


@widths
@few_examples
@hypothesis.given(st.data())
def test_acknowledged_save_round_trips(tmp_path_factory, x64, data):
    with x64_set(x64):
        state = data.draw(strategies.any_states(x64=x64), "state")
        layout = data.draw(strategies.layouts, "layout")
        metadata = data.draw(strategies.any_metadata, "metadata")
        path = tmp_path_factory.mktemp("save") / "c"
        try:
            flaxckpt.save(path, state, layout=layout, metadata=metadata)
        except errors.CheckpointError:
            assert not path.exists()
            hypothesis.reject()
        if not has_module(state):
            found = flaxckpt.load(path, types=strategies.OWN_TYPES)
            strategies.assert_equal(state, found)
            strategies.assert_equal(state, flaxckpt.load(path, abstract(state)))
        strategies.assert_equal(state, flaxckpt.load(path, state))
        strategies.assert_equal(metadata, dict(flaxckpt.metadata(path).custom))
        assert flaxckpt.verify(path).ok


@pytest.mark.slow
@widths
@few_examples
@hypothesis.given(st.data())
def test_acknowledged_step_round_trips(tmp_path_factory, x64, data):
    with x64_set(x64):
        state = data.draw(strategies.any_states(x64=x64), "state")
        layout = data.draw(strategies.layouts, "layout")
        metadata = data.draw(strategies.any_metadata, "metadata")
        metrics = data.draw(strategies.any_metrics, "metrics")
        root = tmp_path_factory.mktemp("run")
        with flaxckpt.Checkpointer(root, layout=layout) as checkpointer:
            try:
                handle = checkpointer.save(3, state, metrics=metrics, metadata=metadata)
            except errors.CheckpointError:
                assert checkpointer.steps() == []
                hypothesis.reject()
            handle.wait()
            strategies.assert_equal(state, checkpointer.restore(state))
            found = checkpointer.metadata(3)
            strategies.assert_equal(metadata, dict(found.custom))
            strategies.assert_equal(flat(metrics), dict(found.metrics))


def flat(metrics, prefix=""):
    """Metrics as they come back."""
    found = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}/")
        else:
            found[f"{prefix}{name}"] = float(value)
    return found


@few_examples
@hypothesis.given(
    st.recursive(
        st.one_of(
            strategies.any_arrays(("float32", "bfloat16", "int8", "bool", "int64")),
            strategies.any_arrays(("float32", "bfloat16", "uint8")).map(jnp.asarray),
            st.booleans(),
            st.integers(-(2**31), 2**31 - 1),
            st.floats(),
        ),
        lambda children: st.one_of(
            st.dictionaries(strategies.names, children, min_size=1, max_size=4),
            st.dictionaries(strategies.names, children, max_size=3).map(FrozenDict),
            st.lists(children, min_size=1, max_size=3),
        ),
        max_leaves=8,
    ).filter(lambda state: isinstance(state, dict)),
    strategies.layouts,
)
@pytest.mark.slow
def test_stock_orbax_reads_acknowledged_saves(tmp_path_factory, state, layout):
    ocp = pytest.importorskip("orbax.checkpoint")
    path = tmp_path_factory.mktemp("orbax") / "c"
    try:
        flaxckpt.save(path, state, layout=layout)
    except errors.CheckpointError:
        hypothesis.reject()
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(path / "state")
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        value = found
        for key in path:
            value = value[key.idx if hasattr(key, "idx") else key.key]
        wanted, value = np.asarray(leaf), np.asarray(value)
        assert value.tobytes() == wanted.astype(value.dtype).tobytes(), path


@few_examples
@hypothesis.given(strategies.any_metadata)
def test_accepted_metadata_round_trips(metadata):
    path = "memory://test/metadata"
    try:
        flaxckpt.save(path, {"a": 1}, metadata=metadata, overwrite=True)
    except errors.OptionError:
        hypothesis.reject()
    found = flaxckpt.metadata(path).custom
    assert json.dumps(found, sort_keys=True) == json.dumps(metadata, sort_keys=True)
