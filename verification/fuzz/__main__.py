"""Gives targets one changed input after another, and keeps those that they fail on.

    python -m verification fuzz [--secs N] [--seed N] [--guided] [--keep DIR] [TARGET…]

Without a target: all of them, each in a process of its own, as they may end it. Exit
status 1: something was found, and is in DIR. `--guided` is for long runs: atheris leads
the inputs to code that none has reached.
"""

import argparse
import faulthandler
import logging
import mmap
import random
import re
import resource
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

MEMORY = 2**30
"""Bytes by which a process may grow."""

HANG_SECS = 6
ADDRESS_SPACE = 4 * 2**30


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m verification fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--secs", type=float, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--guided", action="store_true")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"))
    options = parser.parse_args()
    options.keep.mkdir(parents=True, exist_ok=True)
    logging.disable()
    if len(options.targets) == 1:
        one = guided if options.guided else blind
        return one(options.targets[0], options)
    from verification.fuzz import targets

    failed = [
        name
        for name in options.targets or targets.TARGETS
        if subprocess.run(
            [sys.executable, "-m", "verification.fuzz", *arguments(options), name],
            check=False,
        ).returncode
    ]
    tell(f"found something in: {', '.join(failed)}" if failed else "found nothing")
    return int(bool(failed))


def arguments(options: argparse.Namespace) -> list[str]:
    given = [f"--secs={options.secs}", f"--seed={options.seed}"]
    return [*given, f"--keep={options.keep}", *["--guided"] * options.guided]


def blind(name: str, options: argparse.Namespace) -> int:
    """Without knowing what code is reached; what fails in a new way is changed on."""
    from verification.fuzz import targets

    target = targets.TARGETS[name]
    rng = random.Random(options.seed)
    pool = targets.seeds(name)
    last = Last(options.keep / f"{name}.last")
    for data in pool:  # also loads what is loaded once
        target.run(data)
    limit_memory()
    before = peak()
    known: set[str] = set()
    outcomes: set[str] = set()
    count = 0
    begun = time.monotonic()
    watched = -float(HANG_SECS)
    while (now := time.monotonic() - begun) < options.secs:
        if now - watched > 1:
            faulthandler.dump_traceback_later(HANG_SECS, exit=True)
            watched = now
        data = target.mutate(rng, rng.choice(pool), pool)
        last.note(data)
        targets.outcome = ""
        try:
            target.run(data)
        except BaseException as error:
            keep(error, data, name, options, known)
        if peak() - before > MEMORY:
            keep(MemoryError("it took much"), data, name, options, known)
            break
        said = re.sub(r"'[^']*'|[^a-z ]+", "", targets.outcome)[-60:]
        if said not in outcomes and len(pool) < 5000:
            outcomes.add(said)
            pool.append(data)
        count += 1
    faulthandler.cancel_dump_traceback_later()
    last.remove()
    tell(f"{name}: {count} inputs, {len(outcomes)} outcomes, {len(known)} found")
    return int(bool(known))


def guided(name: str, options: argparse.Namespace) -> int:
    import atheris

    with atheris.instrument_imports(include=["flaxckpt"]):
        from verification.fuzz import targets

    target = targets.TARGETS[name]
    found = options.keep / "corpus" / name
    found.mkdir(parents=True, exist_ok=True)
    known: set[str] = set()

    def run(data: bytes) -> None:
        try:
            target.run(data)
        except Exception as error:
            keep(error, data, name, options, known)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.3:
            return bytes(atheris.Mutate(data, max_size))
        return target.mutate(rng, data, pool)[:max_size]

    pool = targets.seeds(name)
    for data in pool:  # also loads what is loaded once
        target.run(data)
    atheris.Setup(
        [
            *("fuzz", str(found), str(targets.CORPUS / name), "-timeout=20"),
            *("-rss_limit_mb=1700", f"-max_total_time={int(options.secs)}"),
            *(f"-artifact_prefix={options.keep}/{name}-", "-max_len=16384"),
            *(f"-seed={options.seed + 1}", "-print_final_stats=1", "-verbosity=0"),
        ],
        run,
        custom_mutator=mutate,
    )
    atheris.Fuzz()
    return int(bool(known))


def keep(
    error: BaseException,
    data: bytes,
    name: str,
    options: argparse.Namespace,
    known: set[str],
) -> None:
    """Writes down an input that a target failed on, if it fails in a new way."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "flaxckpt" in frame.filename]
    where = f"{Path(ours[-1].filename).stem}.{ours[-1].name}" if ours else "nowhere"
    title = f"{name}-{type(error).__name__}-{where}"
    if title in known:
        return
    known.add(title)
    (options.keep / title).write_bytes(data)
    text = "".join(traceback.format_exception(error))[-3000:]
    (options.keep / f"{title}.txt").write_text(text)
    tell(f"found {title}\n{text}")


class Last:
    """The input that is being tried, in a file that stays if the process ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(bytes(2**16))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 2**16)

    def note(self, data: bytes) -> None:
        content = len(data).to_bytes(4, "little") + data[: 2**16 - 4]
        self._memory[: len(content)] = content

    def remove(self) -> None:
        self._path.unlink()


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def tell(text: Any) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
