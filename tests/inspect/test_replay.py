"""A replay finds the first checkpoint that was not computed right, and its leaves."""

import functools
import itertools
import pickle

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import core, nnx, struct
from jax.sharding import NamedSharding, PartitionSpec

import flaxckpt
from flaxckpt import errors
from flaxckpt.datasets import StepIndexed
from tests.helpers import small_runs

KINDS = {"linen": small_runs.linen, "nnx": small_runs.nnx_objects}


def train(run, kind, last, save_every=2, fault=None):
    """Trains a small run; `fault` changes the state after a step: `{step: change}`."""
    state, batches, step = KINDS[kind]()
    with flaxckpt.Checkpointer(run) as checkpointer:
        checkpointer.save(0, state, dataset=batches)
        for n in range(1, last + 1):
            state, _ = step(state, next(batches))
            if fault and n in fault:
                state = fault[n](state)
            if n % save_every == 0:
                checkpointer.save(n, state, dataset=batches)


def replay(run, kind, first, last):
    state, batches, step = KINDS[kind]()
    return flaxckpt.replay(run, first, last, step, batches, abstract_state=state)


def flip(array, index=0, bit=0):
    """Flips a bit of an element."""
    values = np.array(array)
    flat = values.reshape(-1).view(f"uint{8 * values.itemsize}")
    flat[index] ^= flat.dtype.type(1 << bit)
    return jnp.asarray(values)


@pytest.fixture(scope="module", params=sorted(KINDS))
def good(request, tmp_path_factory):
    run = tmp_path_factory.mktemp("good") / "run"
    train(run, request.param, 8)
    return run, request.param


@pytest.mark.slow
def test_replay_reproduces_good_run(good):
    run, kind = good
    report = replay(run, kind, 2, 8)
    assert report.ok
    assert report.outcome == "equal"
    assert report.compared == (4, 6, 8)
    assert (report.last_equal, report.first_different) == (8, None)
    assert not report.changed
    assert report.same > 8
    assert str(report).endswith(f"bit for bit, {report.same} leaves each")
    assert "3 checkpoints reproduced" in str(report)


@pytest.mark.slow
def test_replay_does_not_change_run(good):
    run, kind = good
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    replay(run, kind, 0, 2)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.slow
def test_replay_finds_flipped_bit_between_checkpoints(tmp_path):
    def fault(state):
        params = jax.tree.map(lambda x: x, state.params)
        params["Dense_0"]["kernel"] = flip(params["Dense_0"]["kernel"], 5, bit=3)
        return state.replace(params=params)

    train(tmp_path / "run", "linen", 8, fault={6: fault})
    report = replay(tmp_path / "run", "linen", 0, 8)
    assert report.outcome == "changed"
    assert not report.ok
    assert report.compared == (2, 4, 6)
    assert (report.last_equal, report.first_different) == (4, 6)
    [(leaf, change)] = report.changed.items()
    assert leaf == "params/Dense_0/kernel"
    assert (change.different, change.size, change.bits) == (1, 512, 1)
    assert change.first == (0, 5)
    assert 0 < change.max_abs < 1e-5
    assert "params/Dense_0/kernel: 1 of 512 elements (1 bit)" in str(report)
    assert "between steps 4 and 6" in str(report)
    assert pickle.loads(pickle.dumps(report)) == report


@pytest.mark.slow
def test_replay_finds_object_fault_with_parameters_first(tmp_path):
    def fault(state):
        model, optimizer = state
        model.out.kernel[...] = flip(model.out.kernel[...], 0, bit=20)
        return model, optimizer

    train(tmp_path / "run", "nnx", 4, fault={3: fault})
    report = replay(tmp_path / "run", "nnx", 0, 4)
    assert (report.outcome, report.first_different) == ("changed", 4)
    leaves = list(report.changed)
    assert "0/out/kernel" in leaves
    is_moment = ["opt_state" in leaf for leaf in leaves]
    assert is_moment == sorted(is_moment)
    assert any(is_moment)


