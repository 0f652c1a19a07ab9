"""Names of other libraries get an error of one line that says the right name."""

import copy
import dataclasses
import inspect
import os
import pickle
import re
import traceback

import flax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import checkpoints
from flax.training.train_state import TrainState

import flaxckpt
from flaxckpt import configs, datasets, errors, policies, transforms
from tests.helpers import seams

CALL = "()"
ANSWERS = seams.current("guessed_names.read_answers")()


def find(place):
    """Returns the module, class, function or method of a place in the table."""
    if place.startswith("flaxckpt"):
        return {"flaxckpt": flaxckpt, "flaxckpt.policies": policies}[place]
    owner, _, method = place.partition(".")
    if owner == "KerasCheckpoint":
        os.environ["KERAS_BACKEND"] = "jax"
        pytest.importorskip("keras")
        from flaxckpt.integrations import keras as home
    else:
        [home] = [m for m in (flaxckpt, policies, configs) if owner in m.__all__]
    return getattr(getattr(home, owner), method) if method else getattr(home, owner)


def parameters(found):
    return {} if inspect.ismodule(found) else inspect.signature(found).parameters


@pytest.mark.parametrize("place", ANSWERS)
def test_error_answers_guessed_name_in_one_line(place):
    found = find(place)
    for name, answer in ANSWERS[place].items():
        if name == CALL:
            continue
        assert name not in parameters(found)
        if inspect.ismodule(found):
            assert not hasattr(found, name)
            with pytest.raises(errors.UnknownNameError) as raised:
                getattr(found, name)
        else:
            self = [None] if "." in place else []
            with pytest.raises(errors.ArgumentError) as raised:
                found(*self, **{name: 1})
            assert isinstance(raised.value, TypeError)
        assert str(raised.value) == f"{place} has no {name}: {answer}"


@pytest.mark.parametrize("place", [p for p in ANSWERS if p != "flaxckpt"])
def test_answers_name_existing_arguments_and_functions(place):
    known = parameters(find(place))
    callables = {
        *dir(flaxckpt),
        *dir(flaxckpt.Checkpointer),
        *dir(flaxckpt.CheckpointCallback),
        *dir(flaxckpt.SaveHandle),
        *dir(policies),
        *dir(transforms),
        "KerasCheckpoint",
        "on_step",
    }
    for answer in set(ANSWERS[place].values()):
        if keyword := re.match(r"write (\w+)=", answer):
            assert keyword[1] in known, answer
        assert set(re.findall(r"(\w+)\(", answer)) <= callables, answer


def test_error_answers_guessed_attributes_of_objects(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as checkpointer:
        handle = checkpointer.save(1, {"w": np.zeros(3)})
        on_step = flaxckpt.CheckpointCallback(checkpointer, every_steps=1)
        for owner, name, answer in (
            (checkpointer, "all_steps", "steps()"),
            (checkpointer, "latest", "latest_step()"),
            (checkpointer, "max_to_keep", "keep=[LatestN(3)]"),
            (on_step, "should_save", "on_step(step, state), which returns if it saved"),
            (handle, "result", "wait()"),
        ):
            assert not hasattr(owner, name)
            assert getattr(owner, name, None) is None
            wanted = re.escape(f"{type(owner).__name__} has no {name}: write {answer}")
            with pytest.raises(AttributeError, match=f"^{wanted}$") as raised:
                getattr(owner, name)
            # Python adds no guess of its own when it prints the error.
            printed = traceback.format_exception(raised.value)
            assert "Did you mean" not in printed[-1]


def test_other_names_raise_python_errors(tmp_path):
    checkpointer = flaxckpt.Checkpointer(tmp_path)
    with pytest.raises(AttributeError, match="'Checkpointer' object has no") as raised:
        _ = checkpointer.stepz
    assert raised.value.name == "stepz"
    assert raised.value.obj is checkpointer
    with pytest.raises(TypeError, match="unexpected keyword argument 'zzz'") as wrong:
        flaxckpt.Checkpointer(tmp_path, zzz=())
    assert not isinstance(wrong.value, errors.CheckpointError)
    with pytest.raises(errors.ArgumentError, match=r"no kep: did you mean keep=\?$"):
        flaxckpt.Checkpointer(tmp_path, kep=())


def test_keeps_type_error_raised_inside_call(tmp_path):
    def fail():
        raise TypeError("argument 'max_to_keep' of another function")

    with pytest.raises(TypeError, match="of another function") as raised:
        flaxckpt.Checkpointer(tmp_path, metrics_from=fail, sinks=iter_that_fails())
    assert type(raised.value) is TypeError


def iter_that_fails():
    raise TypeError("argument 'max_to_keep' of another function")


def test_keeps_attribute_error_raised_inside_property():
    class Broken(flaxckpt.SaveHandle):
        @property
        def broken(self):
            return self.inner

    with pytest.raises(AttributeError, match="no attribute 'inner'"):
        _ = Broken.__new__(Broken).broken


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda: policies.BestN("loss", 1), 'BestN(1, "loss", "min")'),
        (lambda: policies.BestN("loss", 1, "min"), 'BestN(1, "loss", "min")'),
        (lambda: policies.BestN("acc", 5, "max"), 'BestN(5, "acc", "max")'),
        (lambda: policies.BestN("acc", 5), 'BestN(5, "acc", "min")'),
        (lambda: policies.BestN(1, "loss"), 'BestN(1, "loss", "min")'),
        (lambda: policies.BestN(3, mode="max"), 'BestN(3, "loss", "max")'),
        (lambda: policies.BestN(metric='"'), r'BestN(1, "\"", "min")'),
        (lambda: policies.BestN(best_fn=min), 'BestN(1, "loss", "min")'),
        (lambda: policies.LatestN(4, 5), "LatestN(4)"),
        (lambda: policies.OnSteps(), "OnSteps([100, 200])"),
    ],
)
def test_error_corrects_policy_calls_with_their_values(call, answer):
    with pytest.raises(errors.OptionError) as raised:
        call()
    [line] = str(raised.value).splitlines()
    assert line.endswith(f"write {answer}")


