"""A run begins from another checkpoint, once, and says so ever after."""

import hashlib
import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import flaxckpt
from flaxckpt import errors
from flaxckpt.cli import app
from flaxckpt.transforms import drop, grow, keep, rename


def state_of(classes, seed, tx=None, steps=0):
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    params = {
        "trunk": {"kernel": jax.random.normal(next(keys), (4, 4))},
        "head": jax.random.normal(next(keys), (4, classes)),
    }
    state = TrainState.create(apply_fn=None, params=params, tx=tx or optax.adamw(1e-3))
    for _ in range(steps):
        state = state.apply_gradients(grads=params)
    return state


@pytest.fixture
def source(tmp_path):
    state = state_of(2, seed=0, steps=3)
    flaxckpt.save(tmp_path / "source", state)
    return tmp_path / "source", state


def begin(directory, state, **options):
    """One start of a training script: where it begins, and its first save."""
    with flaxckpt.Checkpointer(directory) as ckpt:
        on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=1, check_step=False)
        state, start = on_step.restore_or_init(state, **options)
        on_step(start + 1, state)
    return state, start


@pytest.mark.slow
def test_loads_params_from_source_and_initializes_rest(tmp_path, source, caplog):
    path, old = source
    fresh = state_of(2, seed=1)
    with caplog.at_level(logging.WARNING):
        state, start = begin(tmp_path / "run", fresh, source=path)
    assert start == 0
    assert state.step == 0
    jax.tree.map(np.testing.assert_array_equal, old.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, fresh.opt_state, state.opt_state)
    assert not caplog.text  # nothing of this is unexpected


def test_optimizer_holding_params_gets_new_ones(tmp_path, source):
    path, old = source
    tx = optax.contrib.schedule_free_adamw(1e-3)
    state, _ = begin(tmp_path / "run", state_of(2, seed=1, tx=tx), source=path)
    jax.tree.map(np.testing.assert_array_equal, old.params, state.opt_state.z)


def test_own_newest_step_wins_without_second_transform(tmp_path, source):
    path, old = source
    fresh = state_of(3, seed=1)
    steps = {"source_transforms": [grow("params/head", 1, 3, init="zeros")]}
    first, start = begin(tmp_path / "run", fresh, source=path, **steps)
    assert start == 0
    np.testing.assert_array_equal(first.params["head"][:, :2], old.params["head"])
    shutil.rmtree(path)  # it is not even looked for
    again, start = begin(tmp_path / "run", fresh, source=path, **steps)
    assert start == 1
    jax.tree.map(np.testing.assert_array_equal, first.params, again.params)


def test_missing_source_raises_error_in_new_run(tmp_path):
    with pytest.raises(errors.CheckpointNotFoundError):
        begin(tmp_path / "run", state_of(2, 0), source=tmp_path / "nowhere")


def test_error_for_mismatched_source_suggests_transforms(tmp_path, source):
    with pytest.raises(errors.RestoreMismatchError) as caught:
        begin(tmp_path / "run", state_of(3, 1), source=source[0])
    assert "params/head: wanted float32[4, 3], found float32[4, 2]" in str(caught.value)
    assert 'source_transforms=[drop(r"params/head")]' in str(caught.value)


def test_initializes_fresh_head_on_request(tmp_path, source):
    path, old = source
    fresh = state_of(3, seed=1)
    state, _ = begin(
        tmp_path / "run",
        fresh,
        source=path,
        source_transforms=[drop("params/head")],
        missing="init",
    )
    np.testing.assert_array_equal(fresh.params["head"], state.params["head"])
    np.testing.assert_array_equal(
        old.params["trunk"]["kernel"], state.params["trunk"]["kernel"]
    )