def test_replay_distinguishes_hidden_randomness_from_changes(tmp_path):
    state = {"params": {"w": jnp.zeros(4)}, "n": jnp.int32(0)}
    calls = itertools.count()

    def step(state, _):
        w = state["params"]["w"]
        noise = next(calls) if state["n"] == 4 else 0  # after step 5
        return {"params": {"w": w + noise}, "n": state["n"] + 1}

    save_steps(tmp_path, state, step, StepIndexed(lambda i: i), (0, 3, 7))
    report = flaxckpt.replay(tmp_path, 0, 7, step, StepIndexed(lambda i: i))
    assert report.outcome == "unstable"
    assert report.compared == (3, 7)
    assert (report.unstable_step, report.unstable) == (5, ("params/w",))
    assert list(report.changed) == ["params/w"]
    assert "from step 5 on" in str(report)


def test_replay_names_differing_data_before_state(tmp_path):
    calls = itertools.count()

    def step(state, batch):
        return {"w": state["w"] + batch["x"]}

    def batches(i):
        return {"x": np.float32(next(calls)), "y": np.float32(0)}

    state = {"w": jnp.zeros(2)}
    save_steps(tmp_path, state, step, StepIndexed(batches), (0, 2))
    report = flaxckpt.replay(tmp_path, 0, 2, step, StepIndexed(batches))
    assert report.unstable_step == 1
    assert report.unstable == ("batch/0/x", "w")


def save_steps(run, state, step, batches, saved):
    with flaxckpt.Checkpointer(run) as checkpointer:
        for n in range(saved[-1] + 1):
            if n:
                state = step(state, next(batches)) if batches else step(state)
            if n in saved:
                checkpointer.save(n, state, dataset=batches)


class Moments(struct.PyTreeNode):
    mean: jax.Array
    count: int


@pytest.mark.parametrize(
    "state",
    [
        {"w": jnp.arange(3.0), "none": None, "name": "x", "empty": {}},
        core.freeze({"params": {"w": jnp.ones(3, jnp.bfloat16)}}),
        optax.ScaleByAdamState(jnp.int32(0), {"w": jnp.ones(2)}, {"w": jnp.ones(2)}),
        Moments(jnp.ones(3), 3),
        {"numpy": np.ones(3, np.float64), "half": jnp.ones(2, jnp.float8_e4m3fn)},
        {"key": jax.random.key(0), "flag": jnp.array([True]), "c": jnp.ones(1) * 1j},
    ],
    ids=["dict", "frozen", "namedtuple", "struct", "numpy", "key"],
)
def test_replays_states_of_all_kinds_with_and_without_template(tmp_path, state):
    def step(state):
        return jax.tree.map(next_value, state)

    save_steps(tmp_path, state, step, None, (0, 1, 3))
    for abstract in (state, None) if not isinstance(state, Moments) else (state,):
        report = flaxckpt.replay(tmp_path, 0, 3, step, abstract_state=abstract)
        assert report.ok, report
    for result in (
        lambda state: (step(state), 0.5),
        lambda state: (0.5, step(state)),
        lambda state: {"loss": 0.5, "state": step(state)},
    ):
        report = flaxckpt.replay(tmp_path, 0, 3, result, abstract_state=state)
        assert report.ok, report


def next_value(x):
    if isinstance(x, str):
        return x
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(x, 1)[0]
    if isinstance(x, jax.Array) and x.dtype == bool:
        return ~x
    return (x * 2).astype(x.dtype) if hasattr(x, "dtype") else x + 1


def test_replays_64_bit_states(tmp_path):
    with jax.enable_x64(True):
        state = {"w": jnp.arange(3, dtype=jnp.float64), "n": jnp.int64(2**40)}

        def step(state):
            return {"w": state["w"] / 3, "n": state["n"] + 1}

        save_steps(tmp_path, state, step, None, (0, 2))
        assert flaxckpt.replay(tmp_path, 0, 2, step).ok


