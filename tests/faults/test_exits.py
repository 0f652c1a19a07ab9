"""A program that ends, or forks, loses no save, and says so if one has failed."""

import signal
import textwrap
import time

import pytest

import flaxckpt
from tests import ROOT
from tests.helpers import programs

BEGIN = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
"""
BEGIN += """
import multiprocessing, os, resource, signal, sys, threading, time
import numpy as np
import pytest
import flaxckpt
from tests.helpers import seams

STATE = {"w": np.arange(50_000.0)}

def replace(seam, part):
    seams.replace(pytest.MonkeyPatch(), seam, part)

def fill_up():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

def save(directory, full=False):
    if full and threading.current_thread() is threading.main_thread():
        fill_up()
    return flaxckpt.save_async(directory, STATE)

directory = sys.argv[1]
"""


@pytest.fixture
def run(tmp_path):
    """Runs a program; returns how it ended."""

    def run(text, *args):
        program = tmp_path / "program.py"
        program.write_text(BEGIN + textwrap.dedent(text))
        words = ("-W", "ignore", program, tmp_path / "c", *args)
        return programs.run(*words, code=None)

    return run


WAYS = {
    "at the end": "save(directory, full)",
    "by sys.exit": "save(directory, full); sys.exit(0)",
    "from a thread": "threading.Thread(target=save, args=(directory, full)).start()",
    "from a daemon thread": """
ended = threading.Event()
def work():
    save(directory, full)
    ended.set()
    time.sleep(60)
threading.Thread(target=work, daemon=True).start()
ended.wait()""",
}


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_exiting_program_finishes_or_reports_save(run, tmp_path, way, full):
    begin = "full = True; fill_up()\n" if full else "full = False\n"
    done = run(begin + WAYS[way])
    assert done.returncode == (1 if full else 0), done.stderr
    if full:
        assert "could not be saved" in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["program.py"]
    else:
        assert flaxckpt.load(tmp_path / "c")["w"][-1] == 49_999


MUTE = {
    "stderr closed": "os.close(2)",
    "stdout closed": "os.close(1)",
    "no stderr": "sys.stderr = None",
    "no stdout": "sys.stdout = None",
    "stderr full": "sys.stderr = open('/dev/full', 'w')",
    "stdout full": "sys.stdout = open('/dev/full', 'w'); print('there')",
    "no words": """
class Mute(Exception):
    def __str__(self):
        raise ValueError
def fails(*ignored):
    raise Mute
replace("commit.write_files", fails)""",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", MUTE)
def test_failed_save_sets_exit_code_even_without_output(run, tmp_path, way):
    full = way != "no words"
    done = run(f"{MUTE[way]}\nfull = {full}\nif full: fill_up()\nsave(directory, full)")
    assert done.returncode == 1
    if "stdout" in way:
        assert "could not be saved" in done.stderr
    assert not (tmp_path / "c").exists()


INTERRUPTED = """
publish = seams.current("rename.publish")

def slow(*args):
    print("under way", flush=True)
    sys.stdin.readline()
    publish(*args)

replace("rename.publish", slow)
save(directory)
"""


@pytest.mark.slow
def test_second_ctrl_c_at_exit_reports_interrupted_save(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(BEGIN + INTERRUPTED)
    process = programs.start(program, tmp_path / "c")
    assert process.stdout.readline() == "under way\n"
    told = []
    # The first breaks off Python's own wait for threads, the next ours; where signals
    # meet, one more does.
    while process.poll() is None and "threading" not in "".join(told):
        process.send_signal(signal.SIGINT)
        told.append(process.stderr.readline())
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    assert process.returncode != 0
    assert "was interrupted" in process.stderr.read()
    process.communicate()
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True])
def test_early_registered_exit_handler_can_save(tmp_path, full):
    program = tmp_path / "program.py"
    early = """
    import atexit, sys

    def last():
        if sys.argv[2] == "True":
            fill_up()
        save(directory)

    atexit.register(last)
    """
    program.write_text(textwrap.dedent(early) + BEGIN)
    done = programs.run(program, tmp_path / "c", full, code=1 if full else 0)
    assert ("could not be saved" in done.stderr) is full
    assert (tmp_path / "c").exists() is not full


@pytest.mark.slow
def test_program_cancelling_its_save_exits_cleanly(run, tmp_path):
    done = run(
        """
        handle = save(directory)
        is_cancelled = handle.cancel()
        assert is_cancelled is not os.path.exists(directory)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_unhandled_error_lets_save_finish(run, tmp_path):
    done = run("save(directory); raise ValueError('oh')")
    assert done.returncode == 1
    assert "ValueError: oh" in done.stderr
    assert flaxckpt.load(tmp_path / "c")["w"][-1] == 49_999


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("full", [False, True])
def test_multiprocessing_child_finishes_or_reports_save(run, tmp_path, method, full):
    done = run(
        """
        def child(queue, directory, full):
            queue.put("told")
            save(directory, full)

        if __name__ == "__main__":
            context = multiprocessing.get_context(sys.argv[2])
            queue = context.Queue()
            process = context.Process(
                target=child, args=(queue, directory, sys.argv[3] == "True")
            )
            process.start()
            print(queue.get(timeout=300))
            process.join()
            print(process.exitcode)
        """,
        method,
        str(full),
    )
    assert done.stdout.split() == ["told", "1" if full else "0"], done.stderr
    assert (tmp_path / "c").exists() is not full


