"""What is in the place of a file, or happens to one while it is read.

Hostile checkpoints of each format are in `hostile`, and read by test_readers.py.
"""

import os
from pathlib import Path

import jax
import numpy as np
import pytest

import flaxckpt
from flaxckpt import _journal, _storage, errors

TESTS = Path(__file__).parent
GIB = 2**30


def to_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize(
    "make", [to_pipe, Path.mkdir, lambda p: p.symlink_to("/dev/zero")]
)
def test_what_is_no_plain_file_is_neither_waited_for_nor_read(tmp_path, make):
    path = tmp_path / "file"
    make(path)
    with pytest.raises(errors.DamagedCheckpointError, match="no plain file"):
        _storage.read(path, max_bytes=10)
    with pytest.raises(errors.DamagedCheckpointError, match="no plain file"):
        _storage.digest_file(path, max_bytes=10)


def test_files_behind_links_are_read_and_long_ones_are_not(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert _storage.read(tmp_path / "link", max_bytes=5) == b"12345"
    with pytest.raises(errors.DamagedCheckpointError, match="at most 4 bytes, found 5"):
        _storage.read(tmp_path / "link", max_bytes=4)


def test_a_save_beside_a_step_with_pipes_does_not_wait(tmp_path):
    state = {"w": jax.numpy.arange(1024.0)}
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state).wait()
        for file in (tmp_path / "1/state/w").iterdir():
            to_pipe(file)
        ckpt.save(2, state).wait()
        np.testing.assert_array_equal(ckpt.restore(step=2)["w"], state["w"])


@pytest.mark.parametrize("name", ["done.txt", "work.json"])
def test_a_conversion_goes_on_beside_a_pipe_or_a_link_of_its_journal(tmp_path, name):
    outside = tmp_path / "outside"
    outside.write_text("mine\n")
    for make in (to_pipe, lambda path: (path.unlink(), path.symlink_to(outside))):
        with _journal.Journal(tmp_path / "work", {"a": 1}) as journal:
            journal.add(["x"])
        make(tmp_path / "work" / name)
        with _journal.Journal(tmp_path / "work", {"a": 1}) as journal:
            assert not journal.done
            journal.add(["y"])
        with _journal.Journal(tmp_path / "work", {"a": 1}) as journal:
            assert journal.done == {"y"}
            journal.remove()
    assert outside.read_text() == "mine\n"


def test_what_the_disk_has_no_space_for_is_not_begun(tmp_path):
    from hostile import orbax

    source = orbax.CASES["larger than the memory"](tmp_path)
    for name in ("a.safetensors", "a.msgpack", "a"):
        with pytest.raises(errors.SaveFailedError, match="549755813888 bytes, and"):
            flaxckpt.convert(source, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
