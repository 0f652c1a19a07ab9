"""Casts happen on the way, to floats, and only where they are asked for."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors
from flaxckpt.transforms import cast
from tests.helpers import strategies

STATE = {
    "params": {"w": jnp.arange(6.0).reshape(2, 3) / 7, "ids": jnp.arange(3)},
    "opt": {"mu": np.linspace(0, 1, 5, dtype=np.float64)},
    "step": 3,
    "rate": 0.1,
}


def test_saves_only_params_in_another_dtype(tmp_path):
    narrow = [cast("params/.*", "bfloat16")]
    flaxckpt.save(tmp_path / "c", STATE, transforms=narrow)
    found = flaxckpt.load(tmp_path / "c")
    wanted = {
        **STATE,
        "params": {**STATE["params"], "w": STATE["params"]["w"].astype(jnp.bfloat16)},
    }
    strategies.assert_same(wanted, found)
    assert flaxckpt.metadata(tmp_path / "c").leaves["params/w"].dtype == "bfloat16"


def test_checkpointer_casts_at_every_save(tmp_path):
    narrow = [cast(".*", jnp.bfloat16)]
    with flaxckpt.Checkpointer(tmp_path, transforms=narrow) as ckpt:
        ckpt.save(1, STATE)
        ckpt.wait()
        leaves = ckpt.metadata(1).leaves
        assert {p: i.dtype for p, i in leaves.items()} == {
            "params/w": "bfloat16",
            "params/ids": "int32",
            "opt/mu": "bfloat16",
            "step": "int64",
            "rate": "float64",
        }
        found = ckpt.restore(STATE)
        assert found["params"]["w"].dtype == jnp.float32


def test_cast_on_load_applies_only_without_state(tmp_path):
    flaxckpt.save(tmp_path / "c", STATE)
    found = flaxckpt.load(tmp_path / "c", transforms=[cast("params/w", "float16")])
    strategies.assert_same_bits(
        STATE["params"]["w"].astype(jnp.float16), found["params"]["w"]
    )
    # A state that is given has the last word.
    found = flaxckpt.load(
        tmp_path / "c", STATE, transforms=[cast("params/w", "float16")]
    )
    strategies.assert_same(STATE, found)


def test_casts_integers_only_with_lossy(tmp_path):
    for dtype in ("int8", "uint32"):
        with pytest.raises(errors.OptionError, match="params/ids"):
            flaxckpt.save(tmp_path / "c", STATE, transforms=[cast("params/ids", dtype)])
    flaxckpt.save(
        tmp_path / "c", STATE, transforms=[cast("params/ids", "int8", lossy=True)]
    )
    found = flaxckpt.load(tmp_path / "c")["params"]["ids"]
    assert found.dtype == jnp.int8
    np.testing.assert_array_equal(found, np.arange(3))


def test_rejects_silent_cast_of_float_to_integer(tmp_path):
    with pytest.raises(errors.OptionError, match="lossy=True"):
        flaxckpt.save(tmp_path / "c", STATE, transforms=[cast("params/w", "int32")])


@pytest.mark.parametrize("pattern", ["params/weight", "w", "(", "param"])
def test_rejects_pattern_without_match_and_unknown_dtype(tmp_path, pattern):
    with pytest.raises(
        errors.OptionError, match=r"params/w|regular expression|no leaf"
    ):
        flaxckpt.save(tmp_path / "c", STATE, transforms=[cast(pattern, "float16")])
    with pytest.raises(errors.OptionError):
        flaxckpt.save(tmp_path / "c", STATE, transforms=[cast("params/w", "text")])


@hypothesis.given(
    hnp.arrays(st.sampled_from(("float16", "float32", "float64")), strategies.shapes),
    st.sampled_from(("float16", "bfloat16", "float32", "float64", "float8_e5m2")),
)
def test_casts_on_save_and_load_like_numpy(tmp_path_factory, array, dtype):
    """On save and on restore, as numpy would."""
    path = tmp_path_factory.mktemp("cast")
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = array.astype(np.dtype(dtype))
        flaxckpt.save(path / "a", {"x": array}, transforms=[cast("x", dtype)])
        flaxckpt.save(path / "b", {"x": array})
        for found in (
            flaxckpt.load(path / "a"),
            flaxckpt.load(path / "b", {"x": wanted}),
            flaxckpt.load(path / "b", transforms=[cast("x", dtype)]),
        ):
            assert found["x"].dtype == wanted.dtype
            np.testing.assert_array_equal(
                found["x"].astype(np.float64), wanted.astype(np.float64)
            )


def test_cast_leaf_keeps_sharding(tmp_path):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    array = jax.device_put(jnp.arange(64.0), NamedSharding(mesh, P("x")))
    flaxckpt.save(tmp_path / "c", {"w": array}, transforms=[cast("w", "bfloat16")])
    found = flaxckpt.load(tmp_path / "c", {"w": array})["w"]
    assert found.sharding == array.sharding
    np.testing.assert_array_equal(found, np.asarray(array.astype(jnp.bfloat16)))


def test_lossy_cast_truncates_like_numpy_without_error(tmp_path):
    """As numpy has it, also where an integer has no such value."""
    state = {"w": np.array([1.9, np.nan, np.inf, -3]), "n": np.array([300, -1, 7])}
    flaxckpt.save(tmp_path / "c", state)
    casts = [cast("w", "int32", lossy=True), cast("n", "uint8", lossy=True)]
    found = flaxckpt.load(tmp_path / "c", transforms=casts)
    assert found["w"].dtype == np.int32
    np.testing.assert_array_equal(found["w"][[0, 3]], [1, -3])
    np.testing.assert_array_equal(found["n"], [300 % 256, 255, 7])
