"""The result of failures: flaxckpt and Orbax in the same situations.

`docs/reliability.md` explains the cases and has the figures of one run.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.power import Disk
from benchmarks.victims import VICTIMS, Victim, is_state

Outcomes: TypeAlias = Iterator[str]

_TIMEOUT_SECS = 40.0
_LONGEST_LIFE_SECS = 1.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the cases as the command line asks."""
    options = _parser().parse_args(arguments)
    console = Console()
    rows: list[dict[str, object]] = []
    with _no_logging():
        for case in options.only or CASES:
            for name in options.contenders or VICTIMS:
                outcomes = _run(case, name, options)
                rows.append({"case": case, "contender": name, "outcomes": outcomes})
                console.print(case, name, outcomes)
    console.print(_table(rows))
    if options.json:
        here = machine.describe(Path(options.directory or tempfile.gettempdir()))
        data = {
            "machine": dataclasses.asdict(here),
            "rounds": options.rounds,
            "rows": rows,
        }
        options.json.write_text(json.dumps(data, indent=1, default=str) + "\n")


def _run(case: str, name: str, options: argparse.Namespace) -> dict[str, int]:
    """Counts the outcomes of a case."""
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        return dict(
            collections.Counter(CASES[case](name, Path(scratch), options.rounds))
        )