def test_error_of_wrong_call_shows_correct_call(tmp_path):
    checkpointer = flaxckpt.Checkpointer(tmp_path)
    for call, wanted in (
        (lambda: flaxckpt.Checkpointer(tmp_path, 3), "keep=[LatestN(3)]"),
        (lambda: flaxckpt.save({"w": 1}), "write save(path, state)"),
        (lambda: checkpointer.save({"w": 1}), "write save(step, state)"),
        (lambda: policies.LatestN(), "write LatestN(3)"),
        (lambda: policies.LatestN(keep=3), "write LatestN(3)"),
        (lambda: flaxckpt.verify(tmp_path, "latest"), "leave it out, for the newest"),
    ):
        with pytest.raises(errors.ArgumentError, match=re.escape(wanted)):
            call()


def test_all_functions_report_missing_arguments():
    functions = [getattr(flaxckpt, name) for name in flaxckpt.__all__]
    for function in filter(inspect.isfunction, functions):
        with pytest.raises(
            errors.ArgumentError, match=rf": write {function.__name__}\("
        ):
            function()


STATES = {
    "dict": lambda: {"w": np.zeros(3)},
    "numbers": lambda: {"w": 1.0},
    "frozen": lambda: flax.core.freeze({"w": np.zeros(3)}),
    "linen": lambda: TrainState.create(
        apply_fn=None, params={"w": np.zeros(3)}, tx=optax.sgd(0.1)
    ),
    "nnx": lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (lambda c, o, p, s: c.save(s, 2), "save(2, state)"),
        (lambda c, o, p, s: c.save_params_only(s, 2), "save_params_only(2, state)"),
        (lambda c, o, p, s: c.save(2, s, {"x": 1}), "save(2, state, metrics={'x': 1})"),
        (lambda c, o, p, s: c.restore(1, s), "restore(state, step=1)"),
        (lambda c, o, p, s: c.restore(s, 1), "restore(state, step=1)"),
        (lambda c, o, p, s: c.restore(1), "restore(state, step=1)"),
        (lambda c, o, p, s: c.restore_latest(1, s), "restore_latest(state)"),
        (lambda c, o, p, s: c.add_metrics({"x": 1}, 1), "add_metrics(1, {'x': 1})"),
        (lambda c, o, p, s: c.delete(1, "params"), 'delete(1, item="params")'),
        (lambda c, o, p, s: c.best_step("min", "x"), 'best_step("x", "min")'),
        (lambda c, o, p, s: c.metrics(), "metrics(step)"),
        (lambda c, o, p, s: c.pin(), "pin(step)"),
        (lambda c, o, p, s: o(s, 2), "on_step(2, state)"),
        (lambda c, o, p, s: o.restore_or_init(), "restore_or_init(state)"),
        (
            lambda c, o, p, s: o.restore_or_init(s, "other"),
            'restore_or_init(state, source="other")',
        ),
        (lambda c, o, p, s: flaxckpt.load(s, p), 'load("run", state)'),
        (lambda c, o, p, s: flaxckpt.load(p, s, 1), 'load("run", state, step=1)'),
        (lambda c, o, p, s: flaxckpt.load(p, 1), 'load("run", state, step=1)'),
        (lambda c, o, p, s: flaxckpt.plan(s, p), 'plan("run", state)'),
        (lambda c, o, p, s: flaxckpt.save(s, "new"), 'save("new", state)'),
        (lambda c, o, p, s: flaxckpt.save_async(s, "new"), 'save_async("new", state)'),
        (lambda c, o, p, s: flaxckpt.verify(p, 1), 'verify("run", step=1)'),
        (lambda c, o, p, s: flaxckpt.metadata(p, 1), 'metadata("run", step=1)'),
        (
            lambda c, o, p, s: flaxckpt.diff(p, 1, 2),
            "diff(path, path, step_a=1, step_b=2)",
        ),
        (
            lambda c, o, p, s: flaxckpt.diff(p, a=1, b=2),
            "diff(path, path, step_a=1, step_b=2)",
        ),
        (
            lambda c, o, p, s: flaxckpt.metadata(p, "best"),
            'step=Checkpointer(path).best_step("loss", "min")',
        ),
        (lambda c, o, p, s: flaxckpt.open_leaf(p), 'open_leaf("run", leaf_path)'),
        (lambda c, o, p, s: flaxckpt.suggest(p), 'suggest("run", state)'),
        (
            lambda c, o, p, s: flaxckpt.convert(p, "new", "msgpack"),
            'convert("run", "new", format="msgpack")',
        ),
    ],
)
def test_error_of_misplaced_arguments_shows_correct_call(
    tmp_path, monkeypatch, kind, call, wanted
):
    monkeypatch.chdir(tmp_path)
    state = STATES[kind]()
    with flaxckpt.Checkpointer("run") as checkpointer:
        checkpointer.save(1, state, metrics={"x": 1.0}).wait()
        on_step = flaxckpt.CheckpointCallback(checkpointer, preflight=False)
        with pytest.raises(errors.ArgumentError) as raised:
            call(checkpointer, on_step, "run", state)
        assert str(raised.value).endswith(f": write {wanted}")
        assert checkpointer.steps() == [1]


