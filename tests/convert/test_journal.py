"""Conversions that go on where they stopped."""

import contextlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from tests.convert.reads import stopping, trace_reads
from tests.helpers import strategies

STATE = {f"two words {i}": np.full(2**14, i, np.float32) for i in range(8)}
PIECES = {f"{name} 0:{2**14}" for name in STATE}


@pytest.fixture
def journal(tmp_path):
    """The journal of a conversion that stopped halfway."""
    flaxckpt.save(tmp_path / "source", STATE)
    with stopping(1 / 2) as stop:
        convert(tmp_path, progress=stop)
    return tmp_path / "new.safetensors.flaxckpt-convert-tmp"


def convert(directory, **options):
    flaxckpt.convert(
        directory / "source",
        directory / "new.safetensors",
        format="safetensors",
        max_concurrent_bytes=2**17,
        **options,
    )


@pytest.fixture
def resume(tmp_path, monkeypatch):
    """Converts again; returns the pieces that are read."""

    def run():
        with monkeypatch.context() as patch:
            read = trace_reads(patch)
            convert(tmp_path)
        strategies.assert_same(STATE, flaxckpt.load(tmp_path / "new.safetensors"))
        assert {path.name for path in tmp_path.iterdir()} <= {
            *("source", "new.safetensors", "outside", "moved")
        }
        return set(read)

    return run


def done(journal):
    return (journal / "done.txt").read_text().splitlines()


def test_reads_only_pieces_that_are_not_done(journal, resume):
    finished = set(done(journal))
    assert 1 < len(finished) < len(PIECES)
    assert resume() == PIECES - finished


def test_ignores_truncated_line(journal, resume):
    *whole, last = done(journal)
    text = "".join(f"{name}\n" for name in whole)
    (journal / "done.txt").write_text(text + last[:-1])
    assert resume() == PIECES - set(whole)


@pytest.mark.parametrize("change", ["forgotten", "output", "damaged"])
def test_damaged_journal_starts_over(tmp_path, journal, resume, change):
    if change == "forgotten":
        (journal / "work.json").unlink()
    elif change == "output":
        (journal / "out").rename(tmp_path / "moved")
    else:
        (journal / "work.json").write_text("{")
    assert resume() == PIECES


def test_keeps_file_in_place_of_journal(tmp_path):
    flaxckpt.save(tmp_path / "source", STATE)
    file = tmp_path / "new.safetensors.flaxckpt-convert-tmp"
    file.write_text("mine")
    with pytest.raises(errors.SaveFailedError, match=r"new\.safetensors"):
        convert(tmp_path)
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("../outside")]
)
@pytest.mark.parametrize("name", ["done.txt", "work.json"])
def test_replaces_pipe_or_link_in_place_of_journal_file(
    tmp_path, journal, resume, name, make
):
    outside = tmp_path / "outside"
    outside.write_text("mine\n")
    (journal / name).unlink()
    make(journal / name)
    assert resume() == PIECES
    assert outside.read_text() == "mine\n"


def test_removes_journal_without_open_files(journal, resume, monkeypatch):
    """NFS and FUSE keep an open file under another name, in its directory."""
    real, removed, still_open = shutil.rmtree, [], []

    def remove(path, *given, **options):
        removed.append(path)
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                target = descriptor.readlink()
                if target.is_file() and target.is_relative_to(path):
                    still_open.append(target)
        real(path, *given, **options)

    monkeypatch.setattr(shutil, "rmtree", remove)
    resume()
    assert journal in removed
    assert still_open == []
