"""The run defines the names of steps; a final number does not make a step."""

import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import flaxckpt
from flaxckpt import _formats, _report, errors, formats
from flaxckpt._inspect import listing as inspect_listing
from flaxckpt._inspect import run_view as inspect_run_view
from flaxckpt._run.judge import Rules
from flaxckpt._steps import index as steps_index
from flaxckpt.policies import LatestN


@pytest.fixture
def models(tmp_path):
    """Creates checkpoints with other names, which are not steps."""
    for number in (1, 2):
        flaxckpt.save(tmp_path / f"model{number}", {"n": number})
    return tmp_path


@pytest.mark.parametrize(
    "look",
    [
        inspect_listing.listing,
        inspect_listing.disk_usage,
        lambda path: inspect_run_view.survey(path),
        lambda path: inspect_run_view.prune(path, Rules((LatestN(1),)), dry_run=False),
        lambda path: inspect_run_view.set_pinned(path, [1], pinned=True),
        lambda path: inspect_run_view.set_pinned(path, [1], pinned=False),
        lambda path: _report.gather(path, _report.ReportOptions()),
        lambda path: flaxckpt.diff(path, path),
        flaxckpt.load,
        flaxckpt.metadata,
        flaxckpt.verify,
        formats.detect,
        lambda path: flaxckpt.convert(path, path.parent / "out"),
    ],
)
def test_names_that_end_in_a_number_are_no_steps(models, look):
    with pytest.raises(errors.CheckpointFormatError) as info:
        look(models)
    text = str(info.value)
    assert "not names of steps" in text
    assert f"{models / 'model1'}" in text
    assert "step_format='model{step}'" in text
    assert sorted(path.name for path in models.iterdir()) == ["model1", "model2"]
    assert not (models / "model1" / "PINNED").exists()


def test_a_number_alone_does_not_make_a_step(models):
    with pytest.raises(errors.CheckpointNotFoundError, match="no step 1: it has no st"):
        flaxckpt.load(models, step=1)
    run = flaxckpt.Checkpointer(models, read_only=True)
    assert run.steps() == []
    assert list(run.new_steps(timeout_secs=0)) == []


def test_such_names_are_steps_if_that_is_asked_for(models, command):
    (models / "model3").mkdir()
    found = command.json("ls", models, "--step-format", "model{step}")
    assert [step["step"] for step in found["steps"]] == [1, 2]
    asked = ["--step-format", "model{step}"]
    assert [*command.json("explain", models, *asked)] == ["1", "2"]
    assert len(command.json("du", models, *asked, "--step", "1")["steps"]) == 2
    command("pin", models, 1, *asked)
    assert (models / "model1" / "PINNED").is_file()
    command("unpin", models, 1, *asked)
    found = command.json("report", models, *asked, "-o", models.parent / "a.html")
    assert [step["step"] for step in found["steps"]] == [1, 2]
    assert found["change"] is not None
    command("prune", models, "-k", "latest:1", "--yes", *asked)
    assert sorted(p.name for p in models.glob("model*")) == ["model2", "model3"]
    told = command.refuses("ls", models, "--step-format", "other{step}")
    assert "no steps named like 'other{step}'" in told
    assert "step_format must" in command.refuses("ls", models, "--step-format", "x")


def test_verbs_that_take_one_checkpoint_take_steps_of_a_format(models, command):
    asked = ["--step-format", "model{step}"]
    found = command.json("show", models, *asked)
    assert found["path"] == str(models / "model2")
    assert command.json("verify", models, "--all", *asked)["ok"]
    found = command.json("diff", models, "-a", 1, "-b", 2, *asked, code=1)
    assert [*found["changed"]] == ["n"]
    assert command.json("plan", models, models / "model1", *asked)["ok"]
    command("convert", models, models.parent / "out", "--step", 1, *asked)
    assert flaxckpt.load(models.parent / "out")["n"] == 1


def test_names_that_no_format_has_get_no_advice_on_formats(tmp_path, command):
    flaxckpt.save(tmp_path / "a{b}_1", {"n": 1})
    told = command.refuses("explain", tmp_path)
    assert "pass the path of one" in told
    assert "step-format" not in told
    for verb in (("ls",), ("prune", "-k", "latest:1")):
        told = command.refuses(*verb, tmp_path, "--step-format", "a{b}_{step}")
        assert "no other braces" in told