def test_invalid_values_keep_their_own_error(tmp_path):
    checkpointer = flaxckpt.Checkpointer(tmp_path)
    state = {"w": np.zeros(3)}
    for call in (
        lambda: checkpointer.save("3", state),
        lambda: checkpointer.save(3.5, state),
        lambda: checkpointer.save(3, state, metrics={"loss": "low"}),
        lambda: checkpointer.delete("1"),
        lambda: flaxckpt.Checkpointer(tmp_path, step_format=5),
    ):
        with pytest.raises(errors.OptionError) as raised:
            call()
        assert not isinstance(raised.value, errors.ArgumentError)


def test_error_answers_words_given_as_step(tmp_path):
    checkpointer = flaxckpt.Checkpointer(tmp_path)
    with pytest.raises(errors.OptionError, match=r"latest_step\(\)"):
        checkpointer.metrics("latest")
    with pytest.raises(errors.OptionError, match=r'best_step\("loss", "min"\)'):
        checkpointer.restore({"w": np.zeros(3)}, step="best")


def test_errors_explain_objects_of_wrong_type(tmp_path):
    checkpointer = flaxckpt.Checkpointer(tmp_path)
    on_step = flaxckpt.CheckpointCallback(checkpointer)
    for call, wanted in (
        (lambda: flaxckpt.verify(checkpointer), "pass its directory"),
        (lambda: flaxckpt.CheckpointCallback({}), "wanted a Checkpointer, got a dict"),
        (lambda: on_step.on_step(1), "call the callback itself, on_step(step, state)"),
    ):
        with pytest.raises(errors.OptionError, match=re.escape(wanted)):
            call()


def test_explained_objects_keep_pickling_and_signatures():
    policy = policies.BestN(2, "loss", "max")
    assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == policy
    assert list(inspect.signature(policies.BestN).parameters) == ["n", "metric", "mode"]
    assert flaxckpt.load.__module__ == "flaxckpt._checkpoint.restore"
    with pytest.raises(errors.ArgumentError) as raised:
        policies.LatestN(keep_n=3)
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == str(raised.value)


