"""Work that goes on where it stopped."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from flaxckpt import errors
from flaxckpt._convert.journal import Journal

WORK = {"from": "a", "to": "b"}


def test_reopened_journal_knows_finished_work(tmp_path):
    with Journal(tmp_path / "j", WORK) as journal:
        assert journal.done == set()
        (journal.output / "file").write_text("x")
        journal.add(["one", "two words"])
        journal.add(["three"])
    with Journal(tmp_path / "j", WORK) as journal:
        assert journal.done == {"one", "two words", "three"}
        assert (journal.output / "file").read_text() == "x"
        journal.remove()
    assert not (tmp_path / "j").exists()


def test_ignores_truncated_line(tmp_path):
    with Journal(tmp_path / "j", WORK) as journal:
        journal.add(["one"])
    with (tmp_path / "j" / "done.txt").open("a") as file:
        file.write("tw")
    with Journal(tmp_path / "j", WORK) as journal:
        assert journal.done == {"one"}
        journal.add(["three"])
    with Journal(tmp_path / "j", WORK) as journal:
        assert journal.done == {"one", "three"}


@pytest.mark.parametrize("change", ["work", "forgotten", "output", "damaged"])
def test_other_work_or_damage_starts_over(tmp_path, change):
    with Journal(tmp_path / "j", WORK) as journal:
        (journal.output / "file").write_text("x")
        journal.add(["one"])
        if change == "forgotten":
            journal.forget()
        elif change == "output":
            journal.output.rename(tmp_path / "moved")
        elif change == "damaged":
            (tmp_path / "j" / "work.json").write_text("{")
    work = WORK | {"to": "c"} if change == "work" else WORK
    with Journal(tmp_path / "j", work) as journal:
        assert journal.done == set()
        assert list(journal.output.iterdir()) == []


def test_journal_admits_one_process_at_a_time(tmp_path):
    with (
        Journal(tmp_path / "j", WORK),
        pytest.raises(errors.CheckpointExistsError, match="another process uses"),
    ):
        Journal(tmp_path / "j", WORK)
    Journal(tmp_path / "j", WORK).__exit__(None, None, None)


def test_keeps_file_in_place_of_journal(tmp_path):
    (tmp_path / "j").write_text("mine")
    with pytest.raises(OSError, match="j"):
        Journal(tmp_path / "j", WORK)
    assert (tmp_path / "j").read_text() == "mine"


@pytest.mark.parametrize("name", ["done.txt", "work.json"])
def test_replaces_pipe_or_link_in_place_of_journal_file(tmp_path, name):
    outside = tmp_path / "outside"
    outside.write_text("mine\n")
    for make in (os.mkfifo, lambda path: path.symlink_to(outside)):
        with Journal(tmp_path / "work", {"a": 1}) as journal:
            journal.add(["x"])
        (tmp_path / "work" / name).unlink()
        make(tmp_path / "work" / name)
        with Journal(tmp_path / "work", {"a": 1}) as journal:
            assert not journal.done
            journal.add(["y"])
        with Journal(tmp_path / "work", {"a": 1}) as journal:
            assert journal.done == {"y"}
            journal.remove()
    assert outside.read_text() == "mine\n"


def test_remove_leaves_no_file_open(tmp_path, monkeypatch):
    """NFS and FUSE keep an open file under another name, in its directory."""
    real, still_open = shutil.rmtree, []

    def remove(path, *given, **options):
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                target = descriptor.readlink()
                if target.is_file() and target.is_relative_to(path):
                    still_open.append(target)
        real(path, *given, **options)

    with Journal(tmp_path / "work", {"a": 1}) as journal:
        journal.add(["one"])
        monkeypatch.setattr(shutil, "rmtree", remove)
        journal.remove()
    assert still_open == []
    assert not (tmp_path / "work").exists()