def test_replay_names_device_of_differing_shard(tmp_path):
    mesh = jax.make_mesh((8,), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    state = {"w": jax.device_put(jnp.arange(16.0), split)}
    step = functools.partial(jax.jit, donate_argnums=0)(
        lambda state: {"w": state["w"] * 2}
    )
    with flaxckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state)
        values = np.asarray(step(state)["w"]).copy()
        values[7] = -values[7]
        checkpointer.save(1, {"w": jax.device_put(jnp.asarray(values), split)})
    abstract = {"w": jax.ShapeDtypeStruct((16,), "float32", sharding=split)}
    report = flaxckpt.replay(tmp_path, 0, 1, step, abstract_state=abstract)
    change = report.changed["w"]
    assert (change.different, change.bits, change.first) == (1, 1, (7,))
    assert change.devices == (str(jax.devices()[3]),)
    assert change.max_abs == 28
    assert f"on {jax.devices()[3]}" in str(report)


@pytest.mark.slow
def test_replay_restarts_grain_dataset_at_saved_position(tmp_path):
    def batches():
        data = grain.MapDataset.range(100).seed(3).shuffle().repeat().batch(4)
        return iter(data.to_iter_dataset())

    def step(state, batch):
        return {"sum": state["sum"] * 3 + batch.sum()}, {"loss": 0.0}

    state, dataset = {"sum": jnp.int32(0)}, batches()
    keep = [flaxckpt.policies.EveryNSteps(100)]
    with flaxckpt.Checkpointer(tmp_path, keep_dataset=keep) as checkpointer:
        for n in range(7):
            if n:
                state, _ = step(state, next(dataset))
            if n == 6:
                state = {"sum": state["sum"] + 1}
            if n in (0, 2, 4, 6):
                checkpointer.save(n, state, dataset=dataset)
    with flaxckpt.Checkpointer(tmp_path, read_only=True) as checkpointer:
        assert not checkpointer.has_dataset(4)
    report = flaxckpt.replay(tmp_path, 0, 6, step, batches())
    # Step 4 has no position of the dataset: the second repeat begins at step 0.
    assert (report.outcome, report.first_different) == ("changed", 6)


def test_replays_in_place_step_returning_loss(tmp_path):
    def make():
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    def step(state):
        model, optimizer = state
        loss, grads = nnx.value_and_grad(lambda m: jnp.sum(m(jnp.ones(2))))(model)
        optimizer.update(model, grads)
        return loss

    state = make()
    with flaxckpt.Checkpointer(tmp_path) as checkpointer:
        for n in range(3):
            checkpointer.save(n, state)
            step(state)
    assert flaxckpt.replay(tmp_path, 0, 2, step, abstract_state=make()).ok


# ---- mistakes -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    run = tmp_path_factory.mktemp("plain")
    with flaxckpt.Checkpointer(run) as checkpointer:
        for n in (0, 5):
            checkpointer.save(n, {"w": jnp.zeros(2)}, dataset=StepIndexed(int))
    return run


def test_replay_reports_mistakes(plain, tmp_path):
    def step(state, batch):
        return state

    def told(error, text, *args, **options):
        with pytest.raises(error, match=text):
            flaxckpt.replay(*args, **options)

    batches = StepIndexed(int)
    option = errors.OptionError
    told(option, "greater than step_a", plain, 5, 5, step, batches)
    told(option, "greater than step_a", plain, 5, 0, step, batches)
    told(option, "step_a", plain, "0", 5, step, batches)
    told(option, "function of a state", plain, 0, 5, {}, batches)
    told(option, "pass dataset=", plain, 0, 5, step)
    told(option, "pass no dataset", plain, 0, 5, lambda state: state, batches)
    told(option, "one iterator", plain, 0, 5, step, [batches])
    told(option, "must return a state", plain, 0, 5, lambda s, b: 1.0, batches)
    told(option, "must return a state", plain, 0, 5, lambda s, b: {}, batches)
    missing = errors.CheckpointNotFoundError
    told(missing, "no step 3; its steps: 0, 5", plain, 0, 3, step, batches)
    told(missing, "no step 1", tmp_path / "none", 1, 3, step, batches)
    no_state = errors.DatasetStateError
    short = iter(grain.MapDataset.source([1, 2]))
    with flaxckpt.Checkpointer(tmp_path / "short") as checkpointer:
        checkpointer.save(0, {"w": jnp.zeros(2)}, dataset=short)
        checkpointer.save(5, {"w": jnp.zeros(2)})
    told(no_state, "no batch for step 3", tmp_path / "short", 0, 5, step, short)
    with flaxckpt.Checkpointer(tmp_path / "bare") as checkpointer:
        for n in (0, 5):
            checkpointer.save(n, {"w": jnp.zeros(2)})
    told(no_state, "without a dataset", tmp_path / "bare", 0, 5, step, batches)


