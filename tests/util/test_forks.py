"""A forked process waits for no lock that a thread of its parent holds."""

import json
import os
import signal
import sys
import textwrap
import threading
import time
import types

import numpy as np
import pytest

import flaxckpt
from flaxckpt import _storage, configs, integrations
from flaxckpt._steps import event as steps_event
from flaxckpt._steps import journal as steps_journal
from flaxckpt._util import forks as util_forks
from tests import ROOT
from tests.helpers import programs, run_files

CHILD_SECS = 120

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*")


def in_fork(act):
    """The exit code of a fork that calls `act`; None if that does not end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = act() or 0
        finally:
            os._exit(code)
    end = time.monotonic() + CHILD_SECS
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


class Held:
    """Something that a thread is inside of until the `with` block ends."""

    def __init__(self, enter):
        self._inside, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=enter, args=(self._wait,))

    def _wait(self):
        self._inside.set()
        self._leave.wait()

    def __enter__(self):
        self._thread.start()
        self._inside.wait()

    def __exit__(self, *error):
        self._leave.set()
        self._thread.join()


# ---- the mechanism -------------------------------------------------------------------


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_fork_has_its_own_locks(make):
    lock = util_forks.PerProcess(make)

    def hold(wait):
        with lock.get():
            wait()

    def child():
        return 0 if lock.get().acquire(blocking=False) else 2

    with Held(hold):
        assert not lock.get().acquire(blocking=False)
        assert in_fork(child) == 0
        assert not lock.get().acquire(blocking=False)
    assert lock.get().acquire(blocking=False)


def test_fork_inside_lock_releases_it_in_both_processes():
    lock = util_forks.PerProcess(threading.Lock)

    def enter():
        with lock.get():
            child = os.fork()
            if child == 0:
                with lock.get():  # the child's own
                    pass
        return child

    child = enter()
    if child == 0:
        os._exit(0 if lock.get().acquire(blocking=False) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lock.get().acquire(blocking=False)


def test_threads_of_one_process_share_object():
    for _ in range(50):
        shared, found = util_forks.PerProcess(threading.Lock), []
        barrier = threading.Barrier(8)

        def ask(shared=shared, found=found, barrier=barrier):
            barrier.wait()
            found.append(shared.get())

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(map(id, found))) == 1


def test_lazy_property_in_computation_does_not_block_fork():
    waits = []

    class Owner:
        @util_forks.lazy
        def value(self):
            if waits:
                waits.pop()()
            return 7

    owner = Owner()

    def compute(wait):
        waits.append(wait)
        assert owner.value == 7

    with Held(compute):
        assert in_fork(lambda: 0 if owner.value == 7 else 2) == 0
    assert owner.value == owner.__dict__["value"] == 7


LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition)
LOCKS += (threading.Event,)
KNOWN = (
    "handle._is_ending",  # set once, when the program ends
    "commit._locks[",  # emptied in a fork
    ".last_save.",  # a fork ends those that are under way
    "uploads._turn.ended",  # nobody waits for it in a fork
)


def locks_of(name, value, seen):
    """The names of locks that can be reached through objects of flaxckpt."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, LOCKS):
        yield name
    elif isinstance(value, dict):
        for key, each in list(value.items()):
            yield from locks_of(f"{name}[{key!r:.40}]", each, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in list(value):
            yield from locks_of(f"{name}[…]", each, seen)
    elif type(value).__module__.startswith("flaxckpt") and not isinstance(
        value, (type, types.ModuleType, util_forks.PerProcess)
    ):
        fields = dict(getattr(value, "__dict__", {}))
        for slot in getattr(type(value), "__slots__", ()):
            if hasattr(value, slot):
                fields[slot] = getattr(value, slot)
        for key, each in fields.items():
            yield from locks_of(f"{name}.{key}", each, seen)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_lasting_objects_hold_only_known_locks(tmp_path, kind):
    root = tmp_path / "run" if kind == "file" else "memory://forks-locks/run"
    # In a process of its own: what other tests have left is not the package's.
    code = (
        "import sys; from tests.util import test_forks;"
        " test_forks.tell_locks(*sys.argv[1:])"
    )
    done = programs.run("-c", code, root, tmp_path / "ssd", cwd=ROOT)
    found = json.loads(done.stdout)
    assert found, "those that are known"
    assert not [name for name in found if not any(each in name for each in KNOWN)]


def tell_locks(root, staging):
    """Prints the locks that live on after a step of a training loop."""
    assert configs
    assert integrations
    with flaxckpt.Checkpointer(
        root, staging=staging, sinks=[lambda event: None]
    ) as ckpt:
        on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=1)
        state, _ = on_step.restore_or_init({"w": np.zeros(3)})
        on_step(1, state)
        ckpt.wait_for_uploads()
        seen = set()
        found = set(locks_of("checkpointer", ckpt, seen))
        found |= set(locks_of("callback", on_step, seen))
        for module in [m for n, m in sys.modules.items() if n.startswith("flaxckpt.")]:
            short = module.__name__.removeprefix("flaxckpt.")
            for key, value in vars(module).items():
                found |= set(locks_of(f"{short}.{key}", value, seen))
    sys.stdout.write(json.dumps(sorted(found)))


