"""What processes tell each other by files; see `test_two_processes` for the service."""

import concurrent.futures
import time

import pytest

from flaxckpt._distributed import key_value as distributed_key_value
from flaxckpt._distributed import messages as distributed_messages
from flaxckpt._distributed import operation as distributed_operation
from tests.distributed import exercise_together
from tests.helpers import seams


def test_file_store_sets_lists_and_deletes_texts_by_key(tmp_path):
    files = distributed_key_value.FileStore(tmp_path / "texts")
    assert files.list("a") == {}
    files.delete("a")
    files.set("a/b", "one")
    files.set("a/b", "two")
    files.set("a/c/d", "")
    files.set("ab/c", "other")
    assert files.get("a/b", 0) == "two"
    assert files.list("a") == {"b": "two", "c/d": ""}
    files.delete("a")
    assert files.list("a") == {}
    assert files.list("ab") == {"c": "other"}
    with pytest.raises(TimeoutError):
        files.get("a/b", 0.01)


def test_waits_for_text_set_later(tmp_path):
    files = distributed_key_value.FileStore(tmp_path)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(files.get, "later", 60)
        time.sleep(0.05)
        files.set("later", "here")
        assert waiting.result() == "here"


@pytest.mark.parametrize("count", [2, 5])
def test_all_processes_learn_outcome_of_all(tmp_path, count):
    groups = [
        distributed_operation.ProcessGroup(
            distributed_key_value.FileStore(tmp_path), index, count
        )
        for index in range(count)
    ]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        done = [pool.submit(exercise_together.exercise, group) for group in groups]
        for each in done:
            each.result()


def test_process_without_heartbeats_counts_as_late(tmp_path, monkeypatch):
    seams.replace(monkeypatch, "heartbeat.silent_secs", 0.3)
    files = distributed_key_value.FileStore(tmp_path)
    files.set("flaxckpt/beat/1", "7")  # the last that was heard of it
    operation = exercise_together.begin(
        distributed_operation.ProcessGroup(files, 0, 2), timeout_secs=60
    )
    with pytest.raises(distributed_messages.ApartError) as raised:
        operation.gather("one")
    operation.close()
    [failure] = raised.value.failures
    assert (failure.process, failure.kind) == (1, distributed_messages.LATE)
    assert "has sent no heartbeat for" in failure.text
