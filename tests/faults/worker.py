"""Does what tests ask for in processes of their own, of which each takes no time.

Started with the shim preloaded, this imports everything once. For each line on its
input it forks a victim, in which something fails, and then one that looks at what is
left; and answers with a line.
"""

import atexit
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import flaxckpt
from tests.faults import scenarios
from tests.faults.shim import Shim

TIMEOUT_SECS = 300
FAILED, UNEXPECTED = 3, 4


def main():
    serve(Shim, prepare, run, record, look, kill)


def serve(make_shim, *functions):
    """Calls the functions that lines on the input ask for, with a shim."""
    import_all()
    shim = make_shim()
    do = {function.__name__: function for function in functions}
    for line in sys.stdin:
        request = json.loads(line)
        answer = do[request.pop("do")](shim, **request)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def import_all():
    """Imports all that scenarios need once, rather than in each fork."""
    with tempfile.TemporaryDirectory() as directory:
        flaxckpt.save(Path(directory, "c"), {})


def named(scenario):
    return getattr(scenarios, scenario)()


def prepare(shim, *, scenario, base):
    base = Path(base)
    (base / "run").mkdir(parents=True)

    def act():
        chosen = named(scenario)
        chosen.prepare(base / "run", scenarios.Log(base / "log"))

    return {"code": in_child(act)}


def run(shim, *, scenario, base, work, at, what, sticky, counted):
    base, work = Path(base), Path(work)
    shutil.copytree(base, work, symlinks=True)
    directory, log = work / "run", scenarios.Log(work / "log")
    chosen = named(scenario)

    def act():
        shim.arm(directory, at=at, what=what, sticky=sticky, counted=counted)
        try:
            chosen.act(directory, log)
        except scenarios.errors.CheckpointError as error:
            log("failed", str(error))
            log("hits", shim.hits())
            os._exit(FAILED)
        except Exception as error:
            log("unexpected", "".join(traceback.format_exception(error)[-3:]))
            raise
        if scenario == "JustEnds":
            atexit.register(lambda: log("seen", shim.seen()))
            atexit.register(lambda: log("hits", shim.hits()))
            sys.exit()  # the save goes on behind
        log("hits", shim.hits())
        log("seen", shim.seen())

    code = in_child(act)
    rows = scenarios.Log.read(work / "log")
    if scenario == "JustEnds" and code == 0:
        rows.append(["saved", 2, 0])
    hits = [row[1] for row in rows if row[0] == "hits"]
    left = scenarios.leftovers(directory)
    problems = looked_at(work, chosen, rows)
    shutil.rmtree(work)
    return {
        "code": code,
        "hits": hits[-1] if hits else 1,  # it did not live to tell
        "seen": max((row[1] for row in rows if row[0] == "seen"), default=0),
        "rows": rows,
        "left": left,
        "problems": problems,
    }


def looked_at(work, scenario, rows):
    """What is wrong in `work`; empty if nothing."""

    def check():
        found = scenarios.check(work / "run", rows)
        if scenario is not None:
            found += scenarios.check_next(work / "run", scenario)
        scenarios.Log(work / "problems")(*found)

    if in_child(check) != 0:
        return ["what is left could not be looked at"]
    return [each for row in scenarios.Log.read(work / "problems") for each in row]


def record(shim, *, scenario, base, journal):
    """Does it without a fault, and writes down all calls."""
    base = Path(base)

    def act():
        descriptor = os.open(journal, os.O_WRONLY | os.O_CREAT, 0o600)
        shim.arm(base / "run")
        shim.record(descriptor)
        log = scenarios.Log(base / "log", shim.note)
        named(scenario).act(base / "run", log)

    return {"code": in_child(act)}


def kill(shim, *, scenario, base, rows, secs):
    """Does it until some rows are logged and a moment more, and looks at the rest."""
    base = Path(base)
    wanted = len(scenarios.Log.read(base / "log")) + rows

    def is_due():
        if len(scenarios.Log.read(base / "log")) < wanted:
            return False
        time.sleep(secs)
        return True

    chosen = named(scenario)
    act = functools.partial(chosen.act, base / "run", scenarios.Log(base / "log"))
    code = in_child(act, is_due)
    rows = scenarios.Log.read(base / "log")
    (base / "problems").unlink(missing_ok=True)
    return {"code": code, "problems": looked_at(base, None, rows)}


def look(shim, *, scenario, work, rows):
    chosen = named(scenario)
    return {"problems": looked_at(Path(work), chosen, rows)}


def in_child(act, is_due=lambda: False, *, timeout_secs=TIMEOUT_SECS):
    """Does something in a fork; returns its exit code, or the signal that ended it.

    It is killed as soon as that is due, and as a hang if it takes too long.
    """
    child = os.fork()
    if child == 0:
        try:
            act()
        except SystemExit:
            raise  # as programs end, with all that happens then
        except BaseException:
            traceback.print_exc()
            os._exit(UNEXPECTED)
        os._exit(0)
    deadline = time.monotonic() + timeout_secs
    delay = 0.001
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        is_hanging = time.monotonic() > deadline
        if is_hanging or is_due():
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            return "hang" if is_hanging else os.waitstatus_to_exitcode(status)
        time.sleep(delay)
        delay = min(2 * delay, 0.01)


if __name__ == "__main__":
    main()
