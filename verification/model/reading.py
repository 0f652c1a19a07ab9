"""The protocol of `READING-…` and `DELETING`: no step is deleted while it is read.

Readers read one step, deleters delete it, each once; what a dead deleter leaves is
swept. In a directory, a deletion renames the step and then removes its files, and the
files of both kinds move with it. In a store, it removes the commit marker and then the
objects, and a lock admits one deleter at a time. The clock is abstract: a file expires
when 60 s pass.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from verification.model.engine import Actions, Event, Protocol, put

ASSUMPTIONS = {
    "fresh listings": "who has made a file in a directory and lists it then sees every"
    " file"
    " that was made there before, and the name of the directory",
    "one clock": "the times of files are from the clock by which they expire",
    "awake readers": "a reader renews its lease within 60 s",
    "quick deletions": "a deletion goes on to remove the name of the step within 60 s",
}
RULES = {
    "lease": "a reader makes a lease",
    "reader looks": "a reader looks for a deletion after it has made its lease",
    "step": "a reader looks for the step after it has made its lease",
    "announcement": "a deleter makes its file before it looks for readers",
    "deleter looks": "a deleter looks for readers after it has made its file",
    "deleter looks again": "a deleter looks for readers again before it removes files",
    "sweep looks": "who removes what a dead deleter has left looks for readers",
}
FILES = "no file of a step is removed while the step is read"
NAME = "a step has its name while it is read"

THERE, GONE = 0, -1
END = ("done", "dead")


class State(NamedTuple):
    """A state of the step and of the processes, which have the numbers from 1.

    Attributes:
        at: Where each process is.
        place: `THERE`, `GONE`, or the deleter that has removed the name of the step.
        leases: The readers whose leases have not expired.
        is_announced: Whether `DELETING` exists, and has not expired.
    """

    at: tuple[str, ...]
    place: int = THERE
    leases: frozenset[int] = frozenset()
    is_announced: bool = False


def _is_read(state: State) -> bool:
    return "read" in state.at


INVARIANTS = {
    FILES: lambda state: not _is_read(state) or state.place != GONE,
    NAME: lambda state: not _is_read(state) or state.place == THERE,
}


def protocol(*kinds: str, in_store: bool, without: Collection[str] = ()) -> Protocol:
    """Returns the protocol of some processes, perhaps without rules or assumptions.

    Args:
        kinds: `reader` or `deleter`, for each process.
        in_store: Whether the step is in a store.
        without: Names in `RULES` and `ASSUMPTIONS`.
    """
    # Of two deleters in a directory, each may remove the file of the other: a reader
    # that comes then may see the step vanish for a moment.
    is_exclusive = in_store or kinds.count("deleter") == 1
    invariants = INVARIANTS if is_exclusive else {FILES: INVARIANTS[FILES]}

    def actions(state: State) -> Actions:
        at_deleters = [
            at for at, kind in zip(state.at, kinds, strict=True) if kind == "deleter"
        ]
        is_deleting = any(at not in ("start", *END) for at in at_deleters)
        is_locked = in_store and (is_deleting or state.place not in (THERE, GONE))
        for me, at in enumerate(state.at, 1):
            if at in END:
                continue
            if kinds[me - 1] == "reader":
                steps = _read(state, me, at, in_store, without)
            elif at == "start" and is_locked:
                continue
            else:
                steps = _delete(state, me, at, without)
            for text, goal, changes in steps:
                after = state._replace(at=put(state.at, me - 1, goal), **changes)
                yield Event(f"{kinds[me - 1]} {me}", text), after
            dead = state._replace(at=put(state.at, me - 1, "dead"))
            yield Event("time", f"kills {me}"), dead
        if state.is_announced and not (
            is_deleting and "quick deletions" not in without
        ):
            after = state._replace(is_announced=False)
            yield Event("time", "expires the deletion"), after
        yield from _environment(state, without)

    at = tuple("look before" if kind == "reader" else "start" for kind in kinds)
    return Protocol(State(at), actions, invariants)


def _environment(state: State, without: Collection[str]) -> Actions:
    for reader in state.leases:
        if state.at[reader - 1] == "dead" or "awake readers" in without:
            after = state._replace(leases=state.leases - {reader})
            yield Event("time", f"expires the lease of {reader}"), after
    is_left = state.place not in (THERE, GONE) and state.at[state.place - 1] == "dead"
    if is_left and ("sweep looks" in without or not state.leases):
        after = state._replace(place=GONE, is_announced=False)
        yield Event("sweep", "removes the files"), after


Steps = Iterator[tuple[str, str, dict[str, object]]]
"""What a process may do, where it is then, and the changes of the state."""


def _read(
    state: State, me: int, at: str, in_store: bool, without: Collection[str]
) -> Steps:
    is_there = state.place == THERE
    match at:
        case "look before":
            yield (
                ("opens the step", "lease", {})
                if is_there
                else ("finds no step", "done", {})
            )
        case "lease":
            goal = "read" if "reader looks" in without else "look"
            if "lease" in without:
                yield "makes no lease", goal, {}
            elif state.place != GONE or in_store:
                yield "makes its lease", goal, {"leases": state.leases | {me}}
            else:
                yield "finds no step", "done", {}
        case "look":
            goal = "read" if "step" in without else "look for the step"
            is_seen = state.is_announced and is_there
            if not is_seen or "fresh listings" in without:
                yield "sees no deletion", goal, {}
            if is_seen:
                yield "sees a deletion", "release", {}
        case "look for the step":
            if is_there or "fresh listings" in without:
                yield "sees the step", "read", {}
            if not is_there:
                yield "sees no step", "release", {}
        case "read":
            yield "has read the step", "release", {}
        case "release":
            yield "removes its lease", "done", {"leases": state.leases - {me}}


def _delete(state: State, me: int, at: str, without: Collection[str]) -> Steps:
    readers = state.leases
    is_there = state.place == THERE
    match at:
        case "start":
            if not is_there:
                yield "finds no step", "done", {}
            elif "announcement" in without:
                yield "announces nothing", "look", {}
            else:
                goal = "move" if "deleter looks" in without else "look"
                yield "announces the deletion", goal, {"is_announced": True}
        case "look" | "look again":
            is_blind = bool({"fresh listings", "one clock"} & {*without})
            if readers:
                yield "finds a reader", "retract" if at == "look" else "undo", {}
            if not readers or is_blind:
                yield "finds no reader", "move" if at == "look" else "remove", {}
        case "move":
            goal = "remove" if "deleter looks again" in without else "look again"
            if is_there:
                yield "removes the name", goal, {"place": me}
            else:
                yield "finds no step", "done", {}
        case "undo":
            yield "restores the name", "retract", {"place": THERE}
        case "retract":
            yield (
                "retracts the deletion",
                "done",
                {"is_announced": False} if is_there else {},
            )
        case "remove":
            yield "removes the files", "done", {"place": GONE, "is_announced": False}
