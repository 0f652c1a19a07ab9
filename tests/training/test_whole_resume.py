"""A run's own resume brings every leaf back, or names the leaves it cannot."""

import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from flax.core import FrozenDict
from flax.training.train_state import TrainState

import flaxckpt
from flaxckpt import errors
from flaxckpt.transforms import rename

W = jnp.arange(3.0)
PARAMS = {"w": W}


def average():
    """Returns what a run makes later: arrays, numbers, text and keys."""
    return {"a": W + 1, "more": (np.ones(2), 3, "text", jax.random.key(7))}


class Named(NamedTuple):
    w: Any
    ema: Any = None


@struct.dataclass
class Struct:
    w: Any
    ema: Any = None


class WithAverage(TrainState):
    ema: Any = None


@jax.tree_util.register_pytree_with_keys_class
class Own:
    def __init__(self, w, ema=None):
        self.w, self.ema = w, ema

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return ((key("w"), self.w), (key("ema"), self.ema)), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


class Own2(nnx.Module):
    def __init__(self, value=None):
        self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.value = nnx.data(value)


class Static(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.value = None


class Lacking(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def train_state(tx, **fields):
    state = WithAverage.create(apply_fn=None, params=PARAMS, tx=tx, **fields)
    return state.replace(step=jnp.zeros((), jnp.int32))


ADAM = optax.adam(1e-3)
MADE = {
    "None in a dict": (lambda v: {"w": W, "ema": v}, [None, {}, (), []]),
    "no key in a dict": (
        lambda v: {"w": W} if v is None else {"w": W, "ema": v},
        [None],
    ),
    "an int key": (lambda v: {"h": {1: W} if v is None else {1: W, 2: v}}, [None]),
    "no key in a FrozenDict": (
        lambda v: FrozenDict({"w": W} if v is None else {"w": W, "ema": v}),
        [None],
    ),
    "an empty FrozenDict": (
        lambda v: {"p": FrozenDict({} if v is None else {"ema": v})},
        [None],
    ),
    "a named tuple": (lambda v: Named(W, v), [None, {}]),
    "a dataclass": (lambda v: Struct(W, v), [None, {}]),
    "a node of the user": (lambda v: Own(W, v), [None]),
    "a TrainState": (lambda v: train_state(ADAM, ema=v), [None, {}]),
    "an optimizer state": (lambda v: {"o": (Named(W, v), optax.EmptyState())}, [None]),
    "a list": (lambda v: {"history": v}, [[], None]),
    "an NNX object beside": (lambda v: {"m": Own2(), "ema": v}, [None]),
}


def saved(tmp_path, state, **options):
    with flaxckpt.Checkpointer(tmp_path / "run", **options) as ckpt:
        ckpt.save(1, state)
    return flaxckpt.Checkpointer(tmp_path / "run", **options)


def resume(ckpt, state, **options):
    on_step = flaxckpt.CheckpointCallback(ckpt, on_preemption=False, check_step=False)
    return on_step.restore_or_init(state, **options)[0]


def check_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert type(one) is type(other)
        if isinstance(one, jax.Array) and jnp.issubdtype(
            one.dtype, jax.dtypes.prng_key
        ):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", MADE)
def test_empty_place_takes_saved_branch(tmp_path, name):
    make, empties = MADE[name]
    whole = make([average(), W] if name == "a list" else average())
    with saved(tmp_path, whole) as ckpt:
        for empty in empties:
            begin = make(empty)
            check_same(resume(ckpt, begin), whole)
            check_same(resume(ckpt, jax.eval_shape(lambda s: s, begin)), whole)


@pytest.mark.parametrize(
    ("value", "begin"),
    [
        (nnx.Param(jnp.ones(3)), Own2()),
        (jnp.ones(3), Static()),
        (nnx.Param(jnp.ones(3)), Static()),
        ({"a": jnp.ones(2)}, Own2({})),
        ((W, {"a": jnp.ones(2)}), Own2((W, {}))),
        (Named(W, jnp.ones(2)), Own2(Named(W))),
        ({"x/y": [W, jnp.ones(2)], "z": W}, Own2({"x/y": [W, None], "z": W})),
        (nnx.Variable(jnp.ones(3)), Own2(nnx.Variable(None))),
    ],
)
def test_empty_nnx_attribute_takes_saved_value(tmp_path, value, begin):
    model = Own2(value)
    with saved(tmp_path, {"m": model, "w": W}) as ckpt:
        found = resume(ckpt, {"m": begin, "w": W})["m"]
    assert type(found) is type(begin)
    assert type(found.value) is type(value)
    flat = [jax.tree.leaves(nnx.state(each)) for each in (found, model)]
    jax.tree.map(np.testing.assert_array_equal, *flat)


@pytest.mark.parametrize("begin", [{"m": None, "w": W}, {"w": W}])
def test_module_restores_as_state_in_empty_place(tmp_path, begin):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with saved(tmp_path, {"m": model, "w": W}) as ckpt:
        found = resume(ckpt, begin)["m"]
    assert type(found) is type(flaxckpt.load(tmp_path / "run")["m"]) is nnx.State
    check_same(found, nnx.state(model))


@pytest.mark.parametrize(
    ("whole", "begin", "leaf"),
    [
        ((W, W), (W,), "1"),
        ({"h": [W, W]}, {"h": [W]}, "h/1"),
        (Own2(jnp.ones(3)), Lacking(), "value"),
        ({"s": {"w": W, "ema": W}}, {"s": Named(W)._asdict() | {"ema": None}}, None),
        ({"s": {"w": W, "x": {"y": W}}}, {"s": Struct(W)}, "s/x/y"),
        ({"w": W, "m": Named(W, W)}, {"w": W, "m": None}, "m"),  # an unknown class
    ],
)
def test_error_names_leaf_without_place(tmp_path, whole, begin, leaf):
    with saved(tmp_path, whole) as ckpt:
        if leaf is None:
            check_same(resume(ckpt, begin), whole)
            return
        with pytest.raises(errors.RestoreMismatchError, match="unused=") as told:
            resume(ckpt, begin)
        assert [mismatch.leaf for mismatch in told.value.mismatches] == [leaf]
        resume(ckpt, begin, unused="ignore")


def test_unused_option_applies_to_own_steps(tmp_path, caplog):
    with saved(tmp_path, {"w": W, "ema": W, "x": W}) as ckpt:
        with pytest.raises(errors.RestoreMismatchError) as told:
            resume(ckpt, {"w": W, "ema": None}, unused="error")
        assert [each.leaf for each in told.value.mismatches] == ["ema", "x"]
        assert not caplog.records
        found = resume(ckpt, {"w": W, "ema": None}, unused="warn")
        assert found["ema"] is None
    assert "2 leaves of" in caplog.text
    assert "ema, x" in caplog.text


def test_restores_part_of_step_and_fills_empty_places(tmp_path):
    whole = {"w": W, "ema": average(), "opt": {"mu": W}}
    with saved(tmp_path, whole) as ckpt:
        assert ckpt.restore({"w": W}).keys() == {"w"}
        check_same(ckpt.restore({"w": W, "ema": None}), {"w": W, "ema": whole["ema"]})
        assert ckpt.restore({"w": W, "ema": None}, unused="ignore")["ema"] is None


def test_load_drops_leaves_below_empty_place_with_warning(tmp_path, caplog):
    flaxckpt.save(tmp_path / "one", {"w": W, "ema": {"a": W}, "opt": W})
    assert flaxckpt.load(tmp_path / "one", {"w": W, "ema": None})["ema"] is None
    assert "ema/a" in caplog.text
    assert "opt" not in caplog.text


def test_warns_about_leaves_of_removed_optimizer_transform(tmp_path, caplog):
    whole = train_state(ADAM, ema=average())
    with saved(tmp_path, whole) as ckpt:
        begin = train_state(optax.sgd(1e-2), ema=None)
        found = resume(ckpt, begin)
        check_same(found.ema, whole.ema)
        assert found.opt_state == begin.opt_state
        assert "opt_state/0/mu/w" in caplog.text
        with pytest.raises(errors.RestoreMismatchError, match="opt_state/0/mu/w"):
            resume(ckpt, begin, unused="error")


@pytest.mark.parametrize("before", [optax.adam(1e-2), optax.sgd(1e-2, momentum=0.9)])
def test_nnx_optimizer_leaves_out_removed_transform(tmp_path, caplog, before):
    def state_of(tx):
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        return {"model": model, "opt": nnx.Optimizer(model, tx, wrt=nnx.Param)}

    with saved(tmp_path, state_of(before)) as ckpt:
        resume(ckpt, state_of(optax.sgd(1e-2)))
    assert "opt/opt_state/0/" in caplog.text
    caplog.clear()
    flaxckpt.save(tmp_path / "opt", state_of(before)["opt"])
    flaxckpt.load(tmp_path / "opt", state_of(optax.sgd(1e-2))["opt"])
    assert "opt_state/0/" in caplog.text


class Layers(nnx.Module):
    def __init__(self, count):
        self.layers = nnx.List([nnx.Param(W) for _ in range(count)])


@pytest.mark.parametrize("around", [lambda x: x, lambda x: {"model": x, "w": W}])
def test_module_without_leaves_has_no_place_for_saved_leaves(tmp_path, around):
    with saved(tmp_path, around(Layers(1))) as ckpt:
        with pytest.raises(errors.RestoreMismatchError, match="layers/0: wanted no pl"):
            resume(ckpt, around(Layers(0)))
        ckpt.restore(around(Layers(0)))


class KeepsAverage(NamedTuple):
    ema: Any
    count: Any


def test_restores_or_names_average_inside_optimizer(tmp_path):
    def state_of(ema, *before):
        inner = KeepsAverage(ema, jnp.ones((), jnp.int32))
        return {"params": PARAMS, "opt_state": (*before, ADAM.init(PARAMS), inner)}

    with saved(tmp_path, state_of({"w": W})) as ckpt:
        check_same(resume(ckpt, state_of(None)), state_of({"w": W}))
        with pytest.raises(errors.RestoreMismatchError, match="opt_state/1/ema/w: "):
            resume(ckpt, state_of(None, optax.EmptyState()))


def test_restores_missing_params_and_moments_together(tmp_path):
    def state_of(params):
        return {"params": params, "opt_state": ADAM.init(params)}

    whole = state_of({"w": W, "head": {"k": W}})
    with saved(tmp_path, whole) as ckpt:
        check_same(resume(ckpt, state_of(PARAMS)), whole)
        check_same(resume(ckpt, {"params": PARAMS, "opt_state": None}), whole)


@pytest.mark.parametrize(
    "options",
    [{"items": ("w", "ema")}, {"transforms": [rename("ema/(.*)", r"average/\1")]}],
)
def test_restores_missing_branch_with_items_and_transforms(tmp_path, options):
    whole = {"w": {"k": W}, "ema": {"a": W, "b": {"c": W}}}
    with saved(tmp_path, whole, **options) as ckpt:
        for begin in ({"w": {"k": W}}, {"w": {"k": W}, "ema": None}):
            check_same(resume(ckpt, begin), whole)


def test_restores_missing_branch_from_staged_step(tmp_path):
    whole = {"w": W, "ema": average()}
    with saved(tmp_path, whole, staging=tmp_path / "fast") as ckpt:
        check_same(resume(ckpt, {"w": W, "ema": None}), whole)


def test_restores_or_rejects_wide_leaves_in_empty_places(tmp_path):
    whole = {"w": W, "n": np.arange(3, dtype=np.int64)}
    with saved(tmp_path, whole) as ckpt:
        check_same(resume(ckpt, {"w": W, "n": None}), whole)
    with jax.enable_x64(True), saved(tmp_path / "x64", {"n": jnp.ones(2, "float64")}):
        pass
    with flaxckpt.Checkpointer(tmp_path / "x64/run") as ckpt:
        for begin in ({"n": None}, {}):
            with pytest.raises(
                errors.RestoreMismatchError, match="Set jax_ena"
            ) as told:
                resume(ckpt, begin)
            assert "cast" not in str(told.value)
        with jax.enable_x64(True):
            assert resume(ckpt, {"n": None})["n"].dtype == jnp.float64


# ---- a run that could not resume --------------------------------------------------


def begun(tmp_path, state):
    ckpt = flaxckpt.Checkpointer(tmp_path / "run")
    on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=1, on_preemption=False)
    on_step.restore_or_init(state)
    return on_step


def test_warns_once_about_dtypes_changed_since_beginning(tmp_path, caplog):
    on_step = begun(
        tmp_path,
        {
            "n": jnp.zeros(2, jnp.int32),
            "h": jnp.ones(2, jnp.bfloat16),
            "narrowed": jnp.ones(2),
            "count": 0,
            "w": W,
        },
    )
    narrow = jnp.ones(2, jnp.bfloat16)
    for step in (1, 2):
        state = {"n": jnp.ones(2), "h": jnp.ones(2), "narrowed": narrow, "w": W}
        on_step(step, state | {"count": jnp.int32(step)})
    on_step.close()
    [record] = [each for each in caplog.records if "restart" in each.getMessage()]
    text = record.getMessage()
    assert record.levelno == logging.WARNING
    assert "n: wanted int32[2], found float32[2]" in text
    assert "h: converted, float32 to bfloat16" in text
    assert "narrowed: converted, bfloat16 to float32" in text
    assert "count" not in text
    assert "jax.eval_shape(step, state)" in text
    assert "w:" not in text


@pytest.mark.parametrize("late", [W, {"a": (W, 1)}])
def test_does_not_warn_about_filled_empty_place(tmp_path, caplog, late):
    on_step = begun(tmp_path, {"w": W, "ema": None})
    on_step(1, {"w": W, "ema": late})
    on_step.close()
    assert not caplog.records


def test_first_save_warns_about_classes_unknown_to_restart(tmp_path, caplog):
    on_step = begun(tmp_path, {"w": W, "m": None})
    on_step(1, {"w": W, "m": Named(W, W)})
    on_step.close()
    assert "m: wanted an empty place" in caplog.text


def test_resume_error_suggests_no_lossy_cast(tmp_path):
    begin = {"n": jnp.zeros(2, jnp.int32)}
    with (
        saved(tmp_path, {"n": jnp.full(2, 0.5)}) as ckpt,
        pytest.raises(errors.RestoreMismatchError, match="eval_shape") as told,
    ):
        resume(ckpt, begin)
    assert "lossy" not in str(told.value)
    begin = jax.eval_shape(lambda s: {"n": s["n"] + 0.5}, begin)
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        assert resume(ckpt, begin)["n"].dtype == jnp.float32


@pytest.mark.parametrize("types", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_resume_warns_about_dtype_conversions(tmp_path, caplog, types):
    saved_type, begin_type = types
    with saved(tmp_path, {"w": W.astype(saved_type)}) as ckpt:
        resume(ckpt, {"w": W.astype(begin_type)})
    assert f"w ({saved_type} to {begin_type})" in caplog.text


@pytest.mark.parametrize("later", [0.1, np.float64(0.1), np.array(0.1)])
@pytest.mark.parametrize("begin", [np.float32(0), jnp.float32(0), jnp.bfloat16(0)])
def test_warns_about_number_rounded_by_restart(tmp_path, caplog, begin, later):
    on_step = begun(tmp_path, {"best": begin})
    on_step(1, {"best": later})
    on_step.close()
    assert f"best: converted, float64 to {begin.dtype}" in caplog.text
    caplog.clear()
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        resume(ckpt, {"best": begin})
        plan = flaxckpt.plan(tmp_path / "run/1", {"best": begin})
    assert f"best (float64 to {begin.dtype})" in caplog.text
    assert "cast" in plan.leaves["best"].actions


@pytest.mark.parametrize("begin", [jnp.asarray(1.0), jnp.float32(1)])
@pytest.mark.parametrize("later", [jnp.asarray(2.0), jnp.float32(2)])
def test_resume_keeps_saved_weak_type(tmp_path, begin, later):
    with saved(tmp_path, {"scale": later}) as ckpt:
        found = resume(ckpt, {"scale": begin})["scale"]
        assert found == later
        assert found.weak_type == later.weak_type
        chosen = ckpt.restore({"scale": begin})["scale"]
        assert chosen.weak_type == begin.weak_type


def test_resume_from_step_without_optimizer_says_how_to_begin_a_new_one(tmp_path):
    params = {"w": jnp.ones(3)}
    whole = {"params": params, "opt_state": optax.adam(1e-3).init(params)}
    with flaxckpt.Checkpointer(tmp_path, items=("params", "opt_state")) as ckpt:
        ckpt.save(1, whole).wait()
        ckpt.delete(1, item="opt_state")
        with pytest.raises(errors.RestoreMismatchError) as info:
            resume(ckpt, whole)
        assert 'pass load or checkpointer.restore optimizer="reinit"' in str(info.value)
        assert "eval_shape" not in str(info.value)
        check_same(ckpt.restore(whole, optimizer="reinit"), whole)


def test_resume_error_qualifies_advice_on_source_transforms(tmp_path):
    with saved(tmp_path, {"s": {"a": W, "b": W}}) as ckpt:
        on_step = flaxckpt.CheckpointCallback(ckpt, on_preemption=False)
        with pytest.raises(errors.RestoreMismatchError) as told:
            on_step.restore_or_init({"a": W, "b": W}, unused="ignore")
    assert "Pass source_transforms=[rename(" in str(told.value)
    assert "if it begins from source=: this run" in str(told.value)


@pytest.mark.parametrize(
    ("begin", "later"),
    [(np.int32(0), 3), (0, np.int64(3)), (0.0, np.float64(0.1)), (np.float64(0), 0.1)],
)
def test_does_not_warn_about_number_kept_by_restart(tmp_path, caplog, begin, later):
    on_step = begun(tmp_path, {"best": begin})
    on_step(1, {"best": later})
    on_step.close()
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        assert resume(ckpt, {"best": begin})["best"] == later
    assert not caplog.records


def test_resume_fills_measurements_that_the_first_update_adds(tmp_path):
    tx = optax.chain(ADAM, optax.monitor({"norm": optax.tree.norm}))
    begin = {"params": PARAMS, "opt_state": tx.init(PARAMS)}
    _, moments = tx.update(PARAMS, begin["opt_state"], PARAMS)
    whole = begin | {"opt_state": moments}
    with saved(tmp_path, whole) as ckpt:
        check_same(resume(ckpt, begin), whole)


@pytest.mark.parametrize("whole", [lambda m, o: (m, o), lambda m, o: {"o": o, "m": m}])
def test_resume_fills_measurements_of_nnx_optimizer(tmp_path, whole):
    def begun():
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        tx = optax.chain(optax.monitor({"norm": optax.tree.norm}), ADAM)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    model, optimizer = begun()
    optimizer.update(model, nnx.grad(lambda m: m(jnp.ones(3)).sum())(model))
    with saved(tmp_path, whole(model, optimizer)) as ckpt:
        found = resume(ckpt, whole(*begun()))
    graphs = [nnx.split(state) for state in (found, whole(model, optimizer))]
    check_same(*(state for _, state in graphs))


def test_hyperparameters_that_the_optimizer_no_longer_has_stay_out(tmp_path):
    def state_of(**options):
        tx = optax.inject_hyperparams(optax.adam, **options)(1e-3, b1=0.9, b2=0.99)
        return {"params": PARAMS, "opt_state": tx.init(PARAMS)}

    begin = state_of(static_args=("learning_rate", "b1", "b2", "eps", "eps_root"))
    assert not begin["opt_state"].hyperparams
    with saved(tmp_path, state_of()) as ckpt:
        assert not resume(ckpt, begin)["opt_state"].hyperparams


@struct.dataclass
class Phased:
    w: Any
    phase: str = struct.field(pytree_node=False, default="warm")
    sizes: tuple = struct.field(pytree_node=False, default=(1, 2))


def test_resume_warns_about_static_fields_that_training_changed(tmp_path, caplog):
    state = {"a": Phased(W), "b": Phased(W), "m": nnx.Linear(2, 2, rngs=nnx.Rngs(0))}
    later = state | {"a": Phased(W, phase="cold", sizes=(1, 3))}
    with saved(tmp_path, later) as ckpt:
        assert resume(ckpt, state)["a"].phase == "warm"
        [told] = [record.getMessage() for record in caplog.records]
        assert 'a/phase: "cold" in the step, "warm" in the state' in told
        assert "a/sizes: [1, 3] in the step, [1, 2] in the state" in told
        assert "2 static fields" in told
        assert "b/" not in told
        caplog.clear()
        resume(ckpt, later)
        ckpt.restore(state)  # perhaps for another purpose
    assert not caplog.records


class Rated(nnx.Module):
    def __init__(self, rate=0.1, **attributes):
        self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.drop = nnx.Dropout(rate)  # has no leaves
        self.parts = nnx.List([nnx.Dropout(0.5, rngs=nnx.Rngs(1))])
        self.root = nnx.data(self)
        for name, value in attributes.items():
            setattr(self, name, value)


@pytest.mark.parametrize("whole", [lambda m: m, lambda m: {"a": [m, W]}])
def test_resume_warns_about_attributes_of_modules_that_training_changed(
    tmp_path, caplog, whole
):
    later = Rated(0.9, phase="cold", sizes=(1, 3), odd="\ud800\udc00", text="a" * 999)
    later.parts[0].rate = 0.7
    begin = Rated(phase="warm", sizes=(1, 2), odd="", text="", new=3)
    with saved(tmp_path, whole(later)) as ckpt:
        resume(ckpt, whole(begin))
        [told] = [record.getMessage() for record in caplog.records]
        assert "4 static fields" in told
        for row in (
            "drop/rate: 0.9 in the step, 0.1 in the state",
            "parts/0/rate: 0.7 in the step, 0.5 in the state",
            'phase: "cold" in the step, "warm" in the state',
            "sizes: [1, 3] in the step, [1, 2] in the state",
        ):
            assert row in told
        caplog.clear()
        later.eval()  # no change by training
        resume(ckpt, whole(later))
    assert not caplog.records


def test_attributes_beyond_a_limit_hinder_no_save(tmp_path, caplog):
    def model(text):
        parts = [Rated(**{f"a{i}": text for i in range(200)}) for _ in range(25)]
        return nnx.List(parts)

    begin = model("b" * 240)
    with saved(tmp_path, model("a" * 240)) as ckpt:
        size = sum(len(file.read_bytes()) for file in ckpt.directory.rglob("*.json"))
        assert size < 2**21
        check_same(*map(nnx.state, (resume(ckpt, begin), begin)))
    assert "/a0: " in caplog.text