# ---- what a fork does ---------------------------------------------------------------


BEGIN = """
import faulthandler, os, sys, threading, time
import numpy as np
import flaxckpt
from flaxckpt._storage.storage import LOCAL

faulthandler.dump_traceback_later(100, exit=True)
ZARR_2 = flaxckpt.ArrayLayout(zarr_version=2)  # by TensorStore
directory = sys.argv[1]
parent = os.getpid()
inside, leave = threading.Event(), threading.Event()

def state(step):
    return {"w": np.full(50, float(step)), "n": step}

def in_fork(act):
    child = os.fork()
    if child == 0:
        code = 3
        try:
            act()
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def held_up(function):
    \"\"\"Has the function wait in the parent, until it may go on.\"\"\"
    def wait(*args, **given):
        if os.getpid() == parent:
            inside.set()
            leave.wait()
        return function(*args, **given)
    return wait
"""


@pytest.fixture
def run(tmp_path):
    """Runs a program; returns what it has printed."""

    def run(text):
        program = tmp_path / "program.py"
        program.write_text(BEGIN + textwrap.dedent(text))
        done = programs.run("-W", "ignore", program, tmp_path / "run")
        return done.stdout.split("\n")[:-1]

    return run


@pytest.mark.slow
def test_fork_works_while_parent_threads_save_and_report(run, tmp_path):
    """One thread is in `save`, and another one in a sink."""
    told = run(
        """
        events = []
        def sink(event):
            if os.getpid() == parent and event.kind == "committed":
                telling.set()
                leave.wait()
            events.append((os.getpid(), event.kind, event.step))

        telling = threading.Event()
        ckpt = flaxckpt.Checkpointer(directory, sinks=[sink])
        ckpt.save(1, state(1)).wait()
        teller = threading.Thread(target=ckpt.events.deliver)
        teller.start()
        telling.wait()
        LOCAL.sync_tree = held_up(LOCAL.sync_tree)

        def save():
            ckpt.save(2, state(2))
            ckpt.save(3, state(3))  # waits for the other, inside of save

        saver = threading.Thread(target=save)
        saver.start()
        inside.wait()
        time.sleep(0.3)

        def act():
            events.clear()
            assert ckpt.save(7, state(7)).wait().step == 7
            ckpt.wait()
            assert ckpt.restore(step=7)["n"] == 7
            ckpt.add_metrics(7, {"loss": 1.0})
            ckpt.pin(7)
            ckpt.raise_if_failed()
            assert ckpt.metrics(7) == {"loss": 1.0}
            ckpt.close()
            print(sorted({(kind, step) for pid, kind, step in events}))
            with flaxckpt.Checkpointer(directory + "-2") as own:
                on_step = flaxckpt.CheckpointCallback(own, every_steps=1)
                mine, start = on_step.restore_or_init(state(0))
                on_step(1, mine)
            print(own.steps())

        code = in_fork(act)
        leave.set()
        saver.join()
        teller.join()
        ckpt.close()
        print(code, ckpt.steps())
        """
    )
    assert told == [
        "[('committed', 7), ('measured', 7), ('restored', 7), ('snapshot', 7),"
        " ('started', 7)]",
        "[1]",
        "0 [1, 2, 3, 7]",
    ]
    kinds = [
        (event.kind, event.step) for event in run_files.read_events(tmp_path / "run")
    ]
    assert kinds.count(("committed", 7)) == 1


