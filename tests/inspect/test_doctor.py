"""What a directory's storage can do, tried out on a real one."""

import os

from tests.helpers import command_line, seams


def examine(directory, *options, code=0):
    return command_line.read_json("doctor", directory, *options, code=code)


def test_examine_measures_directory_and_leaves_no_trace(tmp_path):
    (tmp_path / "mine").write_text("x")
    found = examine(tmp_path, "--max-mb=1", "--max-secs=1")
    assert os.listdir(tmp_path) == ["mine"]  # noqa: PTH208
    assert found["problems"] == []
    assert found["directory"] == str(tmp_path)
    assert found["free_bytes"] > 0
    assert min(found["sync_secs"], found["write_rate"], found["read_rate"]) > 0
    assert found["versions"]["python"].startswith("3.")
    assert found["features"].keys() == {
        "file locks",
        "hard links",
        "exchange of directories",
        "memory maps",
    }
    assert found["features"]["hard links"]


def test_examine_writes_no_more_than_allowed(tmp_path, monkeypatch):
    sizes = []
    real = seams.current("disk.write")

    def write(file, content):
        sizes.append(len(content))
        real(file, content)

    seams.replace(monkeypatch, "disk.write", write)
    examine(tmp_path, "--max-mb=40", "--max-secs=1e9")
    assert 0 < sizes.count(4096) < 20
    assert sum(size for size in sizes if size != 4096) <= 40e6
    assert sizes.count(2**24) == 2


def test_examine_reports_unwritable_directory(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    seams.replace(monkeypatch, "disk.make_directory", refuse)
    found = examine(tmp_path, code=1)
    assert found["problems"] == [f"cannot write to {tmp_path}: Permission denied"]
    assert found["write_rate"] is None


def test_examine_rejects_missing_directories(tmp_path):
    assert "is not a directory" in command_line.run(
        "doctor", tmp_path / "nowhere", code=2
    )
