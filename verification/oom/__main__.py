"""Has the allocations of every operation fail.

python -m verification oom               of Python's allocations, every 50th
python -m verification oom --every 1     every allocation: hours
python -m verification oom Reads         of one operation
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.process import MEMORY
from verification.oom import shim
from verification.oom.explore import OPERATIONS, explore

REPORTED_EVERY_SECS = 10


def main():
    arguments = parse()
    library = shim.build()
    if library is None:
        sys.exit("failing allocations need Linux and a C compiler")
    began = last = time.monotonic()

    def report(result):
        nonlocal last
        if time.monotonic() - last > REPORTED_EVERY_SECS:
            last = time.monotonic()
            show(f"{last - began:5.0f} s: {result}")

    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as found:
        result = explore(
            arguments.operations or OPERATIONS,
            Path(found),
            library,
            workers=arguments.workers,
            first=arguments.first,
            every=arguments.every,
            report=report,
        )
    show(*(f"{count:6} {' / '.join(key)}" for key, count in result.outcomes.items()))
    show(*result.strange)
    show(f"{time.monotonic() - began:5.0f} s: {result}", *result.problems)
    sys.exit(bool(result.problems))


def show(*lines):
    print(*lines, sep="\n", flush=True)  # noqa: T201


def parse():
    parser = argparse.ArgumentParser(
        prog="python -m verification oom",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("operations", nargs="*", help=", ".join(OPERATIONS))
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