def test_signatures_list_all_restore_options():
    load = inspect.signature(flaxckpt.load).parameters
    for function in (flaxckpt.load_async, flaxckpt.plan):
        listed = dict(inspect.signature(function).parameters)
        assert [*listed] == [*load]
        del listed["abstract_state"]
        assert listed.items() <= load.items()
    restore = inspect.signature(flaxckpt.Checkpointer.restore).parameters
    assert load.keys() - restore.keys() == {"path", "read_once"}
    differing = {name for name in load.keys() & restore if load[name] != restore[name]}
    assert differing == {"unused"}
    assert load["missing"].default == "error"
    assert "'init'" in load["missing"].annotation
    for function, name in ((flaxckpt.load, "missin"), (flaxckpt.plan, "verfy")):
        with pytest.raises(errors.ArgumentError, match="did you mean"):
            function("run", {}, **{name: None})
    for function in (flaxckpt.load, flaxckpt.load_async, flaxckpt.plan):
        with pytest.raises(TypeError, match=r"^\w+\(\) got an .* argument 'purpose'"):
            function("run", {}, purpose="resume")


# ---- the table has the names of other libraries --------------------------------------


@pytest.mark.parametrize("module", [configs, datasets, errors, policies, transforms])
def test_package_points_to_names_of_its_modules(module):
    for name in {*module.__all__} - {*ANSWERS["flaxckpt"]}:
        with pytest.raises(errors.UnknownNameError) as raised:
            getattr(flaxckpt, name)
        answer = f"write {module.__name__}.{name}"
        assert str(raised.value) == f"flaxckpt has no {name}: {answer}"


def missing(theirs, place, *others):
    """Returns the names of another library that are neither ours nor in the table."""
    found = find(place)
    known = {*ANSWERS[place], *parameters(found), *dir(found), *others}
    return {name for name in theirs if not name.startswith("_")} - known


def test_knows_or_answers_orbax_names():
    ocp = pytest.importorskip("orbax.checkpoint")
    from orbax.checkpoint import v1

    def arguments(function):
        return set(inspect.signature(function).parameters) - {"self"}

    manager, options = ocp.CheckpointManager, ocp.CheckpointManagerOptions
    assert not missing(dir(manager), "Checkpointer")
    assert not missing(dir(v1.training.Checkpointer), "Checkpointer")
    assert not missing((f.name for f in dataclasses.fields(options)), "Checkpointer")
    assert not missing(arguments(manager.__init__), "Checkpointer")
    assert not missing(arguments(v1.training.Checkpointer.__init__), "Checkpointer")
    assert not missing(arguments(manager.save), "Checkpointer.save")
    assert not missing(arguments(manager.restore), "Checkpointer.restore")
    standard = ocp.StandardCheckpointer
    assert not missing(arguments(standard.save), "save")
    assert not missing(arguments(standard.restore), "load")
    theirs = v1.training.preservation_policies
    names = {n for n, f in vars(theirs).items() if dataclasses.is_dataclass(f)}
    assert not missing(names, "flaxckpt.policies", "PreservationContext")


def test_knows_or_answers_flax_names():
    def arguments(function):
        return set(inspect.signature(function).parameters)

    assert not missing(
        {"save_checkpoint", "restore_checkpoint", "latest_checkpoint"}, "flaxckpt"
    )
    assert not missing({"save_checkpoint_multiprocess", "available_steps"}, "flaxckpt")
    assert not missing(arguments(checkpoints.save_checkpoint), "save")
    assert not missing(arguments(checkpoints.save_checkpoint_multiprocess), "save")
    assert not missing(arguments(checkpoints.restore_checkpoint), "load")


def test_knows_or_answers_t5x_names():
    from tests.repository.test_migration import T5X

    assert not missing(T5X["Checkpointer"].split(), "Checkpointer")
    assert not missing(T5X["constructors"].split(), "Checkpointer")
    of_restore = {"step", "path", "fallback_state", "lazy_parameters", "remap"}
    of_save = {"train_state", "state_transformation_fns", "concurrent_gb", "force"}
    assert of_save | of_restore <= set(T5X["calls"].split())
    assert not missing(of_save, "Checkpointer.save")
    assert not missing(of_restore, "Checkpointer.restore")


def test_answers_arguments_of_trainers():
    """Of Hugging Face's TrainingArguments, and of Lightning's ModelCheckpoint."""
    huggingface = {
        *("output_dir", "save_total_limit", "load_best_model_at_end"),
        *("metric_for_best_model", "greater_is_better", "save_steps", "save_strategy"),
    }
    assert not missing(huggingface, "Checkpointer")
    keras = {"filepath", "monitor", "save_best_only", "mode", "save_freq", "verbose"}
    assert not missing(keras | {"save_weights_only"}, "KerasCheckpoint")
    lightning = {
        *("monitor", "save_top_k", "mode", "every_n_train_steps"),
        "train_time_interval",
    }
    assert not missing(lightning, "CheckpointCallback")