@contextlib.contextmanager
def _no_logging() -> Iterator[None]:
    """Logging is disabled in the block, because damage is expected."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reliability", description=__doc__
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=CASES, metavar="CASE", help=", ".join(CASES))
    add("--contenders", nargs="+", choices=VICTIMS, metavar="NAME")
    add("--rounds", type=int, default=20, help="rounds of each case (default: 20)")
    add(
        "--directory",
        type=Path,
        help="parent of the runs (default: a temporary directory)",
    )
    add("--json", type=Path, metavar="FILE", help="write the results")
    return parser


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("case", "contender", "outcome", "times")
    for row in rows:
        for outcome, times in sorted(row["outcomes"].items()):
            table.add_row(row["case"], row["contender"], outcome, str(times))
    return table


# ---- damage ---------------------------------------------------------------------


def _two_steps(name: str, root: Path) -> Path:
    """Creates a run with steps 1 and 2."""
    victim = VICTIMS[name](root / "run")
    for step in (1, 2):
        victim.save(step)
        victim.wait()
    victim.close()
    return root / "run"


def _choose_file(step: Path, chance: random.Random) -> Path:
    """Chooses a file of a step, with a probability in proportion to its size."""
    files = [p for p in sorted(step.rglob("*")) if p.is_file()]
    return chance.choices(files, [file.stat().st_size for file in files])[0]


def _flip(file: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def _truncate(file: Path, chance: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: chance.randrange(len(content))])


def _remove(file: Path, chance: random.Random) -> None:
    del chance
    file.unlink()


def _restore(name: str, run: Path, step: int | None) -> str:
    """Restores a step and describes the result in a few words."""
    victim = VICTIMS[name](run)
    try:
        restored = victim.restore(step)
        number = int(restored["step"])
        if number not in (1, 2) or not is_state(restored, number):
            return "wrong values without an error"
        return "the newest, exactly" if number == 2 else "the step before, exactly"
    except Exception:
        return "an error"
    finally:
        victim.close()


def flips(name: str, root: Path, rounds: int) -> Outcomes:
    """Flips one bit of the newest step, and restores exactly this step."""
    yield from _restore_damaged(name, root, rounds, [_flip], step=2)


def newest_damaged(name: str, root: Path, rounds: int) -> Outcomes:
    """Truncates or deletes a file of the newest step, and restores the newest."""
    yield from _restore_damaged(name, root, rounds, [_truncate, _remove], step=None)


def _restore_damaged(
    name: str,
    root: Path,
    rounds: int,
    changes: Sequence[Callable[[Path, random.Random], None]],
    step: int | None,
) -> Outcomes:
    run, chance = _two_steps(name, root), random.Random(f"{len(changes)}")
    work = root / "work"
    for n in range(rounds):
        shutil.copytree(run, work)
        changes[n % len(changes)](_choose_file(work / "2", chance), chance)
        yield _restore(name, work, step)
        shutil.rmtree(work)


# ---- kills ----------------------------------------------------------------------


def _start(name: str, run: Path, saves: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.victims", name, str(run), str(saves)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def kills(name: str, root: Path, rounds: int) -> Outcomes:
    """Kills a run at a random moment while it saves and deletes steps."""
    yield from _kill(name, root, rounds, _await_some_time)


def kills_in_deletion(name: str, root: Path, rounds: int) -> Outcomes:
    """Kills a run as soon as a part of an old step is deleted."""
    yield from _kill(name, root, rounds, _await_deletion)


def _kill(
    name: str,
    root: Path,
    rounds: int,
    await_moment: Callable[[Path, random.Random], None],
) -> Outcomes:
    chance = random.Random(name)
    for n in range(rounds):
        run = root / str(n)
        process = _start(name, run, 10**6)
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(2)]
        await_moment(run, chance)
        process.kill()
        acknowledged += [int(line) for line in process.communicate()[0].split()]
        yield _inspect(name, run, acknowledged[-1])


def _await_some_time(run: Path, chance: random.Random) -> None:
    time.sleep(chance.uniform(0, _LONGEST_LIFE_SECS))


def _await_deletion(run: Path, chance: random.Random) -> None:
    """Returns when the oldest step, or a file of it, is deleted."""
    del chance
    steps = sorted(int(path.name) for path in run.iterdir() if path.name.isdigit())
    oldest = run / str(steps[0])
    before = _count(oldest)
    end = time.monotonic() + _TIMEOUT_SECS
    while _count(oldest) >= before and time.monotonic() < end:
        pass


def _count(step: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(step))


def _inspect(name: str, run: Path, acknowledged: int) -> str:
    """Describes the remains of a run with an acknowledged step in a few words."""
    try:
        victim = VICTIMS[name](run)
        listed = victim.steps()
        broken = [step for step in listed if not _is_exact(victim, step)]
        victim.close()
    except Exception:
        return "the run cannot be opened"
    if not any(step >= acknowledged for step in listed if step not in broken):
        return "the acknowledged step is lost"
    return "a listed step cannot be read" if broken else "all listed steps are exact"


def _is_exact(victim: Victim, step: int) -> bool:
    try:
        return is_state(victim.restore(step), step)
    except Exception:
        return False


def exits(name: str, root: Path, rounds: int) -> Outcomes:
    """Runs a program that saves once and ends, without waiting or closing."""
    for n in range(rounds):
        run = root / str(n)
        process = _start(name, run, 1)
        try:
            process.communicate(timeout=_TIMEOUT_SECS)
            code = str(process.returncode)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            code = "none, it hangs"
        saved = _inspect(name, run, 1) == "all listed steps are exact"
        yield f"exit code {code}, the step is {'there' if saved else 'not there'}"


# ---- power ----------------------------------------------------------------------


def power_cuts(name: str, root: Path, rounds: int) -> Outcomes:
    """Cuts the power at once or seconds after a step was acknowledged; ext4."""
    delays = (0.0, 1.0, 6.0, 12.0)
    for n in range(rounds):
        directory = root / str(n)
        directory.mkdir()
        disk = Disk(directory, "ext4")
        try:
            if obstacle := disk.make():
                yield f"skipped: {obstacle}"
                return
            run = disk.mount_point / "run"
            process = _start(name, run, 3)
            assert process.stdout is not None
            acknowledged = [int(process.stdout.readline()) for _ in range(3)]
            time.sleep(delays[n % len(delays)])
            disk.cut()
            process.kill()
            process.communicate()
            disk.restart()
            yield _inspect(name, run, acknowledged[-1])
        finally:
            disk.close()


CASES = {
    "flips": flips,
    "newest damaged": newest_damaged,
    "kills": kills,
    "kills in deletion": kills_in_deletion,
    "exits": exits,
    "power cuts": power_cuts,
}

if __name__ == "__main__":
    main()