@pytest.mark.parametrize(
    ("optimizer", "anew", "dropped"),
    [
        ("reinit", "7 init, 1 loaded", "1 dropped"),
        ("match", "5 loaded, 3 init", "3 dropped"),  # the moments of the head, too
    ],
)
def test_source_log_and_journal_count_leaves_like_plan(
    tmp_path, source, caplog, capsys, optimizer, anew, dropped
):
    path, _ = source
    fresh = state_of(3, seed=1)
    flaxckpt.save(tmp_path / "tuned", fresh)
    with caplog.at_level(logging.INFO):
        begin(
            tmp_path / "run",
            fresh,
            source=path,
            source_transforms=[drop("params/head")],
            missing="init",
            optimizer=optimizer,
        )
    [logged] = [m for m in caplog.messages if m.startswith(f"restored {path}: ")]
    words = ["plan", str(path), str(tmp_path / "tuned"), "--as-source"]
    words += ["--optimizer", optimizer, "--drop", "params/head", "--missing", "init"]
    app(words, standalone_mode=False)
    planned = capsys.readouterr().out.splitlines()[0]
    counts = logged.removeprefix("restored ").partition("; ")[0]
    assert counts == planned.partition("; ")[0]
    assert counts == f"{path}: {anew}"
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    outcomes = [json.loads(line)["details"].get("outcome") for line in lines]
    assert [*filter(None, outcomes)] == [f"{anew}, {dropped}"]


def test_resumes_at_step_of_source(tmp_path, source):
    path, old = source
    state, start = begin(
        tmp_path / "run", state_of(2, seed=1), source=path, optimizer="match"
    )
    assert start == 3
    for wanted, found in zip(jax.tree.leaves(old), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(wanted, found)
    assert flaxckpt.Checkpointer(tmp_path / "run").steps() == [4]


def of_train_state(tx, step):
    return state_of(2, seed=step, tx=tx).replace(step=step)


def of_nnx(tx, step):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(step))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.step[...] = jnp.uint32(step)
    return (model, optimizer)


def without_optimizer(tx, step):
    return {"params": state_of(2, seed=step).params, "step": step}


def parts_of(state):
    """Returns the step counter and the weights of a state of these kinds."""
    if isinstance(state, tuple):
        return state[1].step[...], nnx.state(state[0])
    parts = state if isinstance(state, dict) else vars(state)
    return parts["step"], parts["params"]


@pytest.mark.parametrize("kind", [of_train_state, of_nnx, without_optimizer])
@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        optax.chain(optax.clip(1.0), optax.sgd(0.1)),
        optax.masked(optax.sgd(0.1), True),
        optax.identity(),
        optax.sgd(0.1, momentum=0.9),
    ],
    ids=["sgd", "clipped", "masked", "identity", "momentum"],
)
def test_run_begins_at_its_step_counter_if_optimizer_has_no_leaves(tmp_path, tx, kind):
    old, new = kind(tx, 7), kind(tx, 0)
    flaxckpt.save(tmp_path / "whole", old)
    flaxckpt.save(tmp_path / "weights", old, transforms=[keep("(0|params)/.*")])
    for source, optimizer, begin_at in (
        ("whole", "reinit", 0),
        ("weights", "reinit", 0),
        ("whole", "match", 7),
    ):
        run = tmp_path / f"{source}-{optimizer}"
        options = {"source": tmp_path / source, "optimizer": optimizer}
        with flaxckpt.Checkpointer(run) as checkpointer:
            on_step = flaxckpt.CheckpointCallback(checkpointer, every_steps=1)
            state, start = on_step.restore_or_init(new, **options)
        step, weights = parts_of(state)
        assert (start, int(step)) == (begin_at, begin_at)
        jax.tree.map(np.testing.assert_array_equal, parts_of(old)[1], weights)


