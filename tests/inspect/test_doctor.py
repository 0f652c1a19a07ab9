"""What a directory's storage can do, tried out on a real one."""

import os

import pytest

from flaxckpt import errors
from flaxckpt._inspect import doctor as inspect_doctor
from tests.helpers import seams


def test_a_directory_is_tried_out_and_left_as_it_was(tmp_path):
    (tmp_path / "mine").write_text("x")
    found = inspect_doctor.examine(tmp_path, max_bytes=10**6, max_secs=1)
    assert os.listdir(tmp_path) == ["mine"]  # noqa: PTH208
    assert found.problems == ()
    assert found.directory == str(tmp_path)
    assert found.free_bytes > 0
    assert min(found.sync_secs, found.write_rate, found.read_rate) > 0
    assert found.versions["python"].startswith("3.")
    assert found.features.keys() == {
        "file locks",
        "hard links",
        "exchange of directories",
        "memory maps",
    }
    assert found.features["hard links"]


def test_no_more_is_written_than_was_allowed(tmp_path, monkeypatch):
    sizes = []
    real = seams.current("disk.write")

    def write(file, content):
        sizes.append(len(content))
        real(file, content)

    seams.replace(monkeypatch, "disk.write", write)
    inspect_doctor.examine(tmp_path, max_bytes=40 * 2**20, max_secs=1e9)
    assert sum(sizes) <= 40 * 2**20 + inspect_doctor._SMALL_FILES * 4096
    assert sizes.count(2**24) == 2


def test_a_directory_that_cannot_be_written_to_is_a_problem(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    seams.replace(monkeypatch, "disk.make_directory", refuse)
    found = inspect_doctor.examine(tmp_path)
    assert found.problems == (f"cannot write to {tmp_path}: Permission denied",)
    assert found.write_rate is None


def test_examine_rejects_missing_directories(tmp_path):
    with pytest.raises(errors.OptionError, match="is not a directory"):
        inspect_doctor.examine(tmp_path / "nowhere")
