"""Does what tests ask for in processes of their own, of which each takes no time.

Started with the shim preloaded, this imports everything once. For each line on its
input it forks a victim, in which something fails, and then one that looks at what is
left; and answers with a line.
"""

import atexit
import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import scenarios
from shim import Shim

TIMEOUT_SECS = 60
FAILED, UNEXPECTED = 3, 4


def main():
    shim = Shim()
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"prepare": prepare, "run": run}[request.pop("do")](shim, **request)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def prepare(shim, *, scenario, base):
    base = Path(base)
    (base / "run").mkdir(parents=True)

    def act():
        chosen = scenarios.SCENARIOS[scenario]()
        chosen.prepare(base / "run", scenarios.Log(base / "log"))

    return {"code": in_child(act)}


def run(shim, *, scenario, base, work, at, what, sticky, growing):
    base, work = Path(base), Path(work)
    shutil.copytree(base, work, symlinks=True)
    directory, log = work / "run", scenarios.Log(work / "log")
    chosen = scenarios.SCENARIOS[scenario]()

    def act():
        shim.arm(directory, at=at, what=what, sticky=sticky, growing=growing)
        try:
            chosen.act(directory, log)
        except scenarios.errors.CheckpointError as error:
            log("failed", str(error))
            log("hits", shim.hits())
            os._exit(FAILED)
        if scenario == "JustEnds":
            atexit.register(lambda: log("hits", shim.hits()))
            sys.exit()  # the save goes on behind
        log("hits", shim.hits())

    code = in_child(act)
    rows = scenarios.Log.read(work / "log")
    if scenario == "JustEnds" and code == 0:
        rows.append(["saved", 2, 0])
    hits = [row[1] for row in rows if row[0] == "hits"]
    left = scenarios.leftovers(directory)
    problems = []

    def look():
        found = scenarios.check(directory, rows)
        found += scenarios.check_next(directory, chosen)
        scenarios.Log(work / "problems")(*found)

    if in_child(look) != 0:
        problems.append("what is left could not be looked at")
    for found in scenarios.Log.read(work / "problems"):
        problems += found
    shutil.rmtree(work)
    return {
        "code": code,
        "hits": hits[-1] if hits else 1,  # it did not live to tell
        "rows": rows,
        "left": left,
        "problems": problems,
    }


def in_child(act):
    """Does something in a fork; returns its exit code, or the signal that ended it."""
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
    deadline = time.monotonic() + TIMEOUT_SECS
    delay = 0.001
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hang"
        time.sleep(delay)
        delay = min(2 * delay, 0.01)


if __name__ == "__main__":
    main()