@pytest.mark.parametrize("suffix", ["", ".msgpack", ".safetensors"])
@pytest.mark.parametrize("unused", ["warn", "error"])
def test_new_optimizer_takes_place_of_any_in_source(tmp_path, caplog, suffix, unused):
    old = state_of(2, seed=0, steps=3)
    flaxckpt.save(tmp_path / "whole", old)
    source = tmp_path / f"source{suffix}"
    flaxckpt.convert(tmp_path / "whole", source)
    for name in ("flaxckpt.json", "commit_success.txt") if not suffix else ():
        (source / name).unlink()  # as Orbax writes it, without roles
    fresh = state_of(2, seed=1, tx=optax.chain(optax.clip(1.0), optax.adam(1e-3)))
    with caplog.at_level(logging.WARNING):
        state, start = begin(
            tmp_path / "run", fresh, source=source, unused=unused, optimizer="reinit"
        )
    assert (start, state.step, caplog.text) == (0, 0, "")
    jax.tree.map(np.testing.assert_array_equal, old.params, state.params)


@pytest.mark.slow
def test_nnx_optimizer_restarts_with_its_counter(tmp_path):
    def build(seed):
        model = nnx.Linear(3, 3, rngs=nnx.Rngs(seed))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        return {"model": model, "optimizer": optimizer}

    old = build(0)
    grads = nnx.grad(lambda m: m(jnp.ones((2, 3))).sum())(old["model"])
    old["optimizer"].update(old["model"], grads)
    flaxckpt.save(tmp_path / "source", old)
    state, start = begin(tmp_path / "run", build(1), source=tmp_path / "source")
    assert start == 0
    assert state["optimizer"].step[...] == 0
    assert not state["optimizer"].opt_state[0].mu["kernel"].any()
    np.testing.assert_array_equal(state["model"].kernel, old["model"].kernel)


def test_uses_step_of_run_as_source(tmp_path):
    states = [state_of(2, seed) for seed in range(3)]
    with flaxckpt.Checkpointer(tmp_path / "old") as ckpt:
        for step, state in enumerate(states):
            ckpt.save(step, state)
    fresh = state_of(2, seed=9)
    for source_step, wanted in ((None, states[2]), (0, states[0])):
        run = tmp_path / f"run_{source_step}"
        options = {"source": tmp_path / "old", "source_step": source_step}
        state, _ = begin(run, fresh, **options)
        jax.tree.map(np.testing.assert_array_equal, wanted.params, state.params)
        [origin] = flaxckpt.metadata(run).lineage
        assert origin.step == (2 if source_step is None else 0)


def test_records_and_extends_lineage(tmp_path, source):
    path, _ = source
    moved = rename("params/trunk/(.*)", r"params/trunk/\1")
    fresh = state_of(2, seed=1)
    begin(tmp_path / "run", fresh, source=path, source_transforms=[moved])
    begin(tmp_path / "run", fresh)  # a restart
    begin(tmp_path / "next", fresh, source=tmp_path / "run")
    nearest, first = flaxckpt.metadata(tmp_path / "next").lineage
    assert (nearest.path, nearest.step) == (str(tmp_path / "run" / "2"), 2)
    assert nearest.transforms == ()
    assert (first.path, first.step) == (str(path), None)
    assert first.transforms == (str(moved),)
    content = (path / "flaxckpt.json").read_bytes()
    assert first.digest == "sha256:" + hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    "lineage",
    [
        {"path": "x"},
        [{"path": "x", "step": "1", "digest": None, "transforms": []}],
        [{"path": "x", "step": 1, "digest": None, "transforms": [1]}],
        [["x", 1, None, []]],
        "x",
    ],
)
def test_rejects_manifest_with_invalid_lineage(tmp_path, source, lineage):
    path, _ = source
    manifest = json.loads((path / "flaxckpt.json").read_text())
    manifest["lineage"] = lineage
    (path / "flaxckpt.json").write_text(json.dumps(manifest))
    (path / "commit_success.txt").unlink()
    with pytest.raises(errors.DamagedCheckpointError, match="is not a manifest"):
        flaxckpt.metadata(path)


