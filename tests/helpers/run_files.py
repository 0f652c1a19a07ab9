"""Files beside the arrays of a run, as FORMAT.md describes them: markers, journal."""

import contextlib
import fcntl
import json
import os
import time

import flaxckpt

PIN = "PINNED"
TEMPORARY = "TEMPORARY"
DAMAGED = "DAMAGED"
NOT_UPLOADED = "NOT_UPLOADED"
DATASET_DELETED = "DATASET_LET_GO"
DELETING = "DELETING"
READING = "READING-"
"""How the names of leases begin."""

COMMITTED = "commit_success.txt"
LOCK = ".orbax-checkpoint-tmp-writing"
"""How the name of a lock on a checkpoint in an object store ends."""


def pin(step):
    """Pins the step at a path."""
    (step / PIN).write_bytes(b"1\n")


def is_pinned(step):
    """Returns True if the step at a path is pinned."""
    return (step / PIN).is_file()


def is_temporary(step):
    """Returns True if the step at a path is temporary."""
    return (step / TEMPORARY).is_file()


def add_lease(step, reader="there-7"):
    """Has a process read the step at a path; returns the lease."""
    lease = step / f"{READING}{reader}-0123abcd"
    lease.touch()
    return lease


def announce_deletion(step):
    """Has a process begin to delete the step at a path in a store; returns the mark."""
    mark = step / DELETING
    mark.write_text(json.dumps({"time": time.time()}))
    return mark


def mark_damaged(step, reason):
    """Marks the step at a path as damaged."""
    marker = {"reason": reason, "time": time.time()}
    (step / DAMAGED).write_text(json.dumps(marker))


@contextlib.contextmanager
def locked(directory):
    """A process works with the directory in the block."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def read_events(directory):
    """Returns the events in the journal of a run.

    A line is empty if its writer saw half of another thread's line.
    """
    lines = (directory / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [flaxckpt.Event(**json.loads(line)) for line in lines if line]
