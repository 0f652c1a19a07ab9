"""A step that is overwritten while it is read: the reader is told to load it again."""

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from tests.helpers import seams

READS = {
    "file": (
        *("disk.exists", "disk.identity", "disk.read", "disk.read_small"),
        "disk.open_file",
    ),
    "memory": (
        *("bucket.read", "bucket.part", "bucket.read_into", "bucket.keys"),
        "bucket.has",
    ),
}
"""Kind of storage -> the functions that read."""


def save(path, value):
    """Saves a step whose every file depends on the value."""
    state = {"w": np.full(3, value), "name": "x" * value, "n": value}
    with flaxckpt.Checkpointer(path.parent) as run:
        run.save(
            int(path.name),
            state,
            metrics={"loss": value},
            json={"config": {"v": value}},
            on_exists="overwrite",
        )


def read_while_replaced(path, monkeypatch, kind, number, read):
    """Reads a checkpoint that is replaced before the read of this number.

    Returns:
        The value that was read, the error, or None if there are fewer reads.
    """
    calls = []

    def replace_before(real):
        def call(*args, **options):
            calls.append(real)
            if len(calls) == number:
                save(path, 2)
            return real(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for seam in READS[kind]:
            seams.replace(patch, seam, replace_before(seams.current(seam)))
        try:
            found = read(path)
        except errors.CheckpointError as error:
            found = error
    return found if len(calls) >= number else None


def load(path):
    state = flaxckpt.load(path)
    assert (len(state["name"]), state["n"]) == (state["w"][0], state["w"][0])
    return state["n"]


def read_metadata(path):
    metadata = flaxckpt.metadata(path)
    assert metadata.json["config"]["v"] == metadata.metrics["loss"]
    return metadata.metrics["loss"]


@pytest.mark.parametrize("kind", READS)
@pytest.mark.parametrize("read", [load, read_metadata])
def test_reader_of_a_replaced_step_is_advised_to_retry(
    store_path, monkeypatch, kind, read
):
    path = store_path(kind) / "1"
    found, number = [], 0
    while not found or found[-1] is not None:
        save(path, 1)
        number += 1
        found.append(read_while_replaced(path, monkeypatch, kind, number, read))
    values = [value for value in found[:-1] if not isinstance(value, Exception)]
    assert 2 in values, "each read was disturbed"
    told = [str(error) for error in found if isinstance(error, Exception)]
    assert told, "no replacement was noticed"
    for text in told:
        assert "load it again" in text or "try again" in text
        assert "restore another step" not in text
