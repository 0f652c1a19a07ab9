"""All verbs on runs in object stores."""

import itertools

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from tests.helpers import seams

counter = itertools.count()


@pytest.fixture
def url():
    """A run in a bucket in memory."""
    found = f"memory://cli/{next(counter)}/run"
    with flaxckpt.Checkpointer(found) as run:
        for step in (1, 2, 3):
            state = {"w": np.full((4, 3), step, np.float32)}
            run.save(step, state, metrics={"loss": 1 / step})
    return found


def test_read_only_verbs_support_stores(url, command):
    lines = command.text("ls", url)
    assert lines[-1] == "3 steps, flaxckpt"
    assert [step["bytes"] for step in command.json("ls", url)["steps"]] == [None] * 3
    assert "float32[4, 3]" in command("show", url).stdout
    assert command.json("show", url, "w", "--step", 2)["mean"] == 2.0
    assert command.json("verify", url, "--all")["ok"]
    assert command.json("plan", url, url)["ok"]
    changed = command.json("diff", url, "-a", 1, "-b", 3, code=1)["changed"]
    assert changed["w"]["max_abs"] == 2.0
    lines = command.text("du", url)
    assert ["2", "-", "-"] in [line.split() for line in lines]
    assert "object stores do not report the sizes of files" in lines


def test_steps_without_a_time_in_stores_are_not_of_1970(url, command):
    resolve = seams.current("paths.resolve")
    for step in (1, 2, 3):
        for name in ("_CHECKPOINT_METADATA", "flaxckpt.json"):
            resolve(f"{url}/{step}/{name}").unlink()
        resolve(f"{url}/{step}/commit_success.txt").write_bytes(b"")  # as of Orbax
    assert [step["created"] for step in command.json("ls", url)["steps"]] == [None] * 3
    assert "1970" not in command("ls", url).stdout
    kept = command.json("explain", url, "-k", "secs:2h")  # it deletes no such step
    assert all(kept.values())


def test_modifying_verbs_support_stores(url, command, tmp_path):
    command("pin", url, 1)
    found = command.json("prune", url, "-k", "latest:1", "--yes")
    assert (found["deleted"], found["bytes"]) == ([2], None)
    assert command.json("explain", url, "-k", "latest:1").keys() == {"1", "3"}
    command("unpin", url, 1)
    assert command.text("prune", url, "-k", "latest:1", "-y")[-1] == "deleted 1 step"
    command("convert", url, tmp_path / "out.safetensors")
    assert flaxckpt.load(tmp_path / "out.safetensors")["w"].shape == (4, 3)


def test_doctor_checks_bucket_and_leaves_nothing_behind(url, command):
    found = command.json("doctor", f"{url}-new", "--max-mb", 1)
    assert found["ok"]
    assert (found["file_system"], found["features"]) == ("object store", {})
    assert "does not exist" in command.refuses("ls", f"{url}-new")


def test_commands_reject_missing_runs_in_stores(command):
    for nowhere in (f"memory://cli/{next(counter)}", f"memory://empty{next(counter)}"):
        assert "does not exist" in command.refuses("ls", nowhere)
        assert "does not exist" in command.refuses("pin", nowhere, 1)
        prune = ("prune", nowhere, "-k", "latest:1", "-y")
        assert "does not exist" in command.refuses(*prune)
        with pytest.raises(errors.CheckpointNotFoundError):
            flaxckpt.load(nowhere)
    assert "ftp://" in command.refuses("ls", "ftp://x/y")


def test_unreachable_store_is_a_failed_read_and_no_wrong_usage(command, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    bucket = f"s3://unreachable{next(counter)}"
    options = flaxckpt.StoreOptions(endpoint="http://127.0.0.1:1", deadline_secs=5)
    flaxckpt.set_store_options(bucket, options)
    for verb in (["ls"], ["verify"], ["prune", "--keep", "latest:1", "--yes"]):
        told = command.refuses(verb[0], f"{bucket}/run", *verb[1:], code=1)
        assert "that the store can be reached" in told