@pytest.mark.slow
def test_fork_works_while_parent_uploads(run):
    told = run(
        """
        from flaxckpt import errors
        from flaxckpt._run.tiers import upload_copies
        ssd = directory + "-ssd"
        ckpt = flaxckpt.Checkpointer(directory, staging=ssd)
        ckpt.save(1, state(1)).wait()
        ckpt.wait_for_uploads()
        upload_copies.make = held_up(upload_copies.make)
        ckpt.save(2, state(2)).wait()
        inside.wait()
        locks = ckpt._run.uploads
        assert locks.step_lock.get().locked()
        locks.change_lock.get().acquire()

        def act():
            ckpt.save(3, state(3)).wait()
            ckpt.pin(3)
            ckpt.delete(1)
            assert ckpt.restore(step=3)["n"] == 3
            try:
                ckpt.close()
            except errors.SaveFailedError as error:
                print("fork" in str(error), "steps 2, 3 stay" in str(error))

        print(in_fork(act))
        locks.change_lock.get().release()
        leave.set()
        ckpt.close()
        print(flaxckpt.Checkpointer(directory, read_only=True).steps())
        """
    )
    assert told == ["True True", "0", "[2, 3]"]


@pytest.mark.slow
def test_fork_after_use_of_tensorstore_raises_clear_errors(run):
    """TensorStore would end the process: no error, and nothing to catch."""
    told = run(
        """
        import multiprocessing
        from flaxckpt import errors
        ckpt = flaxckpt.Checkpointer(directory, layout=ZARR_2)
        ckpt.save(1, state(1)).wait()
        ckpt.save(2, state(2)).wait()

        def act():
            try:
                ckpt.save(3, state(3)).wait()
            except errors.SaveFailedError as error:
                print("in a forked process" in str(error), len(str(error).splitlines()))
            try:
                ckpt.restore()
            except errors.StoreError as error:
                print("'spawn'" in str(error))
            print(ckpt.steps(), ckpt.damaged())
            flaxckpt.save(directory + "-3", state(4))
            print(flaxckpt.load(directory + "-3")["n"], flush=True)

        print(in_fork(act), flush=True)
        process = multiprocessing.get_context("fork").Process(target=act)
        process.start()
        process.join()
        print(process.exitcode)
        ckpt.save(3, state(3)).wait()
        print(ckpt.restore()["n"], ckpt.damaged())
        """
    )
    of_fork = ["True 1", "True", "[1, 2] {}", "4"]
    assert told[:5] == [*of_fork, "0"]
    assert told[5:8] == of_fork[:3]  # then, the checkpoint is there already
    assert told[-2:] == ["1", "3 {}"]


def test_fork_does_not_write_pending_events_of_its_parent():
    path = _storage.paths.resolve("memory://forks-journal/run/events.jsonl")
    journal = steps_journal.EventJournal(path)
    journal.write(steps_event.Event("started", 1, "run", 1.0, {}))

    def child():
        journal.write(steps_event.Event("committed", 2, "run", 2.0, {}))
        journal.close()
        return 0 if [e.step for e in steps_journal.read(path)] == [2] else 2

    with Held(lambda wait: _inside(journal, wait)):
        assert in_fork(child) == 0
    journal.close()
    assert [event.step for event in steps_journal.read(path)] == [1]


def _inside(journal, wait):
    with journal._writing.get():
        wait()


@pytest.mark.slow
def test_fork_waits_for_import_in_another_thread(tmp_path):
    program = """
        import os, sys, threading, time
        import numpy as np
        import flaxckpt

        def save(name):
            flaxckpt.save(sys.argv[1] + name, {"w": np.arange(3)})

        first = threading.Thread(target=save, args=["/a"])
        first.start()
        while "flaxckpt._state.tree" not in sys.modules:  # in the midst of it
            time.sleep(0.001)
        child = os.fork()
        if child == 0:
            save("/b")
            os._exit(0)
        first.join()
        assert os.waitpid(child, 0)[1] == 0
        assert flaxckpt.load(sys.argv[1] + "/b")["w"].tolist() == [0, 1, 2]
        """
    programs.run_text(program, tmp_path)
