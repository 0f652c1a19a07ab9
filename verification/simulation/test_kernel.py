"""The simulated world: one seed is one history; crashes have no effects afterwards."""

import pytest

from flaxckpt import _util
from flaxckpt._storage import locks
from flaxckpt._util import threads
from verification.simulation import (
    buckets,
    kernel,
    planted,
    process_state,
    runner,
    runs,
    stand_ins,
)

PLANTED = [
    *planted.FAULTS_OF_FILES.values(),
    *planted.FAULTS_OF_TIER.values(),
    *((buckets, patches) for patches in planted.FAULTS_OF_BUCKETS.values()),
    *((runs, patches) for patches in planted.FAULTS_OF_RUNS.values()),
]


@pytest.fixture(autouse=True)
def _installed():
    with stand_ins.installed():
        yield


def history(seed):
    """Two processes whose threads take turns at random; returns their timeline."""
    with kernel.World(seed, is_traced=True) as world:

        def work(number):
            locks.time.sleep(world.random.random())
            world.record(f"{number} {locks.os.getpid()} {locks.secrets.token_hex(4)}")
            locks._living.add(f"{locks.os.getpid()}")
            assert locks._living == {f"{locks.os.getpid()}"}

        for name in "ab":
            world.start(name, lambda: _util.threads.each(work, range(5), threads=3))
        world.run()
        return [str(line) for line in world.timeline]


def test_seed_determines_history():
    assert history(1) == history(1)
    assert history(1) != history(2)


def test_restores_modules_of_flaxckpt():
    assert locks.time.__name__ == "time"
    assert not hasattr(locks.threading, "Semaphore")  # the stand-in has no such name
    assert process_state.stand_ins


def test_stand_in_takes_the_arguments_of_what_it_replaces():
    with (
        pytest.raises(TypeError, match="the stand-in of lock does not fit"),
        stand_ins.installed(patches={(locks, "lock"): lambda: None}),
    ):
        pass
    for histories, patches in PLANTED:
        with runner.installed(histories, patches):
            pass


def test_crash_ends_process_at_once():
    effects = []
    with kernel.World(0) as world:

        def program():
            beat = threads.Heartbeat(lambda: effects.append(world.now), 10, "beat")
            try:
                locks.time.sleep(35)
                effects.append("never")
            finally:
                beat.stop()
                effects.append("never")

        process = world.start("a", program)
        world.at(32, lambda: world.crash(process))
        world.run()
        assert effects == [10, 20, 30]
        assert not process.is_alive
    assert effects == [10, 20, 30]


def test_pause_delays_all_threads_of_process():
    times = []
    with kernel.World(0) as world:

        def program():
            for _ in range(3):
                locks.time.sleep(10)
                times.append(locks.time.monotonic() - 1000)

        process = world.start("a", program)
        world.at(15, lambda: world.pause(process, 100))
        world.run()
    assert times == [10, 115, 125]


def test_clock_jump_affects_only_its_process():
    with kernel.World(0) as world:
        times = {}

        def program():
            locks.time.sleep(5)
            times[locks.os.getpid()] = locks.time.time() - kernel.EPOCH

        first = world.start("a", program)
        second = world.start("b", program, machine="m2")
        first.clock_secs = 3600.0
        world.run()
        assert times == {first.pid: 3605, second.pid: 5}


def test_endless_wait_raises_violation():
    with kernel.World(0) as world:
        world.start("a", lambda: locks.threading.Event().wait())
        with pytest.raises(kernel.Violation, match="a/main waits for an event"):
            world.run()


def test_waits_respect_timeouts():
    with kernel.World(0) as world:

        def program():
            event = locks.threading.Event()
            assert not event.wait(5)
            assert world.now == 5
            lock = locks.threading.Lock()
            assert lock.acquire()
            assert not lock.acquire(timeout=7)
            assert world.now == 12
            thread = locks.threading.Thread(target=lambda: locks.time.sleep(20))
            thread.start()
            thread.join(3)
            assert thread.is_alive()
            thread.join()
            assert world.now == 32
            changed = locks.threading.Condition()
            with changed:
                assert not changed.wait(4)
                assert changed.wait_for(lambda: world.now > 30, 1)

        world.start("a", program)
        world.run()


def test_error_of_thread_raises_violation():
    with kernel.World(0) as world:
        world.start("a", lambda: 1 / 0)
        with pytest.raises(kernel.Violation, match="ZeroDivisionError"):
            world.run()
