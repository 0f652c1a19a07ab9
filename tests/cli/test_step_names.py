"""The run defines the names of steps; a final number does not make a step."""

import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import flaxckpt
from flaxckpt import errors, formats


@pytest.fixture
def models(tmp_path):
    """Creates checkpoints with other names, which are not steps."""
    for number in (1, 2):
        flaxckpt.save(tmp_path / f"model{number}", {"n": number})
    return tmp_path


def prune(command, run, *asked):
    """Keeps the newest step only; returns the deleted ones."""
    verb = ("prune", run, "-k", "latest:1", "--yes", *asked)
    return command.json(*verb)["deleted"]


@pytest.mark.parametrize(
    "look",
    [
        lambda path: flaxckpt.diff(path, path),
        flaxckpt.load,
        flaxckpt.metadata,
        flaxckpt.verify,
        formats.detect,
        lambda path: flaxckpt.convert(path, path.parent / "out"),
    ],
)
def test_names_with_final_number_are_not_steps(models, look):
    with pytest.raises(errors.CheckpointFormatError) as info:
        look(models)
    text = str(info.value)
    assert "not names of steps" in text
    assert f"{models / 'model1'}" in text
    assert "step_format='model{step}'" in text
    assert sorted(path.name for path in models.iterdir()) == ["model1", "model2"]
    assert not (models / "model1" / "PINNED").exists()


@pytest.mark.parametrize(
    "verb",
    [
        ("du", "."),
        ("explain", "."),
        ("prune", ".", "-k", "latest:1", "--yes"),
        ("pin", ".", 1),
        ("unpin", ".", 1),
        ("report", ".", "-o", "../report.html"),
    ],
    ids=lambda verb: verb[0],
)
def test_verbs_reject_names_with_final_number_as_steps(
    models, command, monkeypatch, verb
):
    monkeypatch.chdir(models)
    told = command.refuses(*verb)
    assert "not names of steps" in told
    assert f"{models / 'model1'}" in told
    assert "step_format='model{step}'" in told
    assert sorted(path.name for path in models.iterdir()) == ["model1", "model2"]
    assert not (models / "model1" / "PINNED").exists()


def test_ls_lists_names_with_final_number_as_checkpoints(models, command):
    found = command.json("ls", models)
    assert "steps" not in found
    names = [(run["name"], run["is_run"]) for run in found["runs"]]
    assert names == [("model1", False), ("model2", False)]


def test_number_alone_does_not_make_step(models):
    with pytest.raises(errors.CheckpointNotFoundError, match="no step 1: it has no st"):
        flaxckpt.load(models, step=1)
    run = flaxckpt.Checkpointer(models, read_only=True)
    assert run.steps() == []
    assert list(run.new_steps(timeout_secs=0)) == []


def test_step_format_option_makes_names_steps(models, command):
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


def test_single_checkpoint_verbs_accept_step_format(models, command):
    asked = ["--step-format", "model{step}"]
    found = command.json("show", models, *asked)
    assert found["path"] == str(models / "model2")
    assert command.json("verify", models, "--all", *asked)["ok"]
    found = command.json("diff", models, "-a", 1, "-b", 2, *asked, code=1)
    assert [*found["changed"]] == ["n"]
    assert command.json("plan", models, models / "model1", *asked)["ok"]
    command("convert", models, models.parent / "out", "--step", 1, *asked)
    assert flaxckpt.load(models.parent / "out")["n"] == 1


def test_error_suggests_no_format_for_impossible_names(tmp_path, command):
    flaxckpt.save(tmp_path / "a{b}_1", {"n": 1})
    told = command.refuses("explain", tmp_path)
    assert "pass the path of one" in told
    assert "step-format" not in told
    for verb in (("ls",), ("prune", "-k", "latest:1")):
        told = command.refuses(*verb, tmp_path, "--step-format", "a{b}_{step}")
        assert "no other braces" in told


