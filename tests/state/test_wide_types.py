"""Values of 64 bits come back whole, or the restore is refused before it reads."""

import functools
from typing import Any, NamedTuple

import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import numpy as safetensors

import flaxckpt
from flaxckpt import errors
from flaxckpt.transforms import cast, map_leaf, rename
from tests.helpers import strategies

INT = np.array([2**40, 1])
VALUES = {
    "i": INT,
    "u": np.array([2**63 + 1, 1], np.uint64),
    "f": np.array([1e300, 1.0]),
    "c": np.array([1e300j, 1.0]),
}
NARROW = {"i": "int32", "u": "uint32", "f": "float32", "c": "complex64"}


class Pair(NamedTuple):
    first: Any
    second: Any


@flax.struct.dataclass
class Data:
    first: Any
    second: Any


class Counter(nnx.Module):
    def __init__(self, first, second):
        self.first = nnx.Param(first)
        self.second = nnx.Variable(second)


KINDS = {
    "dict": lambda first, second: {"first": first, "second": second},
    "FrozenDict": lambda first, second: FrozenDict(first=first, second=second),
    "list": lambda first, second: [first, [second]],
    "NamedTuple": Pair,
    "dataclass": Data,
    "NNX": Counter,
}
kinds = pytest.mark.parametrize("kind", KINDS)