# ---- bits ---------------------------------------------------------------------------

NAN = np.float32(np.nan)
OTHER_NAN = np.uint32(0x7FC00001).view(np.float32)


def change_of(run, computed, stored):
    """Returns how a computed leaf differs from a stored one."""
    with flaxckpt.Checkpointer(run) as checkpointer:
        for n in (0, 1):
            checkpointer.save(n, {"w": stored})
    report = flaxckpt.replay(
        run, 0, 1, lambda state: {"w": computed}, abstract_state={"w": stored}
    )
    return report.changed.get("w")


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        (np.float32(0.0), np.float32(-0.0), (1, 1, 0.0)),
        (NAN, OTHER_NAN, (1, 1, 0.0)),
        (np.float32(1), NAN, (1, None, np.inf)),
        (np.array([1, 2, 3]), np.array([1, 2, 4]), (1, 3, 1.0)),
        (np.array([True, False]), np.array([True, True]), (1, 1, 1.0)),
        (np.complex64(1 + 2j), np.complex64(1 - 2j), (1, 1, 4.0)),
    ],
)
@pytest.mark.parametrize("as_jax", [True, False])
def test_counts_flipped_bits(tmp_path, a, b, wanted, as_jax):
    if as_jax:
        a, b = jnp.asarray(a), jnp.asarray(b)
    assert change_of(tmp_path / "equal", a, a) is None
    found = change_of(tmp_path / "other", a, b)
    different, flipped, change = wanted
    assert found.different == different
    assert flipped is None or found.bits == flipped
    assert found.max_abs == change


def test_compares_other_leaves_by_value(tmp_path):
    assert change_of(tmp_path / "a", "a", "a") is None
    found = change_of(tmp_path / "b", "a", "b")
    assert found == flaxckpt.BitDiff(1, 1, 0, np.inf)


DTYPES = "bool int4 uint4 int8 uint16 int32 bfloat16 float16 float32 float8_e5m2"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [*DTYPES.split(), "complex64"])
def test_two_repeats_differ_by_any_flipped_bit(tmp_path, dtype):
    array = jnp.arange(15, dtype=jnp.int32).reshape(3, 5).astype(dtype)
    second = {
        "same": array + jnp.zeros((), dtype),
        "element": array.at[1, 2].set(jnp.zeros((), dtype)),
        "swapped": array[::-1],
    }
    if dtype not in ("bool", "int4", "uint4", "complex64"):
        for bit in range(8 * jnp.dtype(dtype).itemsize):
            second[f"bit {bit}"] = flip(array, 7, bit)
    first = dict.fromkeys(second, array)
    repeats = iter([first, second])
    with flaxckpt.Checkpointer(tmp_path) as checkpointer:
        for n in (0, 1):
            checkpointer.save(n, {"n": n, **first})
    report = flaxckpt.replay(tmp_path, 0, 1, lambda state: {"n": 2, **next(repeats)})
    assert report.unstable_step == 1
    assert {*report.unstable} == second.keys() - {"same"}


def test_leaves_in_only_one_repeat_differ(tmp_path):
    batches = iter([{"x": 1, "y": jnp.ones(2)}, {"x": 1}])
    dataset = StepIndexed(lambda i: next(batches))
    with flaxckpt.Checkpointer(tmp_path) as checkpointer:
        for n in (0, 1):
            checkpointer.save(n, {"n": n}, dataset=dataset)
    report = flaxckpt.replay(tmp_path, 0, 1, lambda state, batch: {"n": 2}, dataset)
    assert report.unstable == ("batch/0/y",)