@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("run", 10),
        ("run/10", 10),
        ("run/10/", 10),
        ("run/latest", 10),
        ("link", 10),
        ("named/step_12", 12),
        ("orbax", 7),
        ("orbax/7", 7),
        ("memory://lineage-of-steps/run/10/", 10),
        ("single", None),
        ("model.msgpack", None),
    ],
)
def test_lineage_records_step_for_any_source_path(tmp_path, monkeypatch, place, step):
    monkeypatch.chdir(tmp_path)
    state = {"w": jnp.ones(2)}
    for run in ("run", "memory://lineage-of-steps/run"):
        with flaxckpt.Checkpointer(run) as checkpointer:
            checkpointer.save(10, state, on_exists="skip")
    (tmp_path / "run" / "latest").symlink_to("10")
    (tmp_path / "link").symlink_to("run/10")
    for path in ("single", "named/step_12"):
        flaxckpt.save(path, state)
    flaxckpt.convert("single", "model.msgpack")
    shutil.copytree("single", "orbax/7")
    for name in ("flaxckpt.json", "commit_success.txt"):  # as Orbax writes it
        (tmp_path / "orbax" / "7" / name).unlink()
    with flaxckpt.Checkpointer("new") as checkpointer:
        start = flaxckpt.CheckpointCallback(checkpointer, every_steps=1)
        begun, number = start.restore_or_init(state, source=place)
        start(number + 1, begun, force=True)
    [origin] = flaxckpt.metadata("new").lineage
    assert origin.step == step


def test_run_without_source_has_no_lineage(tmp_path):
    begin(tmp_path / "run", state_of(2, 0))
    assert flaxckpt.metadata(tmp_path / "run").lineage == ()


def test_abstract_state_starts_at_step_0(tmp_path, source):
    path, old = source
    abstract = flaxckpt.abstract_state(state_of(2, seed=1))
    state, start = begin(tmp_path / "run", abstract, source=path)
    assert start == 0
    assert state.step == 0
    jax.tree.map(np.testing.assert_array_equal, old.params, state.params)
    flaxckpt.save(tmp_path / "params", {"params": old.params})
    state, start = begin(tmp_path / "run2", abstract, source=tmp_path / "params")
    assert (start, state.step, state.opt_state[0].count) == (0, 0, 0)


def test_resumes_at_step_of_nnx_optimizer_in_source(tmp_path):
    def build(seed, steps):
        model = nnx.Linear(3, 3, rngs=nnx.Rngs(seed))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        for _ in range(steps):
            grads = nnx.grad(lambda m: m(jnp.ones((2, 3))).sum())(model)
            optimizer.update(model, grads)
        return {"model": model, "optimizer": optimizer}

    flaxckpt.save(tmp_path / "source", build(0, steps=3))
    options = {"source": tmp_path / "source", "optimizer": "match"}
    _, start = begin(tmp_path / "run", build(1, steps=0), **options)
    assert start == 3
    two = {"a": build(0, steps=3), "b": build(0, steps=2)}
    flaxckpt.save(tmp_path / "two", two)
    options["source"] = tmp_path / "two"
    with pytest.raises(errors.OptionError, match="counters of the source disagree"):
        begin(tmp_path / "run2", two, **options)


def test_optimizer_of_some_params_starts_with_its_own_moments(tmp_path, caplog):
    def partial(seed):
        state = state_of(2, seed)
        part = state.tx.init({"head": state.params["head"]})
        return state.replace(opt_state=part)

    flaxckpt.save(tmp_path / "source", partial(0))
    state, _ = begin(tmp_path / "run", partial(1), source=tmp_path / "source")
    assert set(state.opt_state[0].mu) == {"head"}
    moved = state.replace(opt_state=state.tx.init({"trunk": state.params["trunk"]}))
    with caplog.at_level(logging.WARNING):
        found = flaxckpt.load(tmp_path / "source", moved)
    assert set(found.opt_state[0].mu) == {"trunk"}


def test_warns_about_reinitialized_optimizer_leaves(tmp_path, source, caplog):
    path, old = source
    fresh = state_of(2, seed=1)
    plain = {"params": fresh.params, "opt_state": fresh.opt_state, "step": 0}
    with caplog.at_level(logging.WARNING):
        state, start = begin(tmp_path / "run", plain, source=path)
    assert start == 0
    jax.tree.map(np.testing.assert_array_equal, old.params, state["params"])
    assert "initialized: opt_state/0/count" in caplog.text


