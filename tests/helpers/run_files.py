"""Files beside the arrays of a run, as FORMAT.md describes them: markers, journal."""

import json
import time

import flaxckpt

PIN = "PINNED"
TEMPORARY = "TEMPORARY"
DAMAGED = "DAMAGED"
NOT_UPLOADED = "NOT_UPLOADED"
DATASET_DELETED = "DATASET_LET_GO"


def pin(step):
    """Pins the step at a path."""
    (step / PIN).write_bytes(b"1\n")


def is_pinned(step):
    """Returns True if the step at a path is pinned."""
    return (step / PIN).is_file()


def is_temporary(step):
    """Returns True if the step at a path is temporary."""
    return (step / TEMPORARY).is_file()


def mark_damaged(step, reason):
    """Marks the step at a path as damaged."""
    marker = {"reason": reason, "time": time.time()}
    (step / DAMAGED).write_text(json.dumps(marker))


def read_events(directory):
    """Returns the events in the journal of a run."""
    lines = (directory / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [flaxckpt.Event(**json.loads(line)) for line in lines]
