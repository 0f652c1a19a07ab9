"""The work for a state grows as its leaves do, not as their square."""

import dataclasses
import functools
import gc
import itertools
import json
import pathlib
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
from flaxckpt._checkpoint import planner, save
from flaxckpt._checkpoint.commit import SaveRequest
from flaxckpt._formats import native_contents, native_manifest, reader
from flaxckpt._state import classes as state_classes
from flaxckpt._state import flatten as state_flatten
from flaxckpt._state import flax_state as state_flax_state
from flaxckpt._state import leaf as state_leaf
from flaxckpt._state import tree as state_tree
from flaxckpt._util import gc_pause as util_gc_pause
from tests.helpers import old_stores, slow

ADAMW = optax.adamw(1e-3)
NOWHERE = pathlib.Path("/nonexistent/checkpoint")
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
def several_optimizers(n):
    """Many small networks, each with an optimizer."""
    params = {"kernel": np.ones(2)}
    member = TrainState.create(apply_fn=None, params=params, tx=ADAMW)
    return {f"member_{i}": member for i in range(n)}


def snapshot(state):
    return save.take_snapshot(SaveRequest(path=NOWHERE), state)


@functools.cache
def contents(make, n):
    return snapshot(make(n)).contents


@functools.cache
def manifest(make, n):
    return json.loads(json.dumps(contents(make, n).manifest.to_json()))


def read(make, n, *, with_roles=True):
    """The checkpoint of a state, without a disk."""
    found = native_manifest.Manifest.from_json(manifest(make, n), state_classes.resolve)
    table = {}
    for info in found.infos:
        if not with_roles:
            info = dataclasses.replace(info, role=None)
        table[info.path] = state_leaf.Leaf(
            info, (state_leaf.StoredLeaf(NOWHERE, info),)
        )
    metadata = reader.CheckpointMetadata(
        *("/nonexistent", "flaxckpt", 1, {}, {}, None, None, {}, False, 0)
    )
    return reader.Stored(metadata, table, found.structure)


def plan(stored, state, **options):
    return planner.make_plan(stored, state, planner.RestoreOptions(**options))


WORK = {
    "a save": lambda n: snapshot(linen_like(n)),
    "a save of NNX": lambda n: snapshot(nnx_like(n)),
    "a save of many optimizers": lambda n: snapshot(several_optimizers(n)),
    "metadata": lambda n: native_contents.make_files(contents(linen_like, n)),
    "the manifest": lambda n: contents(linen_like, n).manifest.to_json(),
    "reading metadata": lambda n: read(linen_like, n),
    "a restore": lambda n: plan(read(linen_like, n), linen_like(n)),
    "a restore of everything": lambda n: plan(read(linen_like, n), None),
    "a restore into another chain": lambda n: plan(
        read(linen_like, n), linen_like(n, CLIPPED)
    ),
    "the same without roles": lambda n: plan(
        read(linen_like, n, with_roles=False), linen_like(n, CLIPPED)
    ),
    "many optimizers without roles": lambda n: plan(
        read(several_optimizers, n, with_roles=False), several_optimizers(n)
    ),
    "many optimizers, moved": lambda n: plan(
        read(several_optimizers, n, with_roles=False),
        {f"member_{i}": linen_like(1, CLIPPED) for i in range(n)},
    ),
    "a restore that lacks everything": lambda n: plan(
        read(linen_like, n), {"other": linen_like(n).params}, unused="error"
    ),
    **{
        f"a restore that is changed: {change}": functools.partial(
            lambda change, n: plan(read(linen_like, n), None, transforms=[change]),
            change,
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
    "many optimizers, renamed": lambda n: plan(
        read(several_optimizers, n),
        None,
        transforms=[transforms.rename("(.*)/params/kernel", r"\1/params/weight")],
    ),
    "a save by many processes": lambda n: flaxckpt.simulate(
        abstract_linen_like(n), processes=64
    ),
    "rebuilding": lambda n: state_tree.unflatten(
        contents(linen_like, n).manifest.structure,
        dict.fromkeys([info.path for info in contents(linen_like, n).manifest.infos]),
    ),
}


LONG = ("many optimizers, moved", "a restore that lacks everything")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", slow.all_but(WORK, WORK.keys() - LONG))
def test_work_grows_linearly_with_leaves(name):
    work = WORK[name]
    work(120), work(240)  # what is made once is made
    assert calls(work, 240) <= 2.2 * calls(work, 120)


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
def test_frees_flattened_state_without_garbage_collection(wrap):
    leaf = jnp.ones(3)
    gone = weakref.ref(leaf)
    state = wrap(leaf)
    gc.disable()
    try:
        state_flax_state.flatten(state)
        state_flatten.flatten(state)
        save.take_snapshot(SaveRequest(path=NOWHERE), {"a": state})
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


def test_resumes_garbage_collection_after_pause():
    with util_gc_pause.pause():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(errors.UnsupportedLeafError):
        snapshot({"a": object()})
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


def test_disabled_garbage_collector_stays_disabled():
    gc.disable()
    try:
        snapshot({"a": jnp.ones(3)})
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_arrays_of_same_shape_share_chunk_shape():
    state = {i: jax.device_put(jnp.ones((8, 4)), jax.devices()[0]) for i in range(3)}
    infos = snapshot(state).contents.manifest.infos
    assert len({id(info.chunk_shape) for info in infos}) == 1