def abstract(tree):
    """The same state with `ShapeDtypeStruct`s."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def assert_refused(load, leaves, *, advises_cast=True):
    """Says that a restore is refused for exactly these leaves; returns the text."""
    with pytest.raises(errors.RestoreMismatchError) as info:
        load()
    assert {m.leaf for m in info.value.mismatches} == set(leaves)
    text = str(info.value)
    assert "jax_enable_x64" in text
    assert "numpy" in text
    assert ("cast(" in text) == advises_cast
    assert len(text.splitlines()) < 15
    return text


@pytest.fixture
def path(tmp_path):
    flaxckpt.save(tmp_path / "wide", VALUES)
    return tmp_path / "wide"


@pytest.mark.parametrize("name", VALUES)
def test_rejects_abstract_64_bit_leaf(path, name):
    wanted = abstract({name: VALUES[name]})
    text = assert_refused(lambda: flaxckpt.load(path, wanted, unused="ignore"), {name})
    assert f'cast("{name}", "{NARROW[name]}"' in text
    assert f"{VALUES[name].dtype}[2]" in text


def test_plan_reports_all_64_bit_leaves(path):
    planned = flaxckpt.plan(path, abstract(VALUES))
    assert {m.leaf for m in planned.problems} == VALUES.keys()
    assert planned.count("conflict") == 4
    assert planned.bytes_to_read == 0
    assert str(planned).count("jax without jax_enable_x64 has at most") == 4


def test_remedies_named_in_error_work(path):
    strategies.assert_same(VALUES, flaxckpt.load(path, VALUES))
    with jax.enable_x64(True):
        found = flaxckpt.load(path, abstract(VALUES))
        strategies.assert_same_bits(jnp.asarray(INT), found["i"])
    casts = [
        cast(name, dtype, lossy=dtype != "float32") for name, dtype in NARROW.items()
    ]
    narrow = {k: jax.ShapeDtypeStruct((2,), NARROW[k]) for k in VALUES}
    found = flaxckpt.load(path, narrow, transforms=casts)
    assert {k: str(v.dtype) for k, v in found.items()} == NARROW
    # The error gives just this call.
    text = assert_refused(lambda: flaxckpt.load(path, abstract(VALUES)), VALUES)
    for transform in casts:
        assert str(transform).replace("'", '"') in text


@kinds
def test_every_kind_of_state_loads_only_with_x64(tmp_path, kind):
    with jax.enable_x64(True):
        state = KINDS[kind](jnp.asarray(INT), jnp.asarray(VALUES["f"]))
        flaxckpt.save(tmp_path / "c", state)
        structs = nnx.eval_shape(lambda: state)
        strategies.assert_same_state(state, flaxckpt.load(tmp_path / "c", structs))
    leaves = flaxckpt.metadata(tmp_path / "c").leaves
    for wanted in (state, structs):  # the live arrays, and abstract ones
        assert_refused(lambda w=wanted: flaxckpt.load(tmp_path / "c", w), leaves)
        problems = flaxckpt.plan(tmp_path / "c", wanted).problems
        assert {m.leaf for m in problems} == leaves.keys()


@kinds
def test_numpy_leaves_keep_64_bits_in_every_kind_of_state(tmp_path, kind):
    state = KINDS[kind](INT, VALUES["f"])
    flaxckpt.save(tmp_path / "c", state)
    strategies.assert_same_state(state, flaxckpt.load(tmp_path / "c", state))


def test_rejects_sharded_64_bit_leaf(path):
    mesh = jax.make_mesh((2,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    wanted = {"i": jax.ShapeDtypeStruct((2,), np.int64, sharding=sharding)}
    assert_refused(lambda: flaxckpt.load(path, wanted, unused="ignore"), {"i"})
    with jax.enable_x64(True):
        found = flaxckpt.load(path, wanted, unused="ignore")["i"]
        assert found.sharding == sharding
        np.testing.assert_array_equal(found, INT)


def test_rejects_large_64_bit_leaf_of_many_chunks(tmp_path):
    state = {"x": np.arange(2**16) + 2**40}
    layout = flaxckpt.ArrayLayout(chunk_bytes=2**16, codec="zstd")
    flaxckpt.save(tmp_path / "c", state, layout=layout)
    assert_refused(lambda: flaxckpt.load(tmp_path / "c", abstract(state)), {"x"})


def test_widens_to_64_bits_only_in_numpy_leaves(tmp_path):
    """A leaf of 32 bits cannot become one of 64 that jax does not have."""
    flaxckpt.save(tmp_path / "c", {"x": jnp.arange(3), "y": jnp.ones(3)})
    wanted = abstract({"x": np.arange(3), "y": np.ones(3)})
    assert_refused(lambda: flaxckpt.load(tmp_path / "c", wanted), {"x", "y"})
    found = flaxckpt.load(tmp_path / "c", {"x": np.arange(3), "y": np.ones(3)})
    assert found["x"].dtype == np.int64
    assert found["y"].dtype == np.float64


# ---- ways to restore ----------------------------------------------------------------


def train_state():
    params = {"w": jnp.asarray(VALUES["f"])}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1))


def test_resume_rejects_64_bit_leaves_without_x64(tmp_path):
    with jax.enable_x64(True):
        state = train_state()
        with flaxckpt.Checkpointer(tmp_path) as ckpt:
            ckpt.save(1, state)
    wide = {"params/w", "opt_state/0/mu/w", "opt_state/0/nu/w"}
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        assert_refused(lambda: ckpt.restore(state), wide)
        on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=1)
        resume = functools.partial(on_step.restore_or_init, state)
        assert_refused(resume, wide, advises_cast=False)


def test_source_rejects_64_bit_leaves_without_x64(tmp_path):
    with jax.enable_x64(True):
        state = train_state()
        flaxckpt.save(tmp_path / "source", state)
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=1)
        assert_refused(
            lambda: on_step.restore_or_init(state, source=tmp_path / "source"),
            {"params/w", "opt_state/0/mu/w", "opt_state/0/nu/w"},
        )


def test_rejects_initializing_64_bit_optimizer_leaves(tmp_path):
    flaxckpt.save(tmp_path / "c", {"params": {"w": jnp.ones(2)}})
    with jax.enable_x64(True):
        state = train_state()
    wanted = state.replace(params={"w": jnp.ones(2)})
    with pytest.raises(errors.RestoreMismatchError, match="jax_enable_x64") as info:
        flaxckpt.load(tmp_path / "c", wanted, missing="init")
    wide = {m.leaf for m in info.value.mismatches}
    assert wide == {"opt_state/0/mu/w", "opt_state/0/nu/w"}


def test_keeps_64_bit_values_of_target_state(tmp_path):
    flaxckpt.save(tmp_path / "c", {"x": jnp.ones(2)})
    with jax.enable_x64(True):
        own = jnp.asarray(INT)
    wanted = {"x": jnp.zeros(2), "own": own}
    assert flaxckpt.load(tmp_path / "c", wanted, missing="init")["own"] is own


@pytest.mark.parametrize("format_name", ["safetensors", "msgpack", "orbax"])
def test_rejects_64_bit_leaves_of_other_formats(tmp_path, format_name):
    path = tmp_path / "x"
    values = {"i": INT, "f": VALUES["f"]}
    if format_name == "safetensors":
        path = tmp_path / "x.safetensors"
        safetensors.save_file(values, path)
    elif format_name == "msgpack":
        path.write_bytes(flax.serialization.msgpack_serialize(values))
    else:
        ocp = pytest.importorskip("orbax.checkpoint")
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(path, values)
    assert_refused(lambda: flaxckpt.load(path, abstract(values)), values)
    strategies.assert_same_state(values, flaxckpt.load(path, values))


# ---- transforms ---------------------------------------------------------------------


def twice(x):
    return x * 2


TRANSFORMS = {
    "map": [map_leaf("i", twice)],
    "cast": [cast("i", "int64", lossy=True)],
    "rename": [rename("i", "j"), rename("j", "i")],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_keep_64_bits_or_raise_error(path, name):
    options = {"transforms": TRANSFORMS[name], "unused": "ignore"}
    factor = 2 if name == "map" else 1
    wanted = abstract({"i": INT})
    assert_refused(lambda: flaxckpt.load(path, wanted, **options), {"i"})
    found = flaxckpt.load(path, {"i": np.zeros(2, np.int64)}, **options)
    np.testing.assert_array_equal(found["i"], factor * INT)
    with jax.enable_x64(True):
        found = flaxckpt.load(path, wanted, **options)
        np.testing.assert_array_equal(found["i"], factor * INT)


def test_cast_to_64_bits_needs_numpy_state(tmp_path):
    flaxckpt.save(tmp_path / "c", {"x": jnp.arange(3), "y": jnp.ones(3)})
    wide = [cast("x", "int64"), cast("y", "float64")]
    assert_refused(lambda: flaxckpt.load(tmp_path / "c", transforms=wide), {"x", "y"})
    state = {"x": np.zeros(3, np.int64), "y": np.zeros(3)}
    found = flaxckpt.load(tmp_path / "c", state, transforms=wide)
    assert [v.dtype for v in found.values()] == [np.int64, np.float64]


def test_computed_leaves_have_requested_dtype(tmp_path):
    flaxckpt.save(tmp_path / "c", {"x": jnp.arange(3), "y": jnp.ones(3)})
    state = {"x": np.zeros(3, np.int64), "y": np.zeros(3)}
    found = flaxckpt.load(tmp_path / "c", state, transforms=[map_leaf(".", twice)])
    assert [v.dtype for v in found.values()] == [np.int64, np.float64]


# ---- numbers ------------------------------------------------------------------------

NUMBERS = {"i": 2**40, "n": -1, "f": 1e300, "c": 1e300j, "h": 0.1, "inf": float("inf")}
layouts = pytest.mark.parametrize("codec", ["none", "zstd"])
ways = pytest.mark.parametrize("way", ["read", "computed"])


@layouts
@ways
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("i", "int32"), ("n", "uint8"), ("f", "float32"), ("c", "complex64")],
)
@pytest.mark.parametrize("is_numpy", [False, True])
def test_rejects_number_too_large_for_dtype(
    tmp_path, codec, way, name, dtype, is_numpy
):
    layout = flaxckpt.ArrayLayout(codec=codec)
    flaxckpt.save(tmp_path / "c", NUMBERS, layout=layout)
    wanted = jax.ShapeDtypeStruct((), dtype)
    if is_numpy:
        wanted = np.dtype(dtype).type(0)
    transforms = [map_leaf(name, lambda x: x + 0)] if way == "computed" else []
    with pytest.raises(errors.RestoreMismatchError, match="found the number"):
        flaxckpt.load(
            tmp_path / "c", {name: wanted}, unused="ignore", transforms=transforms
        )


@layouts
@ways
def test_accepts_number_within_range_of_dtype(tmp_path, codec, way):
    layout = flaxckpt.ArrayLayout(codec=codec)
    flaxckpt.save(tmp_path / "c", NUMBERS, layout=layout)
    wanted = {
        "n": jnp.int8(0),
        "h": jnp.bfloat16(0),
        "inf": np.float16(0),
        "i": np.int64(0),
    }
    transforms = [map_leaf("n|h|inf|i", lambda x: x + 0)] if way == "computed" else []
    found = flaxckpt.load(
        tmp_path / "c", wanted, unused="ignore", transforms=transforms
    )
    assert found["n"] == -1
    assert found["n"].dtype == jnp.int8
    assert found["h"] == jnp.bfloat16(0.1)
    assert found["inf"] == np.inf
    assert found["i"] == 2**40
    assert type(found["i"]) is np.int64


def test_rejects_number_as_64_bit_jax_array(tmp_path):
    flaxckpt.save(tmp_path / "c", NUMBERS)
    wanted = {"i": jax.ShapeDtypeStruct((), np.int64)}
    assert_refused(lambda: flaxckpt.load(tmp_path / "c", wanted, unused="ignore"), "i")


SCALARS = {
    "int8": np.int8(-3),
    "int64": np.int64(2**40),
    "uint64": np.uint64(2**63 + 1),
    "float16": np.float16(1.5),
    "float32": np.float32(0.1),
    "float64": np.float64(1e300),
    "complex128": np.complex128(1e300j),
    "bool": np.bool_(True),
}


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_numpy_scalars_keep_type_and_value(tmp_path, codec):
    path = tmp_path / "c"
    flaxckpt.save(path, SCALARS, layout=flaxckpt.ArrayLayout(codec=codec))
    strategies.assert_same(SCALARS, flaxckpt.load(path))
    strategies.assert_same(SCALARS, flaxckpt.load(path, SCALARS))
    mapped = [map_leaf(".*", lambda x: x)]
    strategies.assert_same(SCALARS, flaxckpt.load(path, transforms=mapped))
    flaxckpt.save(path, SCALARS, transforms=mapped, overwrite=True)
    strategies.assert_same(SCALARS, flaxckpt.load(path))


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (np.int64(3), np.int32(0)),
        (np.int64(3), np.zeros((), np.int32)),
        (np.zeros((), np.int64), np.int32(0)),
        (np.int64(3), jnp.int32(0)),
        (np.uint8(3), np.int8(0)),
        (np.complex128(3), np.complex64(0)),
    ],
)
def test_rejects_narrowing_numpy_scalars(tmp_path, found, wanted):
    flaxckpt.save(tmp_path / "c", {"x": found})
    assert len(flaxckpt.plan(tmp_path / "c", {"x": wanted}).problems) == 1
    with pytest.raises(errors.RestoreMismatchError, match=str(found.dtype)):
        flaxckpt.load(tmp_path / "c", {"x": wanted})
    back = {"x": found}
    strategies.assert_same(back, flaxckpt.load(tmp_path / "c", back))


def test_lossy_cast_narrows_numpy_scalars(tmp_path):
    state = {"n": np.int64(3), "f": np.float64(0.5)}
    flaxckpt.save(tmp_path / "c", state)
    wanted = {"n": jnp.int32(0), "f": np.float64(0)}
    lossy = [cast("n", "int32", lossy=True)]
    found = flaxckpt.load(tmp_path / "c", wanted, transforms=lossy)
    assert found["n"].dtype == np.int32
    assert found["n"] == 3
    kept = flaxckpt.load(tmp_path / "c", transforms=[cast(".*", "bfloat16")])
    strategies.assert_same(state, kept)
    flaxckpt.save(tmp_path / "d", state, transforms=lossy)
    strategies.assert_same({**state, "n": np.int32(3)}, flaxckpt.load(tmp_path / "d"))


def test_numpy_scalars_and_python_numbers_convert_both_ways(tmp_path):
    flaxckpt.save(tmp_path / "c", {"a": np.int64(2**40), "b": 7, "c": np.int8(3)})
    found = flaxckpt.load(tmp_path / "c", {"a": 0, "b": np.int8(0), "c": np.int64(0)})
    wanted = {"a": 2**40, "b": np.int8(7), "c": np.int64(3)}
    strategies.assert_same(wanted, found)
