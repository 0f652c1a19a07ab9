"""Step names are read and written alike, and only committed steps are listed."""

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import errors
from flaxckpt._steps import delete as steps_delete
from flaxckpt._steps import index as steps_index
from flaxckpt._steps import names as steps_names
from tests.helpers import seams

TEMPLATES = ["{step}", "step_{step}", "{step:08d}", "ckpt-{step:05d}", "{step}.done"]


@hypothesis.given(st.sampled_from(TEMPLATES), st.integers(0, 10**17))
def test_step_name_round_trips(template, step):
    step_format = steps_names.StepFormat(template)
    assert step_format.step(step_format.name(step)) == step


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{step}", "0013"),
        ("{step}", "step_14"),
        ("{step}", "-1"),
        ("{step}", "+1"),
        ("{step}", "٣"),
        ("{step}", "1.orbax-checkpoint-tmp"),
        ("{step}", "metadata"),
        ("{step}", "9" * 40),
        ("step_{step}", "14"),
        ("step_{step}", "step_014"),
        ("{step:04d}", "14"),
        ("{step:04d}", "00014"),
    ],
)
def test_step_format_ignores_other_names(template, name):
    assert steps_names.StepFormat(template).step(name) is None


@pytest.mark.parametrize("template", ["", "step", "{step}{step}", "a/{step}", "{x}"])
def test_rejects_format_without_exactly_one_step(template):
    with pytest.raises(errors.OptionError, match="step_format"):
        steps_names.StepFormat(template)


@pytest.mark.parametrize("template", ["a{{b}}_{step}", "a{b}_{step}", "{{step}}"])
def test_rejects_format_with_other_braces(template, tmp_path):
    with pytest.raises(errors.OptionError, match="no other braces or slashes"):
        flaxckpt.Checkpointer(tmp_path, step_format=template)


@pytest.mark.parametrize("prefix", ["run.tmp-", "a.orbax-checkpoint-tmp-"])
def test_rejects_format_of_unfinished_steps(prefix):
    with pytest.raises(errors.OptionError, match="names of unfinished steps"):
        steps_names.StepFormat(f"{prefix}{{step}}")


@pytest.mark.parametrize(
    ("name", "templates"),
    [
        ("7", ["{step}", "{step:01d}"]),
        ("a_70", ["a_{step}", "a_{step:02d}"]),
        ("a_07", ["a_{step:02d}"]),
        ("a{b}_7", []),
        ("a.tmp-7", []),
        ("a", []),
    ],
)
def test_list_formats_returns_formats_of_name(name, templates):
    found = steps_names.list_formats(name)
    assert [each.template for each in found] == templates
    assert {each.name(steps_names.number(name)) for each in found} <= {name}


@pytest.mark.parametrize("step", [-1, 1.0, "1", True, None, 10**18])
def test_check_rejects_invalid_steps(step):
    with pytest.raises(errors.OptionError, match="step"):
        steps_names.check(step)


def _has_files(path):
    return path.is_dir() and any(path.iterdir())


def test_lists_only_filled_directories(tmp_path):
    for name in ("0", "10", "9", "7.orbax-checkpoint-tmp", "metadata"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "8").mkdir()
    (tmp_path / "6").touch()
    (tmp_path / "5").symlink_to(tmp_path / "10")
    assert list(steps_index.list_steps(tmp_path, steps_names.StepFormat())) == [
        0,
        9,
        10,
    ]
    assert steps_index.list_steps(tmp_path / "missing", steps_names.StepFormat()) == {}


def test_finds_steps_of_any_usual_name(tmp_path):
    for name in (
        "step_3",
        "00000012",
        "old.orbax-checkpoint-tmp-4",
        "metadata",
        "checkpoint_1.5",
        "1" * 19,
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "plots_12").mkdir()  # called like a step, and none
    found = steps_index.StepIndex(tmp_path, _has_files).steps
    assert {n: p.name for n, p in found.items()} == {
        3: "step_3",
        12: "00000012",
    }
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "file").touch()
    with pytest.raises(errors.CheckpointFormatError, match="step 12 twice"):
        steps_index.StepIndex(tmp_path, _has_files)


def test_delete_withdraws_name_first(tmp_path, monkeypatch, caplog):
    step = tmp_path / "3"
    step.mkdir()
    (step / "file").touch()

    def fail(path):
        if path.exists():
            raise OSError("interrupted")

    seams.replace(monkeypatch, "files.remove_tree", fail)
    steps_delete.delete(step, find_foreign=lambda path: [])
    assert "interrupted" in caplog.text
    assert not steps_index.list_steps(tmp_path, steps_names.StepFormat())
    assert not steps_index.StepIndex(tmp_path, _has_files).steps


# ---- numbers of steps ---------------------------------------------------------------

