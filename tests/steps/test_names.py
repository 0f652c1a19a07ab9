"""Step names are read and written alike, and only committed steps are listed."""

import shutil

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import errors
from tests.helpers import command_line, seams

TEMPLATES = ["{step}", "step_{step}", "{step:08d}", "ckpt-{step:05d}", "{step}.done"]


@pytest.fixture(scope="module")
def steps_of(tmp_path_factory):
    """Returns the function that lists the steps of a run with one checkpoint."""
    root = tmp_path_factory.mktemp("names")
    flaxckpt.save(root / "made", {"n": 1})

    def list_steps(name, template):
        run = root / "run"
        run.mkdir()
        (root / "made").rename(run / name)
        found = flaxckpt.Checkpointer(run, step_format=template, read_only=True).steps()
        (run / name).rename(root / "made")
        shutil.rmtree(run)
        return found

    return list_steps


@hypothesis.given(st.sampled_from(TEMPLATES), st.integers(0, 10**17))
def test_finds_step_by_name(steps_of, template, step):
    assert steps_of(template.format(step=step), template) == [step]


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
def test_step_format_ignores_other_names(steps_of, template, name):
    assert steps_of(name, template) == []


@pytest.mark.parametrize(
    ("template", "why"),
    [
        *[(each, "step_format") for each in ("", "step", "{step}{step}", "{x}")],
        ("a/{step}", "no other braces or slashes"),
        ("a{{b}}_{step}", "no other braces or slashes"),
        ("a{b}_{step}", "no other braces or slashes"),
        ("{{step}}", "no other braces or slashes"),
        ("run.tmp-{step}", "names of unfinished steps"),
        ("a.orbax-checkpoint-tmp-{step}", "names of unfinished steps"),
    ],
)
def test_rejects_invalid_format(template, why, tmp_path):
    with pytest.raises(errors.OptionError, match=why):
        flaxckpt.Checkpointer(tmp_path, step_format=template)


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("a_70", "a_{step}"),
        ("a_07", "a_{step:02d}"),
        ("a{b}_7", None),
        ("a.tmp-7", None),
        ("a", None),
    ],
)
def test_error_suggests_format_of_unusual_name(tmp_path, name, template):
    flaxckpt.save(tmp_path / name, {"n": 1})
    with pytest.raises(errors.CheckpointFormatError) as info:
        flaxckpt.load(tmp_path)
    assert f"such as {tmp_path / name}" in str(info.value)
    suggested = f"step_format='{template}'" if template else "step_format"
    assert (suggested in str(info.value)) == (template is not None)


def test_lists_only_committed_directories(tmp_path):
    for name in ("0", "10", "9", "7.orbax-checkpoint-tmp", "metadata"):
        flaxckpt.save(tmp_path / name, {"n": 1})
    (tmp_path / "8").mkdir()
    (tmp_path / "6").touch()
    (tmp_path / "5").symlink_to(tmp_path / "10")
    assert flaxckpt.Checkpointer(tmp_path, read_only=True).steps() == [0, 9, 10]
    assert flaxckpt.Checkpointer(tmp_path / "none", read_only=True).steps() == []


def test_finds_steps_of_any_usual_name(tmp_path):
    usual = {3: "step_3", 12: "00000012"}
    others = ("old.orbax-checkpoint-tmp-4", "metadata", "checkpoint_1.5", "1" * 19)
    for name in (*usual.values(), *others, "plots_12"):
        flaxckpt.save(tmp_path / name, {"n": name == "00000012"})
    listed = command_line.read_json("ls", tmp_path)["steps"]
    assert {row["step"]: row["path"] for row in listed} == {
        step: f"{tmp_path / name}" for step, name in usual.items()
    }
    assert flaxckpt.load(tmp_path)["n"]
    told = command_line.run("prune", tmp_path, "-k", "latest:1", "--yes", code=2)
    assert "choose one format" in told
    flaxckpt.save(tmp_path / "12", {"n": 1})
    with pytest.raises(errors.CheckpointFormatError, match="step 12 twice"):
        flaxckpt.load(tmp_path)


def test_delete_withdraws_name_first(tmp_path, monkeypatch, caplog):
    def fail(path):
        if path.exists():
            raise OSError("interrupted")

    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(3, {"n": 1}).wait()
        seams.replace(monkeypatch, "files.remove_tree", fail)
        ckpt.delete(3)
    assert "interrupted" in caplog.text
    assert flaxckpt.Checkpointer(tmp_path, read_only=True).steps() == []
    with pytest.raises(errors.CheckpointNotFoundError):
        flaxckpt.load(tmp_path)


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