@pytest.mark.parametrize("template", ["a-{step}", "gen_{step:05d}", "x.y_{step}"])
def test_run_records_its_step_format(tmp_path, command, template):
    with flaxckpt.Checkpointer(tmp_path, step_format=template) as run:
        for step in (9, 10):
            run.save(step, {"n": step})
    flaxckpt.save(tmp_path / "model77", {"n": 77})  # beside the run, and not a step
    flaxckpt.save(tmp_path / "step_88", {"n": 88})
    assert flaxckpt.load(tmp_path)["n"] == 10
    listed = command.json("ls", tmp_path)["steps"]
    assert [step["step"] for step in listed] == [9, 10]
    assert prune(command, tmp_path) == [9]
    (tmp_path / "events.jsonl").unlink()
    with pytest.raises(errors.CheckpointNotFoundError):
        flaxckpt.load(tmp_path, step=10)
    listed = command.json("explain", tmp_path, "--step-format", template)
    assert [*listed] == ["10"]


def test_run_ignores_other_names_beside_its_steps(tmp_path, command):
    with flaxckpt.Checkpointer(tmp_path) as run:
        for step in (1, 2, 3):
            run.save(step, {"n": step})
    for name in ("model9", "step_8", "backup-2026", "2024.12"):
        flaxckpt.save(tmp_path / name, {"n": 0})
    assert [*command.json("explain", tmp_path)] == ["1", "2", "3"]
    assert flaxckpt.load(tmp_path)["n"] == 3
    assert prune(command, tmp_path) == [1, 2]
    assert all((tmp_path / n).is_dir() for n in ("model9", "step_8", "backup-2026"))


@pytest.mark.parametrize(
    "options", [{}, {"step_prefix": "step"}, {"step_prefix": "ck"}]
)
def test_finds_steps_with_standard_orbax_names(tmp_path, command, options):
    options["step_format_fixed_length"] = 6
    with ocp.CheckpointManager(
        tmp_path, options=ocp.CheckpointManagerOptions(**options)
    ) as manager:
        for step in (1, 2):
            args = ocp.args.StandardSave({"w": np.ones(2) * step})
            manager.save(step, args=args)
    template = f"{options['step_prefix']}_{{step:06d}}" if len(options) == 2 else None
    if options.get("step_prefix") == "ck":
        assert "'ck_{step:06d}'" in command.refuses("explain", tmp_path)
    else:
        assert [*command.json("explain", tmp_path)] == ["1", "2"]
    asked = ["--step-format", template] if template else []
    assert prune(command, tmp_path, *asked) == [1]


def test_step_format_option_makes_files_steps(tmp_path, command):
    for step in (7, 8):
        file = tmp_path / f"export_{step}.msgpack"
        file.write_bytes(serialization.to_bytes({"step": step}))
    asked = ["--step-format", "export_{step}.msgpack"]
    found = command.json("ls", tmp_path, *asked)
    assert [step["step"] for step in found["steps"]] == [7, 8]
    assert "not directories" in command.refuses("pin", tmp_path, 7, *asked)


def test_ignores_damage_of_names_outside_run(models):
    (models / "model2" / "flaxckpt.json").write_text("{")
    flaxckpt.save(models / "3", {"n": 3})
    run = flaxckpt.Checkpointer(models, read_only=True)
    assert (run.steps(), run.damaged()) == ([3], {})


@pytest.mark.parametrize("names", [("exp1", "exp2"), ("1", "2"), ("a", "b")])
def test_reports_directory_of_runs(tmp_path, command, names):
    for name in names:
        with flaxckpt.Checkpointer(tmp_path / name) as run:
            run.save(1, {"n": 1})
    with pytest.raises(errors.CheckpointFormatError, match="a directory of runs"):
        flaxckpt.load(tmp_path)
    for verb in ("explain", "du"):
        assert "a directory of runs" in command.refuses(verb, tmp_path)
    found = command.json("ls", tmp_path)
    assert [run["name"] for run in found["runs"]] == sorted(names)
