"""Mounts each file system, and runs the tests of the run directory there."""

import argparse
import contextlib
import fcntl
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import ROOT
from tests.helpers import seams
from verification.filesystems import mounts

TWO_MOUNTS = "verification/filesystems/test_two_mounts.py"
ON_ONE_MOUNT = (
    "tests/run/test_checkpointer.py",
    "tests/run/test_retention.py",
    "tests/run/test_watch.py",
    "tests/checkpoint/test_overwrite.py",
    "tests/faults/test_deletion.py",
    "tests/storage/test_local.py",
)
IF_LOCAL = ("tests/faults/test_unfinished.py",)
SWEPT_AT_ONCE = ("a_leftover_of_a_crash", "cut_off_deletion", "let_go_entirely")
"""Tests of local file systems: elsewhere, leftovers go by their age, minutes later."""


def main():
    parser = argparse.ArgumentParser(prog="python -m verification filesystems")
    parser.add_argument("kinds", nargs="*", default=list(mounts.KINDS))
    parser.add_argument("--two-mounts-only", action="store_true")
    parser.add_argument("--pytest-args", default="-n 2")
    options = parser.parse_args()
    if os.geteuid() != 0:
        say("skipped: mounting file systems needs root")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unmounts on the way
    failed = []
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as directory:
            try:
                with mounts.KINDS[kind](Path(directory)) as (first, second):
                    say(f"==> {kind}: {', '.join(properties(first, second))}")
                    if not passes(first, second, options):
                        failed.append(kind)
            except mounts.UnavailableError as error:
                say(f"==> {kind}: not here: {error}")
    say(f"failed on: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


def passes(first, second, options):
    """Runs the tests on a file system; returns True if all pass."""
    is_local = seams.current("filesystem.is_local")(first)
    env = {**os.environ, "FLAXCKPT_TWO_MOUNTS": f"{first}:{second}"}
    runs = [[TWO_MOUNTS, "-p", "no:cacheprovider"]]
    if not options.two_mounts_only:
        chosen = [*ON_ONE_MOUNT, *(IF_LOCAL if is_local else ())]
        runs.append([*chosen, *options.pytest_args.split()])
    passed = True
    left_out = ["moto", "seaweed", *(() if is_local else SWEPT_AT_ONCE)]
    names = " and ".join(f"not {name}" for name in left_out)
    for arguments in runs:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow"]
        command += ["-k", names, f"--basetemp={first}/pytest"]
        done = subprocess.run([*command, *arguments], cwd=ROOT, env=env, check=False)
        passed = passed and done.returncode == 0
    return passed


def properties(first, second):
    """Yields what the file system can do, as flaxckpt needs it."""
    kind, is_local, exchange = map(
        seams.current,
        ("filesystem.kind", "filesystem.is_local", "rename.exchange_atomically"),
    )
    yield f"{kind(os.fspath(first))}, " + ("local" if is_local(first) else "shared")
    yield "locks hold " + ("for both mounts" if locks(first, second) else "for one")
    (first / "a").mkdir()
    (first / "b").mkdir()
    is_atomic = exchange(first / "a", first / "b")
    yield "exchange is " + ("atomic" if is_atomic else "three renames")
    with contextlib.suppress(OSError):
        (first / "a/x").write_bytes(bytes(4096))
        (first / "b/x").hardlink_to(first / "a/x")
    yield "hard links" if (first / "b/x").exists() else "no hard links"
    yield "maps" if can_map(first / "a/x") else "no maps"
    if (first / "A").exists():
        yield "names without case"


def locks(first, second):
    """Returns True if a lock through one mount excludes one through the other."""
    (first / "lock").mkdir()
    list(second.iterdir())  # an NFS client may have cached that it is empty
    with opened(first / "lock") as one, opened(second / "lock") as two:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@contextlib.contextmanager
def opened(path):
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def can_map(path):
    with path.open("rb") as file, contextlib.suppress(OSError):
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).close()
        return True
    return False


def say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
