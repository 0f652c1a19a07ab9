"""Stock Orbax reads what we write, and we read what Orbax writes, bit for bit."""

import json
import shutil
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from tests import GOLDEN
from tests.golden import make_orbax
from tests.helpers.files import flip_bit, largest_file

grain = pytest.importorskip("grain")
ocp = pytest.importorskip("orbax.checkpoint")

from orbax.checkpoint import v1  # noqa: E402

from tests.helpers.orbax_readers import READERS  # noqa: E402
from tests.helpers.orbax_writers import WRITERS  # noqa: E402

# Orbax warns whenever an array is read without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")

STEP = 5
METRICS = {"loss": 0.5, "accuracy": 0.25}
DEVICES = (1, 8)
DTYPES = (
    *("bool", "int2", "int4", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("float16", "bfloat16", "float32", "complex64", "float4_e2m1fn", "float8_e3m4"),
    *("float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
)


# ---- the states ------------------------------------------------------------------


class Counter:
    """The least iterator over batches that can be saved."""

    def __init__(self):
        self.next_index = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.next_index += 1
        return self.next_index - 1

    def get_state(self):
        return {"next_index": self.next_index}

    def set_state(self, state):
        self.next_index = state["next_index"]


class Mlp(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(4)(linen.relu(linen.Dense(16)(x)))


def train_state_of_linen():
    """A TrainState after one update: no leaf is zero by accident."""
    model = Mlp()
    params = model.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    return state.apply_gradients(grads=jax.tree.map(jnp.cos, params))


def state_of_nnx():
    """The states of a model with a random stream, and of its optimizer."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(8, 16, rngs=rngs),
        nnx.Dropout(0.5, rngs=rngs),
        nnx.Linear(16, 4, rngs=rngs),
    )
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    return {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}


def plain_state():
    """Every element type that Orbax holds, and every kind of node."""
    return {
        "dtypes": {name: array_of(name) for name in DTYPES},
        "numpy": [np.arange(3) - 2**40, np.linspace(0, 1, 5), np.asarray(7)],
        "scalars": (jnp.float32(-0.0), jnp.bfloat16(3), jnp.asarray(True)),
        "python": {"int": -(2**40), "float": 0.1},
        "empty": {"none": None, "dict": {}, "list": [], "tuple": ()},
        "zero_size": jnp.zeros((0, 3)),
        "zeros": jnp.zeros((8, 8)),
        "nan": jnp.asarray([np.nan, -np.nan, np.inf, -0.0], jnp.float32),
        "keys": [jax.random.key(1), jax.random.split(jax.random.key(2, impl="rbg"), 3)],
    }


def text_state():
    """Leaves that some of Orbax's readers refuse, in Orbax's own checkpoints too."""
    return {"name": "a/b ü", "done": True, "w": jnp.arange(4.0)}


def array_of(name):
    """An array of all kinds of bits: NaNs, negative zeros and subnormals too."""
    rng = np.random.default_rng(len(name))
    if name in ("int2", "int4"):
        end = 2 ** int(name[-1]) // 2
        return jnp.asarray(rng.integers(-end, end, (8, 4)), name)
    dtype = jnp.dtype(name)
    raw = rng.integers(0, 256, 32 * dtype.itemsize, np.uint8)
    if name in ("bool", "float4_e2m1fn"):
        raw &= 1 if name == "bool" else 15
    return jnp.asarray(raw.view(dtype).reshape(8, 4))


STATES = {
    "linen": train_state_of_linen,
    "nnx": state_of_nnx,
    "plain": plain_state,
    "text": text_state,
}
REFUSED = {
    ("text", "v0_standard_target"),  # a string in the target
    ("text", "v0_manager_standard_target"),
    ("text", "v1_metadata"),  # None as soon as one leaf is a bool
    ("text", "v1_training_metadata"),
}


def place(tree, devices):
    """`tree` with its jax arrays on the last device, or spread over 8 of them."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def sharding(shape):
        if devices == 1:
            return SingleDeviceSharding(jax.devices()[-1])
        axes = zip(shape, mesh.shape.items(), strict=False)
        spec = [axis if n and n % size == 0 else None for n, (axis, size) in axes]
        return NamedSharding(mesh, P(*spec))

    def move(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.device_put(leaf, sharding(leaf.shape))

    return jax.tree.map(move, tree)


def abstract(tree):
    def describe(leaf):
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return leaf

    return jax.tree.map(describe, tree)


def pure(tree):
    """`tree` as Orbax sees it: the wrappers of NNX are no part of our leaf paths."""
    return jax.tree.map(
        lambda x: nnx.to_pure_dict(x) if isinstance(x, nnx.State) else x,
        tree,
        is_leaf=lambda x: isinstance(x, nnx.State),
    )


# ---- the comparison --------------------------------------------------------------


def named(tree):
    """Leaf path -> leaf or empty container."""

    def is_empty(node):
        return node is None or (isinstance(node, dict | list | tuple) and not node)

    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in found
    }


def content(leaf):
    """What must be equal of two leaves: kind, dtype, shape and bits."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(leaf))
        return str(jax.random.key_impl(leaf)), data.shape, data.tobytes()
    if isinstance(leaf, jax.Array | np.ndarray):
        array = np.asarray(leaf)
        return array.dtype, array.shape, array.tobytes()
    if isinstance(leaf, tuple) and hasattr(leaf, "_fields"):
        return type(None), repr(None)
    return type(leaf), repr(leaf)


def assert_same_leaves(read, saved):
    read, saved = named(read), named(saved)
    assert read.keys() == saved.keys()
    different = [
        f"{path}: read {read[path]!r}, saved {leaf!r}"
        for path, leaf in saved.items()
        if content(read[path]) != content(leaf)
    ]
    assert not different


def assert_same_state(read, saved):
    """The same leaves in the same containers, in the same places."""
    assert_same_leaves(read, saved)
    assert jax.tree.structure(read) == jax.tree.structure(saved)
    for path, leaf in named(saved).items():
        if isinstance(leaf, jax.Array):
            assert named(read)[path].sharding == leaf.sharding, path


def assert_describes(metadata, saved):
    metadata, saved = named(metadata), named(saved)
    assert metadata.keys() == saved.keys()
    for path, leaf in saved.items():
        if not isinstance(leaf, jax.Array | np.ndarray):
            continue
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        assert tuple(metadata[path].shape) == leaf.shape, path
        assert np.dtype(metadata[path].dtype) == leaf.dtype, path


# ---- Orbax reads ours ------------------------------------------------------------


class Run(NamedTuple):
    """A run directory with one step, and what was saved in it."""

    root: Path
    state: object


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Saves a state once for all tests: (its name, devices) -> `Run`."""
    runs = {}

    def get(name, devices):
        if (name, devices) not in runs:
            root = tmp_path_factory.mktemp(f"{name}-{devices}")
            state = place(STATES[name](), devices)
            save(root, state, dataset=Counter())
            runs[name, devices] = Run(root, state)
        return runs[name, devices]

    return get


def save(root, state, *, dataset=None, step=STEP):
    with flaxckpt.Checkpointer(root) as checkpointer:
        checkpointer.save(
            step, state, metrics=METRICS, dataset=dataset, metadata={"lr": 0.1}
        )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize(
    ("name", "reader"),
    [(n, r) for n in STATES for r in READERS if (n, r) not in REFUSED],
)
def test_orbax_reads_every_bit_of_ours(ours, name, reader, devices):
    root, state = ours(name, devices)
    saved = pure(state)
    read = READERS[reader](root, STEP, abstract(saved))
    if reader.endswith("metadata"):
        assert_describes(read, saved)
    elif reader.endswith("target"):
        assert_same_state(read, saved)
    else:
        assert_same_leaves(read, saved)


def test_orbax_lists_our_steps_with_their_metrics_and_metadata(ours):
    root, _ = ours("linen", 1)
    with ocp.CheckpointManager(root) as manager:
        assert manager.all_steps() == [STEP]
        assert manager.metrics(STEP) == METRICS
        assert manager.metadata(STEP).custom_metadata["lr"] == 0.1
    with v1.training.Checkpointer(root) as checkpointer:
        assert checkpointer.latest.step == STEP
        assert checkpointer.latest.metrics == METRICS
        assert checkpointer.metadata(STEP).custom_metadata["lr"] == 0.1


def test_orbax_restores_our_items_without_arguments(ours):
    root, state = ours("plain", 1)
    with ocp.CheckpointManager(root) as manager:
        items = manager.restore(STEP)
    assert items.keys() == {"state", "dataset", "metrics"}
    assert items["metrics"] == METRICS
    assert isinstance(items["dataset"], Mapping)
    assert_same_leaves(items["state"], state)


@pytest.mark.parametrize("reader", READERS)
def test_orbax_reads_our_checkpoint_outside_runs(tmp_path, reader):
    state = place({"w": jnp.arange(12.0).reshape(3, 4), "empty": (None, {})}, 1)
    flaxckpt.save(tmp_path / str(STEP), state)
    read = READERS[reader](tmp_path, STEP, abstract(state))
    if reader.endswith("metadata"):
        assert_describes(read, state)
    else:
        assert_same_leaves(read, state)


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("codec", ["none", "compact", "zstd"])
def test_orbax_reads_all_our_layouts(tmp_path, codec, checksum):
    layout = flaxckpt.ArrayLayout(chunk_bytes=256, codec=codec, checksum=checksum)
    state = place({name: array_of(name) for name in DTYPES}, 8)
    state["large"] = np.arange(4096.0).reshape(64, 64)
    flaxckpt.save(tmp_path / str(STEP), state, layout=layout)
    for reader in ("v0_pytree_target", "v1_load_target"):
        read = READERS[reader](tmp_path, STEP, abstract(state))
        assert_same_state(read, state)


@pytest.mark.parametrize(
    "reader", [r for r in READERS if not r.endswith(("target", "metadata"))]
)
def test_orbax_reads_all_kinds_of_numbers(tmp_path, reader):
    state = {
        "w": jnp.arange(3.0),
        "python": {"complex": 1 + 2j, "bool": False, "int": 3, "float": 0.5},
        "numpy": {"float": np.float32(0.1), "bool": np.bool_(True), "int": np.int16(3)},
    }
    flaxckpt.save(tmp_path / str(STEP), state)
    read, saved = named(READERS[reader](tmp_path, STEP, None)), named(state)
    assert read.keys() == saved.keys()
    for path, leaf in saved.items():
        np.testing.assert_array_equal(np.asarray(read[path]), leaf)


@pytest.mark.parametrize(
    "reader", ["v0_standard_target", "v0_pytree", "v1_load", "v1_load_target"]
)
def test_orbax_raises_on_a_flipped_bit_of_ours(tmp_path, reader):
    state = place({"w": jnp.arange(2**14, dtype=jnp.float32)}, 1)
    save(tmp_path, state)
    largest = largest_file(tmp_path / str(STEP) / "state")
    assert largest.stat().st_size >= state["w"].nbytes
    flip_bit(largest, bit=4)
    with pytest.raises(Exception, match="error while reading") as raised:
        READERS[reader](tmp_path, STEP, abstract(state))
    assert "DATA_LOSS" in "".join(traceback.format_exception(raised.value))


# ---- we read Orbax's -------------------------------------------------------------


def foreign_state(*, text):
    """What every writer of Orbax takes, and text for those that take it."""
    plain = plain_state()
    del plain["zero_size"]
    tree = {"train": train_state_of_linen(), "plain": plain}
    return tree | {"text": text_state()} if text else tree


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Lets Orbax save a state once for all tests: (writer, devices) -> `Run`."""
    runs = {}

    def get(writer, devices):
        if (writer, devices) not in runs:
            root = tmp_path_factory.mktemp(f"{writer}-{devices}")
            text = writer not in make_orbax.WITHOUT_TEXT
            state = place(foreign_state(text=text), devices)
            WRITERS[writer](root, STEP, state)
            runs[writer, devices] = Run(root, state)
        return runs[writer, devices]

    return get


@pytest.mark.sampled(3)
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("writer", WRITERS)
def test_load_fits_orbax_checkpoints_to_the_abstract_state(theirs, writer, devices):
    root, state = theirs(writer, devices)
    read = flaxckpt.load(root / str(STEP), abstract(state))
    assert_same_state(read, state)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("writer", WRITERS)
def test_load_reads_orbax_checkpoints_without_abstract_state(theirs, writer, devices):
    root, state = theirs(writer, devices)
    read = flaxckpt.load(root / str(STEP))
    assert_same_leaves(read, state)


@pytest.mark.parametrize("writer", ["v0_standard", "v0_manager", "v1_training"])
def test_load_finds_step_in_orbax_run(theirs, writer):
    root, state = theirs(writer, 1)
    assert_same_leaves(flaxckpt.load(root), state)


@pytest.mark.parametrize("writer", ["v0_standard", "v1_files"])
def test_load_places_orbax_array_on_other_devices(theirs, writer):
    root, saved = theirs(writer, 8)
    wanted = place(saved, 1)  # spreading it again may change a NaN of 8 bits (jax 0.12)
    read = flaxckpt.load(root / str(STEP), abstract(wanted))
    assert_same_state(read, wanted)
    assert_same_leaves(read, saved)


@pytest.mark.parametrize("writer", ["v0_pytree", "v1_save"])
def test_load_strips_nnx_boxes_from_orbax_paths(tmp_path, writer):
    state = place(state_of_nnx(), 1)
    WRITERS[writer](tmp_path, STEP, state)
    read = flaxckpt.load(tmp_path / str(STEP), abstract(state))
    assert_same_state(read, state)


@pytest.mark.parametrize("inner", [{}, None, (optax.EmptyState(), ())])
def test_reads_orbax_checkpoint_without_arrays(tmp_path, inner):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", {"a": inner})
    assert flaxckpt.load(tmp_path / "c", {"a": inner}) == {"a": inner}


@pytest.mark.parametrize("writer", ["v0_manager_composite", "v1_training"])
def test_checkpointer_reads_orbax_steps_and_metrics(theirs, writer):
    root, state = theirs(writer, 1)
    with flaxckpt.Checkpointer(root, read_only=True) as checkpointer:
        assert list(checkpointer.steps()) == [STEP]
        assert checkpointer.metrics(STEP) == {"loss": 0.5}
        assert_same_state(checkpointer.restore(abstract(state)), state)


# ---- dataset iterators -----------------------------------------------------------


def grain_dataset():
    data = grain.MapDataset.range(40).shuffle(seed=1).batch(2)
    return iter(data.to_iter_dataset())


def grain_loader():
    sampler = grain.samplers.IndexSampler(40, shuffle=True, seed=1, num_epochs=1)
    loader = grain.DataLoader(data_source=range(40), sampler=sampler, worker_count=0)
    return iter(loader)


ITERATORS = {"dataset": grain_dataset, "loader": grain_loader}
WEIGHTS = {"w": np.arange(3.0)}


@pytest.fixture(params=ITERATORS)
def iterators(request):
    """An iterator that has given three batches, and one at the start."""
    make = ITERATORS[request.param]
    used = make()
    for _ in range(3):
        next(used)
    return used, make()


def assert_same_batches(left, right):
    for _ in range(3):
        np.testing.assert_array_equal(next(left), next(right))


def test_orbax_and_grain_restore_our_iterator(tmp_path, iterators):
    used, fresh = iterators
    save(tmp_path, WEIGHTS, dataset=used)
    args = ocp.args.Composite(
        state=ocp.args.StandardRestore(WEIGHTS),
        dataset=grain.checkpoint.CheckpointRestore(fresh),
    )
    with ocp.CheckpointManager(tmp_path) as manager:
        items = manager.restore(STEP, args=args)
    assert_same_leaves(items["state"], WEIGHTS)
    assert_same_batches(items["dataset"], used)


def test_orbax_v1_and_grain_restore_our_iterator(tmp_path):
    used, fresh = grain_dataset(), grain_dataset()
    next(used)
    save(tmp_path, WEIGHTS, dataset=used)
    v1.load_checkpointables(tmp_path / str(STEP), {"dataset": fresh})
    assert_same_batches(fresh, used)


def test_restores_iterator_saved_by_orbax_and_grain(tmp_path, iterators):
    used, fresh = iterators
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(WEIGHTS),
        dataset=grain.checkpoint.CheckpointSave(used),
    )
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(STEP, args=args)
    with flaxckpt.Checkpointer(tmp_path, read_only=True) as checkpointer:
        read = checkpointer.restore(WEIGHTS, dataset=fresh)
    assert_same_leaves(read, WEIGHTS)
    assert_same_batches(fresh, used)


def test_restores_iterator_saved_by_orbax_v1_and_grain(tmp_path):
    used, fresh = grain_dataset(), grain_dataset()
    next(used)
    with v1.training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_checkpointables(STEP, {"state": WEIGHTS, "dataset": used})
    with flaxckpt.Checkpointer(tmp_path, read_only=True) as ours:
        ours.restore(WEIGHTS, dataset=fresh)
    assert_same_batches(fresh, used)


# ---- golden checkpoints ----------------------------------------------------------

RELEASES = sorted([folder.name for folder in GOLDEN.glob("orbax-*")])


@pytest.mark.parametrize("variant", make_orbax.VARIANTS)
@pytest.mark.parametrize("release", RELEASES)
def test_load_reads_golden_orbax_checkpoints(release, variant):
    root = GOLDEN / release / variant
    text = variant not in make_orbax.WITHOUT_TEXT
    state = make_orbax.state(make_orbax.SEED, text=text)
    assert_same_leaves(flaxckpt.load(root / str(make_orbax.STEP)), state)
    placed = place(state, 1)
    read = flaxckpt.load(root / str(make_orbax.STEP), abstract(placed))
    assert_same_state(read, placed)


@pytest.mark.parametrize("release", RELEASES)
def test_restore_reads_golden_grain_iterator(release, tmp_path):
    root = shutil.copytree(GOLDEN / release / "v0_grain", tmp_path / "run")
    iterator = iter(grain.MapDataset.range(20).to_iter_dataset())
    with flaxckpt.Checkpointer(root, read_only=True) as checkpointer:
        read = checkpointer.restore(dataset=iterator)
    assert_same_leaves(read, {"kernel": jnp.arange(3.0)})
    assert next(iterator) == make_orbax.NEXT_INDEX
    file = root / str(make_orbax.STEP) / "dataset" / "process_0-of-1.json"
    assert json.loads(file.read_text()) == {"next_index": make_orbax.NEXT_INDEX}