STEPS = {
    "int": 3,
    "numpy": np.int32(3),
    "unsigned": np.uint8(3),
    "numpy array": np.array(3),
    "jax array": jnp.int32(3),
}
NO_STEPS = {
    "array": np.array([3]),
    "jax array": jnp.array([3]),
    "several": np.array([3, 4]),
    "bool": True,
    "numpy bool": np.bool_(True),
    "bool array": np.array(True),
    "float": 3.0,
    "numpy float": np.float32(3),
    "float array": jnp.float32(3),
    "NaN": float("nan"),
    "str": "3",
    "bytes": b"3",
    "list": [3],
    "class": int,
    "state": {"params": {"w": np.zeros(1000)}, "step": 3},
    "negative": -1,
    "numpy negative": np.int64(-1),
    "huge": 10**30,
    "unsigned huge": np.uint64(2**63),
}
CALLS = {
    "load": lambda run, s: flaxckpt.load(run.directory, step=s),
    "plan": lambda run, s: flaxckpt.plan(run.directory, {"x": 1}, step=s),
    "metadata": lambda run, s: flaxckpt.metadata(run.directory, step=s),
    "verify": lambda run, s: flaxckpt.verify(run.directory, step=s),
    "open_leaf": lambda run, s: flaxckpt.open_leaf(run.directory, "x", step=s),
    "restore": lambda run, s: run.restore({"x": 1}, step=s),
    "metadata of a run": lambda run, s: run.metadata(s),
    "metrics": lambda run, s: run.metrics(s),
    "has_dataset": lambda run, s: run.has_dataset(s),
    "has_saved": lambda run, s: run._session.saves.has_saved(s),
    "verify of a run": lambda run, s: run.verify(s),
    "add_metrics": lambda run, s: run.add_metrics(s, {"b": 1.0}),
    "pin": lambda run, s: run.pin(s),
    "unpin": lambda run, s: run.unpin(s),
    "make_permanent": lambda run, s: run.make_permanent(s),
    "save": lambda run, s: run.save(s, {"x": 1}, on_exists="overwrite").wait(),
    "save_params_only": lambda run, s: run.save_params_only(s, {"x": 1}),
    "delete": lambda run, s: run.delete(s),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with flaxckpt.Checkpointer(tmp_path_factory.mktemp("run")) as ckpt:
        for step in (1, 3):
            ckpt.save(step, {"x": 1}, metrics={"a": 1.0}).wait()
        yield ckpt


@pytest.mark.parametrize("call", CALLS)
def test_every_call_accepts_any_kind_of_integer(run, call):
    for step in STEPS.values():
        found = CALLS[call](run, step)
        if call == "delete":
            assert 3 not in run.steps()
            found = run.save(3, {"x": 1}, metrics={"a": 1.0}).wait()
        if call in ("save", "delete"):
            assert found.step == 3
            assert type(found.step) is int
        if call == "metadata of a run":
            assert type(found.step) is int
    assert run.steps() == [1, 3]


@pytest.mark.parametrize("call", CALLS)
def test_every_call_rejects_invalid_steps_with_same_error(run, call):
    for name, step in NO_STEPS.items():
        with pytest.raises(errors.OptionError, match="a step is the number") as info:
            CALLS[call](run, step)
        text = str(info.value)
        assert len(text) < 200, name
        assert "\n" not in text, name
    assert run.steps() == [1, 3]


WHOLE = {**STEPS, "float": 3.0, "numpy float": np.float32(3), "of jax": jnp.float32(3)}
NOT_WHOLE = {
    name: value
    for name, value in {**NO_STEPS, "half": 3.5, "infinite": float("inf")}.items()
    if name.partition(" ")[0] not in ("float", "negative", "huge", "numpy", "unsigned")
}


@pytest.mark.parametrize("name", WHOLE)
def test_callback_accepts_whole_numbers(tmp_path, name):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=1, check_step=False)
        on_step(WHOLE[name], {"x": 1})
        ckpt.wait()
        on_step.add_metrics(WHOLE[name], {"a": 1.0})
        assert ckpt.steps() == [3]
        assert ckpt.metrics(3) == {"a": 1.0}


@pytest.mark.parametrize("name", NOT_WHOLE)
def test_callback_rejects_anything_but_whole_numbers(tmp_path, name):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=1, check_step=False)
        with pytest.raises(errors.OptionError, match="whole number") as info:
            on_step(NOT_WHOLE[name], {"x": 1})
        assert len(str(info.value)) < 200
        with pytest.raises(errors.OptionError, match="whole number"):
            on_step.add_metrics(NOT_WHOLE[name], {"a": 1.0})
        assert ckpt.steps() == []


@hypothesis.given(
    prefix=st.sampled_from(["", "step_", "ck-", "x.y_"]),
    width=st.integers(0, 9),
    steps=st.sets(st.integers(0, 10**6), min_size=1, max_size=5),
)
def test_find_format_infers_format_of_names(prefix, width, steps):
    named = {step: f"{prefix}{step:0{width}d}" for step in steps}
    found = steps_names.find_format(named)
    assert found is not None
    assert {step: steps_names.StepFormat(found).name(step) for step in steps} == named


def test_find_format_rejects_names_of_two_kinds():
    assert steps_names.find_format({1: "1", 2: "002"}) is None
    assert steps_names.find_format({1: "a{b_1"}) is None
    assert steps_names.find_format({}) == "{step}"
