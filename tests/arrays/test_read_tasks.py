"""Tasks of a reading run on threads; their first error is the reading's."""

import threading

import pytest

from flaxckpt import _util
from flaxckpt._arrays import read_files
from flaxckpt._arrays.read_files import Reading
from tests.helpers import faulty_store as faulty


def fail(error):
    def task():
        raise error

    return task


def test_the_values_come_after_all_tasks_of_all_readings():
    done = []
    readings = [
        Reading([lambda n=n: done.append(n)] * 3, lambda n=n: {(): done.count(n)})
        for n in range(4)
    ]
    read_files.run(readings)
    assert [reading.result() for reading in readings] == [{(): 3}] * 4


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("damaged"), ValueError),
        (OSError("lost"), OSError),
        (MemoryError(), _util.memory.TooLargeError),
    ],
)
def test_a_failed_task_fails_its_reading_alone(error, kind):
    done = []
    failed = Reading([fail(error), lambda: done.append(1)], dict)
    other = Reading([lambda: done.append(2)], lambda: {(): 1})
    read_files.run([failed, other])
    assert sorted(done) == [1, 2], "the other tasks have run"
    with pytest.raises(kind, match=str(error) or None):
        failed.result()
    assert other.result() == {(): 1}


def test_raises_the_first_of_several_errors():
    reading = Reading([fail(ValueError(text)) for text in ("one", "two")], dict)
    for task in reading.tasks:
        task()
    with pytest.raises(ValueError, match="one"):
        reading.result()


def test_an_error_is_known_before_the_tasks():
    reading = read_files.failed_reading(ValueError("no such array"))
    read_files.run([reading])
    with pytest.raises(ValueError, match="no such array"):
        reading.result()


@pytest.mark.parametrize(("in_store", "threads"), [(False, 8), (True, 32)])
def test_more_objects_than_files_are_read_at_a_time(in_store, threads):
    """All these tasks wait for each other, so that each needs a thread of its own."""
    together = threading.Barrier(threads)
    readings = [Reading([lambda: together.wait(60)], dict)] * threads
    read_files.run(readings, in_store=in_store)
    assert [reading.result() for reading in readings] == [{}] * threads


def test_a_request_to_a_store_is_worth_more_bytes_than_one_to_a_disk(tmp_path):
    assert read_files.small_gap(tmp_path) == 2**16
    assert read_files.small_gap(faulty.new_path("gaps")) == 2**22
