"""The work for a state grows as its leaves do, not as their square."""

import functools
import gc
import itertools
import json
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import flaxckpt
from flaxckpt import errors, transforms
from tests.helpers import old_stores, seams, slow

ADAMW = optax.adamw(1e-3)
MEMBER = {"kernel": np.ones(2), "bias": np.ones(2)}
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


@functools.cache
def linen_like(n, tx=ADAMW):
    params = {
        f"layer_{i}": {"kernel": np.ones((2, 3)), "bias": np.ones(3)} for i in range(n)
    }
    return TrainState.create(apply_fn=None, params=params, tx=tx)


@functools.cache
def abstract_linen_like(n):
    """As 64 processes have it, with 2 devices each."""
    mesh = AbstractMesh((16, 8), ("data", "model"))
    split = NamedSharding(mesh, PartitionSpec("model"))
    same = NamedSharding(mesh, PartitionSpec())
    kernel = jax.ShapeDtypeStruct((8, 8), "float32", sharding=split)
    other = jax.ShapeDtypeStruct((8,), "float32", sharding=same)
    return jax.tree.map(lambda x: kernel if np.ndim(x) == 2 else other, linen_like(n))


@functools.cache
def nnx_like(n):
    layers = {f"layer_{i}": nnx.Param(jnp.ones(2)) for i in range(n)}
    return nnx.state(nnx.Dict(layers))


