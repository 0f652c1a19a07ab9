"""Cuts the power in all sequences of operations.

python -m verification sequences                   all sequences of up to three
python -m verification sequences --longest 2       of up to two
python -m verification sequences --part 3/8        every eighth, from the third
python -m verification sequences --directory DIR   without states checked there before
python -m verification sequences save,pin,upload   these only
"""

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path

from tests.faults import shim
from tests.faults.process import MEMORY
from verification.sequences import operations
from verification.sequences.explore import explore

REPORTED_EVERY_SECS = 10


def main():
    arguments = parse()
    library = shim.build()
    if library is None:
        sys.exit("sequences need Linux and a C compiler")
    part, parts = (int(number) for number in arguments.part.split("/"))
    sequences = [tuple(each.split(",")) for each in arguments.sequences]
    sequences = sequences or [*operations.all_sequences(arguments.longest)]
    sequences = sequences[part - 1 :: parts]
    began = last = time.monotonic()

    def report(result):
        nonlocal last
        if time.monotonic() - last > REPORTED_EVERY_SECS:
            last = time.monotonic()
            show(f"{last - began:5.0f} s: {result} (of {len(sequences)})")

    with directory(arguments.directory) as found:
        result = explore(
            sequences, found, library, workers=arguments.workers, report=report
        )
    show(f"{time.monotonic() - began:5.0f} s: {result}", *result.problems)
    sys.exit(bool(result.problems))


def show(*lines):
    print(*lines, sep="\n", flush=True)  # noqa: T201


@contextlib.contextmanager
def directory(chosen):
    """The chosen directory, or a new one in memory."""
    if chosen is not None:
        chosen.mkdir(exist_ok=True)
        yield chosen
        return
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as found:
        yield Path(found)


def parse():
    parser = argparse.ArgumentParser(
        prog="python -m verification sequences",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sequences", nargs="*", help="names joined by commas")
    parser.add_argument("--longest", type=int, default=3)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
