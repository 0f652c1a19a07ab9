"""Work side by side: all of it, errors told, even where no thread can start."""

import itertools
import os
import sys
import threading
import time

import pytest

from flaxckpt._util import threads as util_threads
from flaxckpt._util.pace import Pace
from tests.helpers import programs, seams
from tests.helpers.interruptions import end_threads, ends, interrupt


@pytest.fixture(params=["threads", "no threads"])
def any_threads(request, monkeypatch):
    if request.param == "no threads":
        seams.refuse_threads(monkeypatch)


paces = pytest.mark.parametrize("pace", [None, Pace()], ids=["full", "own pace"])


@pytest.mark.usefixtures("any_threads")
@paces
@pytest.mark.parametrize("count", [0, 1, 3, 100])
def test_processes_every_item_once(count, pace):
    done = []
    util_threads.each(done.append, range(count), threads=4, pace=pace)
    assert sorted(done) == list(range(count))


@pytest.mark.usefixtures("any_threads")
@paces
def test_raises_first_error_and_skips_rest(pace):
    done, before = [], set(threading.enumerate())

    def work(item):
        done.append(item)
        if item == 5:
            raise ValueError(item)

    with pytest.raises(ValueError, match="5"):
        util_threads.each(work, range(1000), threads=2)
    assert len(done) < 1000
    assert set(threading.enumerate()) <= before  # nothing is running any more


@pytest.mark.usefixtures("any_threads")
def test_side_task_is_done_at_end_of_block():
    done = []
    with util_threads.beside(lambda: done.append(1)):
        pass
    assert done == [1]


@pytest.mark.usefixtures("any_threads")
def test_raises_errors_of_side_task():
    def fail():
        raise ValueError("beside")

    with pytest.raises(ValueError, match="beside"), util_threads.beside(fail):
        pass
    with pytest.raises(OSError, match="block"), util_threads.beside(fail):
        raise OSError("block")


def test_block_can_end_at_once_if_its_side_task_fails():
    failed = threading.Event()

    def fail():
        failed.set()
        raise ValueError("beside")

    turns = []

    def work():
        with util_threads.beside(fail) as check:
            failed.wait()
            for turn in range(10_000):
                check()
                time.sleep(0.001)
                turns.append(turn)

    with pytest.raises(ValueError, match="beside"):
        work()
    assert len(turns) < 10_000


def test_ended_thread_leaves_its_work_to_others_or_is_told(monkeypatch):
    """Python ends a thread without memory for its first lines, and tells nobody."""
    done = []
    end_threads(monkeypatch)
    for pace in (None, Pace()):
        util_threads.each(done.append, range(9), threads=4, pace=pace)
    assert sorted(done) == sorted([*range(9)] * 2)
    with pytest.raises(MemoryError), util_threads.beside(lambda: done.append("beside")):
        pass
    assert "beside" not in done


def test_never_exceeds_budget():
    budget = util_threads.Budget(10)
    held, most, lock = [], [], threading.Lock()

    def work(size):
        with budget.hold(size):
            with lock:
                held.append(size)
                most.append(sum(held))
            with lock:
                held.remove(size)

    util_threads.each(work, [3, 4, 5, 2] * 50, threads=6)
    assert max(most) <= 10


def test_request_above_budget_runs_alone():
    budget = util_threads.Budget(10)
    with budget.hold(1000), budget.hold(0):
        waiting = threading.Thread(target=lambda: budget.hold(1).__enter__())
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
    waiting.join()


def test_work_continues_while_python_exits():
    """A save may still be under way then; pools refuse work at that time."""
    code = """
import threading, time
from flaxckpt._util import threads
done = []
def work():
    time.sleep(0.3)
    threads.each(done.append, range(20), threads=4)
    with threads.beside(lambda: done.append("beside")):
        pass
    print(len(done))
threading.Thread(target=work).start()
"""
    found = programs.run("-c", code)
    assert (found.stdout.strip(), found.stderr) == ("21", "")


def test_python_exits_during_heartbeats_in_library():
    """Python would abort if it ended their threads inside C++ code."""
    code = """
import contextlib, time
import jax
from flaxckpt._util import threads
from tests.helpers.files import free_port
jax.distributed.initialize(f"127.0.0.1:{free_port()}", 1, 0)
client = jax._src.distributed.global_state.client
def beat():
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client.blocking_key_value_get("never set", 1)
for _ in range(4):
    threads.Heartbeat(beat, 0, "beat")
time.sleep(0.2)
print("ends")
"""
    assert programs.run("-c", code, JAX_PLATFORMS="cpu").stdout.strip() == "ends"


# ---- work gives way to the program until someone waits for it -----------------------


linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="threads have no priority of their own"
)


def nice():
    """Returns the nice value of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@linux_only
def test_threads_get_low_priority_and_caller_keeps_its_own():
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
def test_normal_threads_help_once_someone_waits():
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


# ---- Ctrl-C at any place leaves no lock behind ---------------------------------------


def test_ctrl_c_in_wait_holds_up_nobody():
    for place in itertools.count():
        latch = util_threads.Latch()
        is_hit = interrupt(lambda latch=latch: latch.wait(0), place)
        assert ends(latch.set), place
        assert ends(lambda latch=latch: latch.wait(1000)), place
        assert latch.is_set()
        if not is_hit:
            break
    assert place > 2


def test_latch_wakes_all_that_wait():
    latch = util_threads.Latch()
    waiting = [
        threading.Thread(target=latch.wait, args=(1000,), daemon=True) for _ in range(3)
    ]
    for thread in waiting:
        thread.start()
    assert not latch.wait(0.01)
    latch.set()
    latch.set()
    for thread in waiting:
        thread.join(60)
    assert not any(thread.is_alive() for thread in waiting)


def test_ctrl_c_while_priority_is_lifted_holds_up_nobody():
    for place in itertools.count():
        pace, begun, may_end = Pace(), threading.Event(), threading.Event()

        def work(begun=begun, may_end=may_end):
            begun.set()
            may_end.wait()

        thread = threading.Thread(target=pace.start, args=(work, 1), daemon=True)
        thread.start()
        assert begun.wait(60)
        is_hit = interrupt(pace.lift, place)
        may_end.set()
        thread.join(60)
        assert not thread.is_alive(), place
        if not is_hit:
            break
    assert place > 2


def test_signal_handler_may_lift_priority_while_program_does():
    for place in itertools.count():
        lift, hits = Pace().lift, []

        def work(lift=lift, hits=hits, place=place):
            hits.append(interrupt(lift, place, handler=lift))

        assert ends(work), place
        if not hits[0]:
            break
    assert place > 2