@pytest.mark.parametrize("template", ["a-{step}", "gen_{step:05d}", "x.y_{step}"])
def test_a_run_says_how_its_steps_are_called(tmp_path, template):
    with flaxckpt.Checkpointer(tmp_path, step_format=template) as run:
        for step in (9, 10):
            run.save(step, {"n": step})
    flaxckpt.save(tmp_path / "model77", {"n": 77})  # beside the run, and not a step
    flaxckpt.save(tmp_path / "step_88", {"n": 88})
    assert flaxckpt.load(tmp_path)["n"] == 10
    assert [step.step for step in inspect_listing.listing(tmp_path).steps] == [9, 10]
    pruned = inspect_run_view.prune(tmp_path, Rules((LatestN(1),)), dry_run=False)
    assert pruned.deleted == (9,)
    (tmp_path / "events.jsonl").unlink()
    with pytest.raises(errors.CheckpointNotFoundError):
        flaxckpt.load(tmp_path, step=10)
    assert inspect_run_view.numbers(tmp_path, template) == [10]


def test_names_beside_a_run_are_none_of_its_steps(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as run:
        for step in (1, 2, 3):
            run.save(step, {"n": step})
    for name in ("model9", "step_8", "backup-2026", "2024.12"):
        flaxckpt.save(tmp_path / name, {"n": 0})
    assert inspect_run_view.numbers(tmp_path) == [1, 2, 3]
    assert flaxckpt.load(tmp_path)["n"] == 3
    pruned = inspect_run_view.prune(tmp_path, Rules((LatestN(1),)), dry_run=False)
    assert pruned.deleted == (1, 2)
    assert all((tmp_path / n).is_dir() for n in ("model9", "step_8", "backup-2026"))


@pytest.mark.parametrize(
    "options", [{}, {"step_prefix": "step"}, {"step_prefix": "ck"}]
)
def test_runs_of_orbax_have_its_standard_names(tmp_path, options):
    options["step_format_fixed_length"] = 6
    with ocp.CheckpointManager(
        tmp_path, options=ocp.CheckpointManagerOptions(**options)
    ) as manager:
        for step in (1, 2):
            args = ocp.args.StandardSave({"w": np.ones(2) * step})
            manager.save(step, args=args)
    template = f"{options['step_prefix']}_{{step:06d}}" if len(options) == 2 else None
    if options.get("step_prefix") == "ck":
        with pytest.raises(errors.CheckpointFormatError, match=r"'ck_{step:06d}'"):
            inspect_run_view.numbers(tmp_path)
    else:
        assert inspect_run_view.numbers(tmp_path) == [1, 2]
    pruned = inspect_run_view.prune(
        tmp_path, Rules((LatestN(1),)), dry_run=False, step_format=template
    )
    assert pruned.deleted == (1,)


def test_files_are_steps_under_a_format_that_is_given(tmp_path):
    for step in (7, 8):
        file = tmp_path / f"export_{step}.msgpack"
        file.write_bytes(serialization.to_bytes({"step": step}))
    found = inspect_listing.listing(tmp_path, step_format="export_{step}.msgpack")
    assert [step.step for step in found.steps] == [7, 8]
    with pytest.raises(errors.OptionError, match="not directories"):
        inspect_run_view.set_pinned(
            tmp_path, [7], pinned=True, step_format="export_{step}.msgpack"
        )


def test_damage_of_a_name_that_is_no_steps_is_not_told(models):
    (models / "model2" / "flaxckpt.json").write_text("{")
    flaxckpt.save(models / "3", {"n": 3})
    found = steps_index.StepIndex(models, _formats.identify)
    assert [entry.step for entry in found.entries] == [3]


@pytest.mark.parametrize("names", [("exp1", "exp2"), ("1", "2"), ("a", "b")])
def test_a_folder_of_runs_says_so(tmp_path, names):
    for name in names:
        with flaxckpt.Checkpointer(tmp_path / name) as run:
            run.save(1, {"n": 1})
    for look in (inspect_listing.listing, flaxckpt.load, inspect_run_view.survey):
        with pytest.raises(errors.CheckpointFormatError, match="a directory of runs"):
            look(tmp_path)