@functools.cache
def several_optimizers(n, tx=ADAMW):
    """Many small networks, each with an optimizer."""
    member = TrainState.create(apply_fn=None, params=MEMBER, tx=tx)
    return {f"member_{i}": member for i in range(n)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns the function that saves a state once, and returns its path."""

    @functools.cache
    def save(make, n, *, with_roles=True):
        path = tmp_path_factory.mktemp("saved") / "c"
        flaxckpt.save(path, make(n))
        if not with_roles:
            manifest = json.loads((path / "flaxckpt.json").read_text())
            for row in manifest["leaves"]:
                row.pop("role", None)
            old_stores.rewrite_manifest(path, manifest)
        return path

    return save


def save(make):
    """The work of a save, into a directory of its own."""

    def work(saved, n):
        path = saved(make, n)
        flaxckpt.save(path.with_name(f"again-{next(_numbers)}"), make(n))

    return work


def plan(make, state, *, with_roles=True, **options):
    """The work of the plan of a restore; `state` makes the state that it fills."""

    def work(saved, n):
        path = saved(make, n, with_roles=with_roles)
        flaxckpt.plan(path, state and state(n), **options)

    return work


_numbers = itertools.count()


WORK = {
    "a save": save(linen_like),
    "a save of NNX": save(nnx_like),
    "a save of many optimizers": save(several_optimizers),
    "metadata": lambda saved, n: flaxckpt.metadata(saved(linen_like, n)),
    "a restore": plan(linen_like, linen_like),
    "a restore of everything": plan(linen_like, None),
    "a restore into another chain": plan(
        linen_like, functools.partial(linen_like, tx=CLIPPED)
    ),
    "the same without roles": plan(
        linen_like, functools.partial(linen_like, tx=CLIPPED), with_roles=False
    ),
    "many optimizers without roles": plan(
        several_optimizers, several_optimizers, with_roles=False
    ),
    "many optimizers, moved": plan(
        several_optimizers,
        lambda n: {f"member_{i}": linen_like(1, CLIPPED) for i in range(n)},
        with_roles=False,
    ),
    "many optimizers, with fewer transforms": plan(
        functools.partial(several_optimizers, tx=optax.chain(ADAMW, optax.ema(0.9))),
        several_optimizers,
    ),
    "many branches that moved": plan(
        several_optimizers,
        lambda n: {f"member_{i}": {"model": MEMBER} for i in range(n)},
    ),
    "a restore that lacks everything": plan(
        linen_like, lambda n: {"other": linen_like(n).params}, unused="error"
    ),
    **{
        f"a restore that is changed: {change}": plan(
            linen_like, None, transforms=[change]
        )
        for change in (
            transforms.rename("params/(.*)", r"params/inner/\1"),
            transforms.drop("params/.*/kernel"),
            transforms.stack(r"params/layer_(\d+)/(.*)", r"params/layers/\2"),
            transforms.map_leaf("params/.*/kernel", lambda x: x.T),
            transforms.split(
                "params/(.*)/bias", [r"params/\1/a", r"params/\1/b"], sizes=[1, 2]
            ),
        )
    },
    "many optimizers, renamed": plan(
        several_optimizers,
        None,
        transforms=[transforms.rename("(.*)/params/kernel", r"\1/params/weight")],
    ),
    "a save by many processes": lambda saved, n: flaxckpt.simulate(
        abstract_linen_like(n), processes=64
    ),
    "a whole restore": lambda saved, n: flaxckpt.load(saved(linen_like, n)),
}


LONG = ("many optimizers, moved", "a restore that lacks everything")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", slow.all_but(WORK, WORK.keys() - LONG))
def test_work_grows_linearly_with_leaves(saved, monkeypatch, name):
    seams.refuse_threads(monkeypatch)  # all work is done, and counted, in this one
    work = WORK[name]
    work(saved, 120), work(saved, 240)  # what is made once is made
    assert calls(work, saved, 240) <= 2.2 * calls(work, saved, 120)


def calls(work, *args):
    """How many functions are called, those in C included: unlike time, exact."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(trace)
    try:
        work(*args)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("wrap", [lambda x: {"a": [x]}, lambda x: nnx.Param(x)])
def test_frees_saved_state_without_garbage_collection(tmp_path, wrap):
    leaf = jnp.ones(3)
    gone = weakref.ref(leaf)
    state = wrap(leaf)
    gc.disable()
    try:
        flaxckpt.parameter_infos(state)
        flaxckpt.save(tmp_path / "c", {"a": state})
        del state, leaf
        assert gone() is None
    finally:
        gc.enable()


def garbage_of(work):
    """The objects of flaxckpt that `work` leaves for the garbage collector."""
    work()
    gc.collect()
    gc.disable()
    try:
        work()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = [type(x) for x in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    return {cls for cls in found if cls.__module__.startswith("flaxckpt.")}


@pytest.mark.parametrize(
    ("is_old", "memory_map"),
    slow.all_but(itertools.product([False, True], [True, False]), [(False, True)]),
)
def test_load_creates_no_cyclic_garbage(tmp_path, is_old, memory_map):
    """Its plan has the abstract state, and its readings have all values."""
    params = {"w": jnp.ones((64, 512)), "b": jnp.ones(8)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    path = tmp_path / "c"
    flaxckpt.save(path, state)
    if is_old:
        old_stores.make_directories(path)
    cast = transforms.cast("params/.*", "bfloat16")
    narrow = state.replace(params=jax.tree.map(lambda x: x.astype("bfloat16"), params))
    for work in (
        lambda: flaxckpt.load(path, state, memory_map=memory_map),
        lambda: flaxckpt.load(path, memory_map=memory_map),
        lambda: flaxckpt.load_async(path, state, memory_map=memory_map).wait(),
        lambda: flaxckpt.load(path, narrow, transforms=[cast]),
        lambda: flaxckpt.plan(path, state),
        lambda: flaxckpt.save(path, state, overwrite=True),
    ):
        assert garbage_of(work) == set()


def test_resumes_garbage_collection_after_failed_save(tmp_path):
    with pytest.raises(errors.UnsupportedLeafError):
        flaxckpt.save(tmp_path / "c", {"a": object()})
    assert gc.isenabled()


def test_pauses_garbage_collection_during_planning(tmp_path):
    mesh = AbstractMesh((2,), ("x",))
    split = NamedSharding(mesh, PartitionSpec("x"))
    leaf = jax.ShapeDtypeStruct((4,), "float32", sharding=split)
    abstract = {f"w{i}": leaf for i in range(200)}
    state = {name: np.ones(4, "float32") for name in abstract}
    flaxckpt.save(tmp_path / "c", state)
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        work = {
            "plan": lambda: flaxckpt.plan(tmp_path / "c", state),
            "metadata": lambda: flaxckpt.metadata(tmp_path / "c"),
            "simulate": lambda: flaxckpt.simulate(abstract, processes=2),
            "abstract_state": lambda: flaxckpt.abstract_state(
                abstract, mesh=mesh, leaf_rules={".*": PartitionSpec()}
            ),
            "parameter_infos": lambda: flaxckpt.partition.parameter_infos(abstract),
            "rehearse": lambda: ckpt._session.saves.rehearse(state, None),
        }
        begun = []
        before = gc.get_threshold()
        gc.callbacks.append(lambda phase, info: begun.append(phase))
        gc.set_threshold(200)
        try:
            found = {}
            for name, plan in work.items():
                plan()
                begun.clear()
                plan()
                found[name] = begun.count("start")
        finally:
            gc.set_threshold(*before)
            gc.callbacks.pop()
    # What is begun right after a pause is not begun within.
    assert max(found.values()) <= 3, found


def test_disabled_garbage_collector_stays_disabled(tmp_path):
    gc.disable()
    try:
        flaxckpt.save(tmp_path / "c", {"a": jnp.ones(3)})
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_arrays_of_same_shape_share_chunk_shape():
    state = {i: jax.device_put(jnp.ones((8, 4)), jax.devices()[0]) for i in range(3)}
    infos = flaxckpt.parameter_infos(state).values()
    assert len({id(info.chunk_shape) for info in infos}) == 1
