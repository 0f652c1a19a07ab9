"""What was converted is read by the libraries of both formats, and is what it was."""

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors

import flaxckpt
from flaxckpt import transforms
from tests import GOLDEN
from tests.helpers import strategies
from tests.helpers.golden_cases import CASES, find

ocp = pytest.importorskip("orbax.checkpoint")

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")

LEGACY = {
    "t5x-3-checkpoint_7",
    "t5x-3-checkpoint_9",
    "t5x-3-single_3",
    "streaming-streaming_params",
    "streaming-streaming_train_state",
    "flax-msgpack-checkpoint_3",
    "legacy-orbax-files",
    "legacy-orbax-ocdbt",
    "legacy-orbax-inline",
    "legacy-orbax-both",
    "safetensors-sharded",
    "safetensors-silero",
}
LAYOUTS = {
    "zarr 3": flaxckpt.ArrayLayout(),
    "zarr 2": flaxckpt.ArrayLayout(zarr_version=2),
}

legacy_cases = pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in LEGACY], ids=lambda case: case.name
)


def changes(case):
    """What makes `params` of a T5X's `target`; nothing for other formats."""
    if case.name.startswith("t5x"):
        return [transforms.rename("target/(.*)", r"params/\1")]
    return []


def renamed(path):
    """What `changes` make of a leaf path."""
    head, _, rest = path.partition("/")
    return f"params/{rest}" if head == "target" else path


def stock_orbax(path):
    """What stock Orbax makes of the state of a checkpoint, as numpy arrays."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path / "state")


def assert_holds(tree, case):
    """Compares values, shapes and element types, but not what holds them."""
    for path, value in case.leaves.items():
        strategies.assert_same_bits(value, find(tree, renamed(path)), path)


def assert_same_types(tree, case):
    """Compares what the leaves are, arrays of jax and of numpy being the same."""
    for path, value in case.leaves.items():
        found = find(tree, renamed(path))
        found = np.asarray(found) if isinstance(found, jax.Array) else found
        assert type(found) is type(value), path


def test_covers_all_legacy_cases():
    assert {case.name for case in CASES} >= LEGACY


@pytest.mark.sampled(5)
@legacy_cases
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stock_orbax_reads_conversions_of_other_formats(tmp_path, case, layout):
    flaxckpt.convert(
        case.path, tmp_path / "c", layout=LAYOUTS[layout], transforms=changes(case)
    )
    assert_holds(stock_orbax(tmp_path / "c"), case)
    found = flaxckpt.load(tmp_path / "c")
    assert_holds(found, case)
    assert_same_types(found, case)


@legacy_cases
def test_safetensors_round_trip_is_exact(tmp_path, case):
    middle = tmp_path / "m.safetensors"
    flaxckpt.convert(case.path, middle, format="safetensors", transforms=changes(case))
    tensors = safetensors.load_file(middle)
    for path, value in case.leaves.items():
        found = tensors[renamed(path).replace("/", ".")]
        strategies.assert_same_bits(value, found.view(np.asarray(value).dtype), path)
    flaxckpt.convert(middle, tmp_path / "back")
    found = flaxckpt.load(tmp_path / "back")
    assert_holds(found, case)
    assert_same_types(found, case)
    assert_holds(stock_orbax(tmp_path / "back"), case)


@pytest.mark.sampled(5)
@legacy_cases
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flax_reads_msgpack_converted_through_orbax(tmp_path, case, layout):
    flaxckpt.convert(case.path, tmp_path / "c", layout=LAYOUTS[layout])
    path = tmp_path / "state.msgpack"
    flaxckpt.convert(tmp_path / "c", path, format="msgpack", transforms=changes(case))
    tree = flax.serialization.msgpack_restore(path.read_bytes())
    assert_holds(tree, case)


def test_msgpack_through_orbax_keeps_bytes(tmp_path):
    source = GOLDEN / "flax-msgpack" / "checkpoint_3"
    flaxckpt.convert(source, tmp_path / "c")
    back = tmp_path / "back.msgpack"
    flaxckpt.convert(tmp_path / "c", back, format="msgpack")
    assert back.read_bytes() == source.read_bytes()


def test_every_msgpack_leaf_kind_survives_orbax(tmp_path):
    source = GOLDEN / "flax-msgpack" / "checkpoint_4"
    flaxckpt.convert(source, tmp_path / "c")
    strategies.assert_same(flaxckpt.load(source), flaxckpt.load(tmp_path / "c"))


def test_stream_without_optimizer_becomes_safetensors(tmp_path):
    source = GOLDEN / "streaming" / "streaming_train_state"
    [case] = [c for c in CASES if c.name == "streaming-streaming_params"]
    flaxckpt.convert(
        source,
        tmp_path / "m.safetensors",
        format="safetensors",
        transforms=[
            transforms.keep("params/params/.*"),
            transforms.rename("params/params/(.*)", r"\1"),
            transforms.cast(".*", "float32"),
        ],
    )
    found = safetensors.load_file(tmp_path / "m.safetensors")
    assert {name.replace(".", "/") for name in found} == set(case.leaves)
    for path, value in case.leaves.items():
        assert value.dtype == ml_dtypes.bfloat16
        tensor = found[path.replace("/", ".")]
        strategies.assert_same_bits(value.astype(np.float32), tensor, path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_orbax_round_trips_through_safetensors(tmp_path, layout):
    """Saved by stock Orbax, and read by it again."""
    state = {
        "params": {"w": jnp.arange(24.0).reshape(4, 6), "b": jnp.ones(6, jnp.bfloat16)},
        "opt_state": [{"mu": jnp.zeros(6, jnp.bfloat16)}, {"count": np.int32(3)}],
        "host": np.arange(4, dtype=np.int64) << 40,
        "mask": np.array([True, False]),
        "step": 7,
    }
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", state)
    middle = tmp_path / "m.safetensors"
    flaxckpt.convert(tmp_path / "orbax", middle, format="safetensors")
    flaxckpt.convert(middle, tmp_path / "back", layout=LAYOUTS[layout])
    strategies.assert_same(
        flaxckpt.load(tmp_path / "orbax"), flaxckpt.load(tmp_path / "back")
    )
    with ocp.PyTreeCheckpointer() as checkpointer:
        wanted = checkpointer.restore(tmp_path / "orbax")
    found = stock_orbax(tmp_path / "back")
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    strategies.assert_same_state(wanted, found)
