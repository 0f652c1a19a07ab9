"""Follows sequences of operations, and checks what a power cut may leave of them.

A sequence runs once, and its calls are recorded. After each call of its last operation
the power may be cut: the states that the disk may have then are made from the record,
and checked unless a state was checked before that was equal. Cuts in earlier operations
belong to shorter sequences.
"""

import json
import os
import random
import re
import shutil
import tempfile
import time
from pathlib import Path

from tests.faults import power, scenarios
from tests.faults.shim import Shim
from tests.faults.worker import in_child, serve
from verification.sequences import operations

_REMOVED = r"[^/]*\.orbax-checkpoint-tmp-(writing|deleted)-[^/]*"
"""Names of directories that are only ever removed."""

_is_removed = re.compile(_REMOVED).fullmatch
_BELOW_REMOVED = re.compile(rf"(.*/{_REMOVED})/.*")


def main():
    serve(Shim, prepare, explore)


def prepare(shim, *, base):
    """Makes the run that all sequences begin with, at the time in the file `began`."""
    base = Path(base)
    (base / "root").mkdir(parents=True)
    (base / "began").write_text(str(int(time.time())))
    log = scenarios.Log(base / "log")

    def act():
        operations.prepare(base / "root", log, _began(base))

    return {"code": in_child(act)}


def _began(base):
    return int((base / "began").read_text())


def explore(shim, *, base, seen, sequence):
    """Checks all states after cuts in the last operation that were not seen before.

    Args:
        shim: The shim.
        base: What `prepare` made.
        seen: A directory with a file for each state that was checked, of all workers.
        sequence: The names of the operations.

    Returns:
        The numbers of cuts, of states, and of those that were checked; and problems.
    """
    base = Path(base)
    rows = scenarios.Log.read(base / "log")
    disk = power.Disk(base / "root")
    with tempfile.TemporaryDirectory(dir=base.parent) as scratch:
        work = Path(scratch)
        code = _record(shim, base, work, sequence)
        disk.replay((work / "journal").read_bytes())
        found = {"cuts": 0, "states": 0, "checked": 0, "problems": []}
        if code != 0:
            found["problems"] = [f"the sequence itself fails: {code}"]
            return found
        cuts = _Cuts(disk, rows, sequence)
        unseen = [each for each in cuts.states() if _is_new(seen, each)]
        found |= {"cuts": cuts.cuts, "states": cuts.found, "checked": len(unseen)}
        found["problems"] = _check_all(work, disk, unseen)
    return found


def _record(shim, base, work, sequence):
    """Runs a sequence once; returns the exit code."""
    shutil.copytree(base / "root", work / "root")
    operations.relocate(work / "root")
    rows = scenarios.Log.read(base / "log")

    def act():
        descriptor = os.open(work / "journal", os.O_WRONLY | os.O_CREAT, 0o600)
        shim.arm(work / "root")
        shim.record(descriptor)
        log = scenarios.Log(work / "log", shim.note)
        operations.perform(work / "root", log, rows, sequence, _began(base))

    return in_child(act)


class _Cuts:
    """The states after cuts in the last operation of a sequence.

    Attributes:
        cuts: The number of calls before which the power was cut.
        found: The number of states that differ in the calls that took effect.
    """

    def __init__(self, disk, rows, sequence):
        self._disk = disk
        self._rows = rows
        self._sequence = sequence
        self.cuts = self.found = 0

    def states(self):
        """All states: when the power was cut, what was lost, what is wanted, a key."""
        chance = random.Random(" ".join(self._sequence))
        begins = [
            at for at, text in self._disk.notes if json.loads(text)[0] == "begins"
        ]
        first = 0 if len(self._sequence) == 1 else begins[-1]
        effects = set()
        for when in range(first, len(self._disk.calls) + 1):
            self.cuts += 1
            wanted = self._wanted(when)
            expected = wanted.key()
            for lost in self._disk.all_losses(when, chance, _is_removed):
                applied = self._disk.applied(when, lost)
                if (applied, expected) in effects:
                    continue
                effects.add((applied, expected))
                self.found += 1
                key = _key(self._disk.state(applied), expected)
                yield when, sorted(lost), wanted, key

    def _wanted(self, when):
        wanted = operations.Expected(self._rows)
        for at, text in self._disk.notes:
            kind, *row = json.loads(text)
            if at < when and kind != "begins":
                wanted.add(kind, *row)
        return wanted


def _key(state, expected):
    """What is equal if two states need no check of their own.

    Of the journal, which no restore reads, only the end counts; of an unfinished or
    withdrawn directory, which is only ever removed, only whether it is empty.
    """
    plain = {"expected": expected.encode()}
    for path, content in state.items():
        if removed := _BELOW_REMOVED.fullmatch(path):
            plain[removed[1]] = b"not empty"
        elif path.endswith("events.jsonl"):
            plain[path] = content[-1:]
        else:
            plain[path] = content
    return power.digest(plain).hex()


def _is_new(seen, state):
    """True once for all states with one key, in all processes."""
    try:
        os.close(os.open(Path(seen, state[-1]), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _check_all(work, disk, states):
    """What is wrong in states, each made below a new directory; empty if nothing."""
    problems = []

    def check():
        for i, (when, lost, wanted, _) in enumerate(states):
            root = work / f"state-{i}"
            power.put(disk.state(disk.applied(when, lost)), root)
            operations.relocate(root)
            scenarios.Log(work / "problems")(i, operations.check(root, wanted))
            shutil.rmtree(root)

    code = in_child(check)
    done = scenarios.Log.read(work / "problems")
    for i, found in done:
        problems += [f"{_describe(disk, states[i])}: {problem}" for problem in found]
    if code != 0:
        where = _describe(disk, states[len(done)])
        problems.append(f"{where}: the state cannot be looked at ({code})")
    return problems


def _describe(disk, state):
    when, lost, *_ = state
    call = disk.calls[when] if when < len(disk.calls) else "the end"
    shown = "; ".join(disk.calls[at] for at in lost[:20]) or "nothing"
    return f"cut at call {when} ({call}), lost {shown}"


if __name__ == "__main__":
    main()