def test_steps_with_other_names_do_not_count_as_empty_run(tmp_path, source):
    _, old = source
    with flaxckpt.Checkpointer(tmp_path / "run", step_format="step_{step}") as ckpt:
        ckpt.save(7, old)
    fresh = state_of(2, seed=1)
    with pytest.raises(
        errors.CheckpointFormatError, match=r"step_format='step_\{step\}'"
    ):
        begin(tmp_path / "run", fresh)
    state, start = begin(tmp_path / "next", fresh, source=tmp_path / "run")
    assert start == 0
    np.testing.assert_array_equal(old.params["head"], state.params["head"])


@pytest.mark.parametrize("name", ["step_7", "model_7"])
def test_source_does_not_replace_steps_with_other_names(tmp_path, source, name):
    path, old = source
    flaxckpt.save(tmp_path / "run" / name, old)
    fresh = state_of(2, seed=1)
    if name == "model_7":  # no usual name of a step
        assert begin(tmp_path / "run", fresh, source=path)[1] == 0
        return
    with pytest.raises(errors.CheckpointFormatError, match=r"other names .*step_7"):
        begin(tmp_path / "run", fresh, source=path)
    # A source in the directory itself: its checkpoints are known.
    assert begin(tmp_path / "run", fresh, source=tmp_path / "run")[1] == 0


def test_resume_tells_that_another_source_is_not_read(tmp_path, source, caplog):
    path, old = source
    flaxckpt.save(tmp_path / "other", old)
    fresh = state_of(2, seed=1)
    with flaxckpt.Checkpointer(tmp_path / "alone") as ckpt:
        ckpt.save(1, fresh)
    begin(tmp_path / "run", fresh, source=path)
    for run, given, began in (
        ("run", path, None),
        ("run", tmp_path / "other", f"it began from {path}"),
        ("alone", path, "it began without a source"),
    ):
        caplog.clear()
        assert begin(tmp_path / run, fresh, source=given)[1] > 0
        told = [r.message for r in caplog.records if "is not read" in r.message]
        assert bool(told) == (began is not None)
        assert began is None or began in told[0]


def test_run_whose_steps_are_gone_does_not_begin_anew_in_silence(tmp_path, caplog):
    fresh = state_of(2, seed=1)
    assert begin(tmp_path / "run", fresh)[1] == 0
    assert not caplog.records
    shutil.rmtree(tmp_path / "run" / "1")
    assert begin(tmp_path / "run", fresh)[1] == 0
    assert f"the save of this step to {tmp_path}/run/1, and no del" in caplog.text
    caplog.clear()
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.delete(1)
    assert begin(tmp_path / "run", fresh)[1] == 0
    assert not caplog.records


@pytest.mark.parametrize("kind", ["staged", "removed", "deleted", "damaged"])
def test_resume_tells_that_a_newer_step_is_gone(tmp_path, caplog, kind):
    fresh = state_of(2, seed=1)
    staging = tmp_path / "fast" if kind == "staged" else None
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, fresh)
    with flaxckpt.Checkpointer(tmp_path / "run", staging=staging) as ckpt:
        ckpt.save(2, fresh)
        if kind == "deleted":
            ckpt.delete(2)
    if kind == "damaged":
        (tmp_path / "run/2/flaxckpt.json").write_text("")
    elif kind != "deleted":  # as if the upload had not ended
        shutil.rmtree(tmp_path / "run/2")
    caplog.clear()
    assert begin(tmp_path / "run", fresh)[1] == 1
    told = [text for text in caplog.messages if "has no step 2, although" in text]
    assert bool(told) == (kind in ("staged", "removed"))
    if told:
        place = tmp_path / ("fast" if staging else "run") / "2"
        assert f"to {place}, and no deletion: the training continues from" in told[0]
        assert "step 1. Was it saved with staging=" in told[0]


