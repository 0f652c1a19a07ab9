"""Kills real processes at random, with their local directories and copies.

python -m verification kills                  200 kills
python -m verification kills --rounds 20 --first 100

Each round starts a job of 2 to 6 processes, which restores and saves until its end.
Before the next, machines may be lost with their disks, files damaged, disks swapped; in
half of the runs, the run directory loses its steps, too. A step is lost if it was
acknowledged and its machines are there, or was copied and no more machines are lost
than it has copies; and neither it nor a newer one is restored.
"""

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from tests.helpers.files import free_port
from verification.kills import worker

MACHINES = 6
START_SECS = 180.0


class Outcome(NamedTuple):
    """What a job has said until it was killed.

    Attributes:
        restored: The step; None if it was killed before.
        started: The newest save begun.
        acknowledged: The newest save acknowledged.
        copied: The newest save copied.
        far: Bytes that were read from the run directory.
        failure: The error of a process that was not killed, or None.
    """

    restored: int | None
    started: int
    acknowledged: int
    copied: int
    far: int
    failure: str | None


class Run:
    """A run whose jobs are killed.

    Args:
        root: A directory for all.
        seed: What the random choices follow from.
    """

    def __init__(self, root, seed):
        self.root = root
        self.chance = random.Random(seed)
        self.uploads = self.chance.random() < 0.5
        self.known = 0  # acknowledged in the job before
        self.copied = 0
        self.started = 0
        self.disks = []
        self.copies = 0
        self.jobs = 0

    def round(self):
        """Starts a job and kills it; returns what was wrong, and what happened."""
        chance, lost = self.chance, 0
        count = chance.randint(2, MACHINES)
        if self.disks and chance.random() < 0.6:
            count = len(self.disks)
        events = []
        for disk in self.disks:
            if chance.random() < 0.2:
                shutil.rmtree(disk, ignore_errors=True)
                events.append(f"lost {disk.name}")
            elif chance.random() < 0.1 and (file := self._damage(disk)):
                events.append(f"damaged {file}")
        bad = {event.split()[1].partition("/")[0] for event in events}
        disks = [*self.disks]
        chance.shuffle(disks)
        disks = disks[:count]
        bad |= {disk.name for disk in self.disks if disk not in disks}
        lost = len(bad)
        while len(disks) < count:  # new machines
            self.jobs += 1
            disks.append(self.root / f"disk-{self.jobs}")
        if not self.uploads:
            for step in self.root.glob("run/[0-9]*"):
                shutil.rmtree(step)
        far = self._steps_of_run()
        least = max([0, *far])
        if lost == 0:
            least = max(least, self.known)
        if lost <= self.copies:
            least = max(least, self.copied)
        copies = chance.randint(0, 2)
        said = _run_job(disks, self.root / "run", copies, chance)
        text = (
            f"{count} processes, {copies} copies, {', '.join(events) or 'all whole'},"
            f" {'uploads' if self.uploads else 'no uploads'},"
            f" {lost} gone: at least {least} of {self.started},"
            f" {said._replace(failure=None)}"
        )
        problem = None
        if said.failure is not None:
            problem = f"failed: {said.failure}"
        elif said.restored is not None and not least <= said.restored <= self.started:
            problem = "lost" if said.restored < least else "wrong"
        if said.restored is not None:
            self.known = max(said.acknowledged, said.restored)
            # A job without copies makes none of what it has restored.
            self.copied, self.copies = said.copied, min(copies, count - 1)
            self.started = max(said.started, said.restored)
        else:
            self.copied = 0
            self.known = min(self.known, least)
        self.disks = disks
        return problem, text

    def _damage(self, disk):
        files = [p for p in disk.glob("*/state/**/*") if p.is_file()]
        if not files:
            return None
        file = self.chance.choice(sorted(files))
        content = bytearray(file.read_bytes())
        if content:
            content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(
                8
            )
            file.write_bytes(content)
        return file.relative_to(self.root)

    def _steps_of_run(self):
        return [
            int(p.parent.name)
            for p in self.root.glob("run/*/commit_success.txt")
            if p.parent.name.isdecimal()
        ]


def _run_job(disks, run_directory, copies, chance):
    """Runs a job in forks of this process, and kills it."""
    port, seed = free_port(), chance.random()
    pids, ends = [], []
    for rank in range(len(disks)):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                os.dup2(write, 1)
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 2)
                worker.run(rank, disks, run_directory, port, copies, seed)
            finally:
                os._exit(1)
        os.close(write)
        pids.append(pid)
        ends.append(read)
    texts = [b"" for _ in ends]
    is_early = chance.random() < 0.15  # before the restore has ended
    deadline = time.monotonic() + (chance.uniform(1, 4) if is_early else START_SECS)
    is_going = False
    try:
        while (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select(ends, [], [], left)
            closed = False
            for end in ready:
                part = os.read(end, 2**16)
                texts[ends.index(end)] += part
                closed |= not part
            if closed or any(b"failed" in text for text in texts):
                break
            if not is_going and all(b"restored" in text for text in texts):
                is_going = True
                deadline = time.monotonic() + chance.uniform(0, 3)
    finally:
        order = [*range(len(pids))]
        chance.shuffle(order)
        for number, rank in enumerate(order):
            os.kill(pids[rank], signal.SIGKILL)
            if number == 0:
                time.sleep(chance.choice([0, 0, 0.3]))
        for pid in pids:
            os.waitpid(pid, 0)
    for number, end in enumerate(ends):
        while part := os.read(end, 2**16):
            texts[number] += part
        os.close(end)
    was_late = not is_going and not is_early
    return _read(texts, was_late)


def _read(texts, was_late):
    rows = [[line.split(" ", 1) for line in t.decode().splitlines()] for t in texts]

    def newest(word):
        return max(
            (int(row[1].split()[0]) for r in rows for row in r if row[0] == word),
            default=0,
        )

    restored = [
        int(row[1].split()[0]) for r in rows for row in r if row[0] == "restored"
    ]
    far = [int(row[1].split()[1]) for r in rows for row in r if row[0] == "restored"]
    failures = [json.loads(row[1]) for r in rows for row in r if row[0] == "failed"]
    failure = None
    if len({*restored}) > 1:
        failure = f"different steps were restored: {restored}"
    elif failures:
        failure = "\n".join(failures)
    elif was_late:
        failure = f"not restored after {START_SECS} s"
    return Outcome(
        restored[0] if restored else None,
        newest("started"),
        newest("acknowledged"),
        newest("copied"),
        sum(far),
        failure,
    )


def main():
    parser = argparse.ArgumentParser(
        prog="python -m verification kills",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--of-a-run", type=int, default=10, help="kills of each run")
    arguments = parser.parse_args()
    problems, done, begun = 0, 0, time.monotonic()
    seed = arguments.first
    while done < arguments.rounds:
        with tempfile.TemporaryDirectory() as found:
            run = Run(Path(found), seed)
            for number in range(min(arguments.of_a_run, arguments.rounds - done)):
                try:
                    problem, text = run.round()
                except OSError:
                    problem, text = traceback.format_exc(), ""
                done += 1
                _show(f"{time.monotonic() - begun:6.0f} s  run {seed}.{number}: {text}")
                if problem is not None:
                    problems += 1
                    _show(f"run {seed}.{number}: {problem}")
                    break
        seed += 1
    _show(f"{done} kills, {problems} problems")
    sys.exit(bool(problems))


def _show(text):
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