@pytest.mark.slow
def test_fork_ignores_saves_of_its_parent(run, tmp_path):
    """Neither waits for them, nor tells of them, nor is kept from saving."""
    done = run(
        """
        slow = threading.Event()
        sync_tree = seams.current("disk.sync_tree")

        def wait_and_sync(path):
            if os.getpid() == parent:
                slow.wait()
            return sync_tree(path)

        parent = os.getpid()
        replace("disk.sync_tree", wait_and_sync)
        ckpt = flaxckpt.Checkpointer(directory)
        handle = ckpt.save(1, STATE)
        while not list(ckpt.directory.glob("1.*")):
            time.sleep(0.01)
        child = os.fork()
        if child == 0:
            try:
                handle.wait()
            except flaxckpt.errors.SaveFailedError as error:
                assert "fork" in str(error)
                assert not any(ckpt.directory.glob("1/*"))
                own = flaxckpt.Checkpointer(ckpt.directory)  # sweeps nothing alive
                own.save(1, STATE).wait()
                ckpt.close()
                sys.exit(0)
            sys.exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        slow.set()
        try:
            handle.wait()
        except flaxckpt.errors.CheckpointExistsError:
            print("one winner")
        """
    )
    assert done.stdout == "one winner\n", done.stderr
    assert done.returncode == 0
    assert flaxckpt.load(tmp_path / "c")["w"][-1] == 49_999
    assert {p.name for p in (tmp_path / "c").iterdir()} == {"1", "events.jsonl"}


@pytest.mark.slow
def test_fork_does_not_wait_for_load_of_its_parent(run, tmp_path):
    done = run(
        """
        save(directory).wait()
        may_read, real = threading.Event(), seams.current("arrays.read")

        def hold(*args):
            may_read.wait()
            return real(*args)

        replace("arrays.read", hold)
        handle = flaxckpt.load_async(directory)
        child = os.fork()
        if child == 0:
            try:
                handle.wait()
            except flaxckpt.errors.OptionError as error:
                os._exit(0 if "forked" in str(error) else 3)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        may_read.set()
        print(handle.wait()["w"][-1])
        """
    )
    assert done.stdout == "49999.0\n", done.stderr


@pytest.mark.slow
def test_fork_does_not_report_earlier_failures(run):
    done = run(
        """
        handle = save(directory, full=True)
        while not handle.done():
            time.sleep(0.01)
        child = os.fork()
        if child == 0:
            sys.exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert (done.stdout, done.returncode) == ("0\n", 1), done.stderr


def test_fork_reenables_paused_garbage_collector(run):
    done = run(
        """
        import gc

        save(directory).wait()
        inside, leave, real = (
            threading.Event(), threading.Event(), seams.current("arrays.begin_read")
        )

        def hold(*args, **options):
            inside.set()
            leave.wait()
            return real(*args, **options)

        replace("arrays.begin_read", hold)
        thread = threading.Thread(target=flaxckpt.load, args=(directory,))
        thread.start()
        inside.wait()
        assert not gc.isenabled()
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 2)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        leave.set()
        thread.join()
        assert gc.isenabled()
        """
    )
    assert done.stdout == "0\n", done.stderr


def test_call_of_save_that_is_interrupted_is_not_reported_again(run, tmp_path):
    done = run("""
    init = threading.Thread.__init__

    def interrupted(self, *args, **options):
        if str(options.get("name")).startswith("save of"):
            raise KeyboardInterrupt
        init(self, *args, **options)

    threading.Thread.__init__ = interrupted
    try:
        save(directory)
    except KeyboardInterrupt:
        print("told")
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "told\n", "")
    assert not (tmp_path / "c").exists()
