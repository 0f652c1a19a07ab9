"""Work gives way to the program until someone waits for it."""

import os
import sys
import threading

import pytest

from flaxckpt._util import threads as util_threads
from flaxckpt._util.pace import Pace
from tests.helpers import seams

linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="threads have no priority of their own"
)


def nice():
    """Returns the nice value of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@linux_only
def test_threads_have_low_priority_and_the_caller_keeps_its_own():
    before, found = nice(), []
    util_threads.each(lambda _: found.append(nice()), range(20), threads=3, pace=Pace())
    assert len(found) == 20
    assert set(found) == {min(before + 10, 19)}
    assert nice() == before


def test_no_thread_has_low_priority_once_someone_waits():
    pace, found = Pace(), []
    pace.lift()
    util_threads.each(lambda _: found.append(nice()), range(20), threads=3, pace=pace)
    assert found == [nice()] * 20


@linux_only
def test_others_help_when_someone_begins_to_wait():
    pace, before = Pace(), nice()
    slow, helped, done = threading.Semaphore(0), threading.Event(), []

    def work(item):
        if nice() > before:
            slow.release()
            assert helped.wait(60)  # as if it got no core
        else:
            helped.set()
        done.append(item)

    def wait_for_it():
        for _ in range(2):
            slow.acquire()
        pace.lift()

    waiting = threading.Thread(target=wait_for_it)
    waiting.start()
    util_threads.each(work, range(6), threads=2, pace=pace)
    waiting.join()
    assert sorted(done) == list(range(6))


def test_the_first_error_is_raised_and_the_rest_left_out():
    done = []

    def work(item):
        done.append(item)
        if item == 5:
            raise ValueError(item)

    with pytest.raises(ValueError, match="5"):
        util_threads.each(work, range(1000), threads=2, pace=Pace())
    assert len(done) < 1000


def test_the_caller_works_where_no_thread_can_start(monkeypatch):
    seams.refuse_threads(monkeypatch)
    done = []
    util_threads.each(done.append, range(3), threads=4, pace=Pace())
    assert done == [0, 1, 2]
