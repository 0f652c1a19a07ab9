"""Step names are read and written alike, and only committed steps are listed."""

import hypothesis
import pytest
from hypothesis import strategies as st

from flaxckpt import _deletion, _steps, _storage, _survey, errors

TEMPLATES = ["{step}", "step_{step}", "{step:08d}", "ckpt-{step:05d}", "{step}.done"]


@hypothesis.given(st.sampled_from(TEMPLATES), st.integers(0, 10**17))
def test_a_name_gives_its_step_back(template, step):
    step_format = _steps.StepFormat(template)
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
def test_other_names_are_no_steps(template, name):
    assert _steps.StepFormat(template).step(name) is None


@pytest.mark.parametrize("template", ["", "step", "{step}{step}", "a/{step}", "{x}"])
def test_a_format_without_one_step_is_refused(template):
    with pytest.raises(errors.OptionError, match="step_format"):
        _steps.StepFormat(template)


@pytest.mark.parametrize("step", [-1, 1.0, "1", True, None, 10**18])
def test_a_step_is_a_whole_number_from_0(step):
    with pytest.raises(errors.OptionError, match="step"):
        _steps.check(step)


def _has_files(path):
    return path.is_dir() and any(path.iterdir())


def test_only_filled_directories_are_listed(tmp_path):
    for name in ("0", "10", "9", "7.orbax-checkpoint-tmp", "metadata"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "8").mkdir()
    (tmp_path / "6").touch()
    (tmp_path / "5").symlink_to(tmp_path / "10")
    assert list(_steps.listed(tmp_path, _steps.StepFormat())) == [0, 9, 10]
    assert _steps.listed(tmp_path / "missing", _steps.StepFormat()) == {}


def test_steps_are_found_however_they_are_called(tmp_path):
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
    assert {n: p.name for n, p in _survey.find(tmp_path, _has_files).items()} == {
        3: "step_3",
        12: "00000012",
    }
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "file").touch()
    with pytest.raises(errors.CheckpointFormatError, match="step 12 twice"):
        _survey.find(tmp_path, _has_files)


def test_delete_takes_the_name_away_first(tmp_path, monkeypatch, caplog):
    step = tmp_path / "3"
    step.mkdir()
    (step / "file").touch()

    def fail(path):
        if path.exists():
            raise OSError("interrupted")

    monkeypatch.setattr(_storage, "remove_tree", fail)
    _deletion.delete(step)
    assert "interrupted" in caplog.text
    assert not _steps.listed(tmp_path, _steps.StepFormat())
    assert not _survey.find(tmp_path, _has_files)
