"""What processes tell each other by files; see `test_two_processes` for the service."""

import concurrent.futures
import time

import pytest

from flaxckpt.errors import OptionError
from tests.distributed.exercise_together import (
    LATE,
    WORK,
    ApartError,
    begin,
    exercise,
    open_group,
    open_store,
)
from tests.helpers import seams


def test_file_store_sets_lists_and_deletes_texts_by_key(tmp_path):
    files = open_store(tmp_path / "texts")
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
    files = open_store(tmp_path)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(files.get, "later", 60)
        time.sleep(0.05)
        files.set("later", "here")
        assert waiting.result() == "here"


@pytest.mark.parametrize("count", [2, 5])
def test_all_processes_learn_outcome_of_all(tmp_path, count):
    groups = open_group(tmp_path, count)
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        done = [pool.submit(exercise, group) for group in groups]
        for each in done:
            each.result()


@pytest.mark.parametrize(
    ("earlier", "later"),
    [("find", "copies.1"), ("copies.1", "find"), ("upload.a", "copies.1")],
)
def test_an_operation_beside_another_keeps_its_messages(tmp_path, earlier, later):
    first, second = open_group(tmp_path, 2)
    for number in range(2):  # the second process reads each message late
        with begin(first, earlier) as operation:
            operation.first("told", lambda: "text")
        with begin(second, later) as beside:
            beside.report("done")
        with begin(first, later) as beside:
            beside.gather("done")
        with begin(second, earlier, timeout_secs=1) as operation:
            assert operation.first("told", str) == "text", number


def test_an_operation_during_another_keeps_its_messages(tmp_path):
    first, second = open_group(tmp_path, 2)
    with begin(second, "save") as saved, begin(first, "save") as save:
        saved.report("written")
        with begin(first, "once") as operation:
            operation.first("told", lambda: "text")
        save.gather("written")
    with begin(second, "once", timeout_secs=1) as operation:
        assert operation.first("told", str) == "text"


def test_messages_of_ended_operations_are_deleted(tmp_path):
    files, groups = open_store(tmp_path), open_group(tmp_path, 2)

    def take_part(group):
        for number in range(5):
            for kind in ("find", f"copies.{number}", "upload.x"):
                with begin(group, kind) as operation:
                    operation.exchange("held")

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(take_part, group) for group in groups]:
            each.result()
    texts = [key for key in files.list("flaxckpt") if "held" in key]
    assert len({key.partition("/held")[0] for key in texts}) <= 3, texts


def test_call_waits_for_no_process_that_has_left(tmp_path):
    groups = open_group(tmp_path, 3)
    first, second, third = groups

    def call():
        return first.call("upload", WORK, "step 7", timeout_secs=1)

    def listen():
        return [group.listen("upload", WORK) for group in groups]

    def join(group):
        return group.join("upload", WORK, timeout_secs=1)

    _, leave, _ = listen()
    operation = call()
    join(second).report("held", "all")
    leave()  # what it has reported counts
    join(third).report("held", "none")
    with operation:
        assert operation.gather("held", "first") == ["first", "all", "none"]
    operation = call()
    join(third).report("held")
    with operation, pytest.raises(ApartError) as raised:
        operation.gather("held")
    [failure] = raised.value.failures
    assert (failure.process, failure.kind) == (1, LATE)
    assert "answers no more calls" in failure.text
    listen()  # the run is opened again
    operation = call()
    for group in (second, third):
        join(group).report("held")
    with operation:
        operation.gather("held")


@pytest.mark.parametrize("refused", [0, 1])
def test_no_process_waits_for_one_that_could_not_open_the_run(tmp_path, refused):
    groups = open_group(tmp_path, 2)
    other = groups[1 - refused]

    def wait():
        with begin(other, timeout_secs=2) as operation:
            return operation.exchange("one")

    groups[refused].note_refused(WORK, OptionError("no such disk"))
    other.note_opened(WORK)
    with pytest.raises(ApartError) as raised:
        wait()
    assert raised.value.failures == ((refused, "OptionError", "no such disk"),)
    groups[refused].note_opened(WORK)  # at the second attempt
    with concurrent.futures.ThreadPoolExecutor() as pool:
        done = pool.submit(wait)
        with begin(groups[refused]):  # the one before, which it has not begun
            pass
        with begin(groups[refused], timeout_secs=2) as operation:
            operation.exchange("one")
        done.result()


def test_process_that_has_opened_as_much_is_waited_for(tmp_path):
    first, second = open_group(tmp_path, 2)
    for group in (first, second):
        group.note_opened(WORK)
    second.note_refused(WORK, OptionError("a second object, only here"))
    look = first.store.list
    with begin(second) as joined, begin(first) as operation:

        def look_and_report(prefix):  # only then does the second come
            found = look(prefix)
            if "refused" in prefix:
                assert found
                joined.report("one")
            return found

        first.store.list = look_and_report
        operation.gather("one")


def test_process_without_heartbeats_counts_as_late(tmp_path, monkeypatch):
    seams.replace(monkeypatch, "heartbeat.silent_secs", 0.3)
    files = open_store(tmp_path)
    files.set("flaxckpt/beat/1", "7")  # the last that was heard of it
    operation = begin(open_group(tmp_path, 2)[0], timeout_secs=60)
    with pytest.raises(ApartError) as raised:
        operation.gather("one")
    operation.close()
    [failure] = raised.value.failures
    assert (failure.process, failure.kind) == (1, LATE)
    assert "has sent no heartbeat for" in failure.text