def test_link_with_a_name_of_another_format_is_no_empty_run(tmp_path, source):
    _, old = source
    flaxckpt.save(tmp_path / "elsewhere", old)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step_7").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.CheckpointFormatError, match="the symbolic link step_7"):
        begin(tmp_path / "run", state_of(2, seed=1))


@pytest.mark.parametrize("newest_is_linked", [True, False])
@pytest.mark.parametrize("has_other", [True, False])
def test_run_does_not_go_on_before_a_step_that_is_a_link(
    tmp_path, newest_is_linked, has_other
):
    state = state_of(2, seed=0)
    run, linked = tmp_path / "run", 7 if newest_is_linked else 3
    with flaxckpt.Checkpointer(run) as checkpointer:
        for step in (linked, 5) if has_other else (linked,):
            checkpointer.save(step, state)
    (run / str(linked)).rename(tmp_path / "elsewhere")
    (run / str(linked)).symlink_to(tmp_path / "elsewhere")
    if has_other and not newest_is_linked:
        assert begin(run, state)[1] == 5
        return
    told = f"the symbolic link {linked}, which is no step: move"
    with pytest.raises(errors.CheckpointFormatError, match=told):
        begin(run, state)
    (run / str(linked)).unlink()
    assert begin(run, state)[1] == (5 if has_other else 0)


def test_error_names_moments_of_other_transform(tmp_path):
    state = state_of(2, seed=0)
    flaxckpt.save(tmp_path / "c", state)
    abstract = flaxckpt.abstract_state(
        state_of(2, seed=0, tx=optax.adabelief(1e-3)).opt_state
    )
    with pytest.raises(errors.RestoreMismatchError, match="of another transform"):
        flaxckpt.load(tmp_path / "c", {"opt_state": abstract})


@pytest.mark.parametrize("is_run", [True, False])
def test_optimizer_resumes_at_its_step_without_counter(tmp_path, caplog, is_run):
    params = {"w": jnp.ones(2)}
    tx = optax.adam(1e-3)
    moments = tx.init(params)
    for _ in range(20):
        _, moments = tx.update(params, moments)
    source, state = tmp_path / "source", {"params": params, "opt_state": moments}
    if is_run:
        with flaxckpt.Checkpointer(source) as ckpt:
            ckpt.save(20, state)
    else:
        flaxckpt.save(source, state)
    fresh = {"params": params, "opt_state": tx.init(params)}

    def begin(name, source, optimizer):
        with flaxckpt.Checkpointer(tmp_path / name) as ckpt:
            on_step = flaxckpt.CheckpointCallback(ckpt, on_preemption=False)
            return on_step.restore_or_init(fresh, source=source, optimizer=optimizer)

    begun, start = begin("goes on", source, "match")
    assert start == begun["opt_state"][0].count == 20
    assert "begins at step 20" in caplog.text
    begun, start = begin("anew", source, "reinit")
    assert start == begun["opt_state"][0].count == 0
    flaxckpt.save(tmp_path / "params", {"params": params})
    assert begin("no optimizer", tmp_path / "params", "match")[1] == 0


def test_warns_if_source_lacks_step_counter(tmp_path, caplog):
    params, tx = {"w": jnp.ones(2)}, optax.adam(1e-3)
    _, moments = tx.update(params, tx.init(params))
    with flaxckpt.Checkpointer(tmp_path / "source") as ckpt:
        ckpt.save(25, {"params": params, "opt_state": moments})
    for step, is_told in ((0, True), (1, False)):
        fresh = {"params": params, "opt_state": moments, "step": jnp.int32(step)}
        caplog.clear()
        with flaxckpt.Checkpointer(tmp_path / f"from {step}") as ckpt:
            on_step = flaxckpt.CheckpointCallback(ckpt, on_preemption=False)
            _, start = on_step.restore_or_init(
                fresh, source=tmp_path / "source", optimizer="match", missing="init"
            )
        assert start == step
        assert ("counts 1 updates" in caplog.text) == is_told
