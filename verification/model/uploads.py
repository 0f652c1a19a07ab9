"""The protocol of `NOT_UPLOADED`: no change of a step in staging is lost.

A step in staging is changed, uploaded to the target, and deleted from staging by
policies; another writer may save the step in the target. Versions count the changes;
the copy in the target is durable once it is synced. A process that was killed is not
started again: another process of the same kind takes its place.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from verification.model.engine import Actions, Event, Protocol, put

ASSUMPTIONS = {
    "one uploader": "the lock on a step admits one process that uploads it",
    "one change": "the lock of changes admits one process that changes a step, or"
    " removes"
    " its marker, at a time",
    "no kill": "no process is killed between the rename of a deletion and its second"
    " look",
    "new name": "a rename to a name that exists is refused",
}
RULES = {
    "marked save": "a step is saved to staging with the marker",
    "mark first": "a process writes the marker before it changes the step",
    "another change": "each change writes another text into the marker",
    "same marker": "the marker is removed only if its text is what it was before the"
    " copy",
    "all changes": "the marker is removed when the target has the step with all"
    " changes",
    "durable copy": "the marker is removed when the copy is durable",
    "kept": "a step with the marker is not deleted because of a policy",
    "deleter looks again": "who deletes a step looks for the marker again after the"
    " rename",
}
SOMEWHERE = "every change of the step is in staging or, durably, in the target"
MARKED = "a step in staging without the marker is in the target with all changes"
OTHERS = "no step of another writer is replaced"

OTHER = 9
"""The version of the step of another writer in the target."""

END = ("done", "dead")


class State(NamedTuple):
    """A state of the step and of the processes, which have the numbers from 1.

    Attributes:
        at: Where each process is, and a number that it remembers.
        near: The version in staging, from 1; 0 if there is none.
        mark: The text of the marker; 0 if there is none.
        aside: The version under a temporary name, of a deletion.
        far: The version in the target; 0 if there is none.
        durable: The durable version in the target.
        told: The last version whose change was reported.
        changer: The process that changes the step now.
        uploader: The process that uploads the step now.
        other: Whether another writer has saved the step in the target.
    """

    at: tuple[tuple[str, int], ...]
    near: int = 1
    mark: int = 1
    aside: int = 0
    far: int = 0
    durable: int = 0
    told: int = 1
    changer: int = 0
    uploader: int = 0
    other: bool = False


def _is_somewhere(state: State) -> bool:
    durable = 0 if state.durable == OTHER else state.durable
    return max(state.near, state.aside, durable) >= state.told


def _is_marked(state: State) -> bool:
    is_far = state.near <= state.durable < OTHER
    return not state.near or bool(state.mark) or is_far


INVARIANTS = {
    SOMEWHERE: _is_somewhere,
    MARKED: _is_marked,
    OTHERS: lambda state: not state.other or state.far == OTHER,
}


def protocol(*kinds: str, without: Collection[str] = ()) -> Protocol:
    """Returns the protocol of some processes, perhaps without rules or assumptions.

    Args:
        kinds: `uploader`, `changer`, `cleaner` or `writer`, for each process.
        without: Names in `RULES` and `ASSUMPTIONS`.
    """

    def actions(state: State) -> Actions:
        for me, (at, _) in enumerate(state.at, 1):
            if at in END:
                continue
            kind = kinds[me - 1]
            process = _Process(state, me, frozenset(without))
            for text, after in getattr(process, kind)(*state.at[me - 1]):
                yield Event(f"{kind} {me}", text), after
            is_brief = kind == "cleaner" and at not in ("start", "move")
            if not is_brief or "no kill" in without:
                yield (
                    Event("time", f"kills {me}"),
                    process.go("dead", **process.let_go()),
                )
        if state.aside and all(at in END for at, _ in state.at):
            yield Event("sweep", "removes the step"), state._replace(aside=0, mark=0)

    mark = 0 if "marked save" in without else 1
    return Protocol(State((("start", 0),) * len(kinds), mark=mark), actions, INVARIANTS)


Steps = Iterator[tuple[str, State]]


class _Process(NamedTuple):
    """A process in a state. A method for each kind yields what it may do next."""

    state: State
    me: int
    without: frozenset[str]

    def go(self, at: str, number: int = 0, **changes: object) -> State:
        where = put(self.state.at, self.me - 1, (at, number))
        return self.state._replace(at=where, **changes)

    def let_go(self) -> dict[str, object]:
        """Returns the changes of the state when the process releases its locks."""
        locks = {"changer": self.state.changer, "uploader": self.state.uploader}
        return {name: 0 for name, holder in locks.items() if holder == self.me}

    def is_free(self) -> bool:
        return not self.state.changer or "one change" in self.without

    def writer(self, at: str, number: int) -> Steps:
        if self.state.far:
            yield "is refused", self.go("done")
        else:
            changes = {"far": OTHER, "durable": OTHER, "other": True}
            yield "saves the step in the target", self.go("done", **changes)

    def changer(self, at: str, number: int) -> Steps:
        text = 1 if "another change" in self.without else 10 + self.me
        is_late = "mark first" in self.without
        if at == "start":
            if self.is_free() and self.state.near:
                goal = "change" if is_late else "mark"
                yield "locks changes", self.go(goal, changer=self.me)
        elif at == "tell":
            told = max(self.state.told, number)
            yield "reports the change", self.go("done", told=told, **self.let_go())
        elif not self.state.near:
            yield "finds no step", self.go("done", **self.let_go())
        elif at == "mark":
            goal = ("tell", number) if is_late else ("change", 0)
            yield "marks the step", self.go(*goal, mark=text)
        else:
            near = self.state.near + 1
            goal = ("mark" if is_late else "tell", near)
            yield "changes the step", self.go(*goal, near=near)

    def uploader(self, at: str, number: int) -> Steps:
        version, mark = divmod(number, 100)
        match at:
            case "start":
                is_free = not self.state.uploader or "one uploader" in self.without
                if is_free and self.state.near:
                    yield "locks the step", self.go("mark", uploader=self.me)
            case "mark" if self.is_free():
                goal = "lock" if "all changes" in self.without else "copy"
                if self.state.mark and self.state.near:
                    yield "reads the marker", self.go(goal, self.state.mark)
                else:
                    yield "finds no marker", self.go("done", **self.let_go())
            case "copy":
                if self.state.near:
                    number = 100 * self.state.near + mark
                    yield "reads the step", self.go("publish", number)
                else:
                    yield "finds no step", self.go("done", **self.let_go())
            case "publish":
                goal = "lock" if "durable copy" in self.without else "sync"
                if self.state.far == OTHER and "new name" not in self.without:
                    yield "is refused", self.go("done", **self.let_go())
                else:
                    yield "writes the copy", self.go(goal, mark, far=version)
            case "sync":
                durable = self.state.far
                yield "syncs the copy", self.go("lock", mark, durable=durable)
            case "lock" if self.is_free():
                yield "locks changes", self.go("compare", mark, changer=self.me)
            case "compare":
                if self.state.mark == mark or "same marker" in self.without:
                    yield "finds the same marker", self.go("unmark")
                else:
                    changes = {"changer": 0}
                    goal = ("copy", self.state.mark) if self.state.mark else ("done", 0)
                    changes = changes if self.state.mark else self.let_go()
                    yield "finds another marker", self.go(*goal, **changes)
            case "unmark":
                yield "removes the marker", self.go("done", mark=0, **self.let_go())

    def cleaner(self, at: str, number: int) -> Steps:
        is_kept = bool(self.state.mark) and "kept" not in self.without
        match at:
            case "start" if self.state.near:
                goal = "done" if is_kept else "move"
                yield "looks for the marker", self.go(goal)
            case "move" if self.state.near:
                goal = "remove" if "deleter looks again" in self.without else "look"
                yield "renames the step", self.go(goal, near=0, aside=self.state.near)
            case "look":
                yield (
                    "looks for the marker again",
                    self.go("undo" if is_kept else "remove"),
                )
            case "undo":
                yield (
                    "undoes the rename",
                    self.go("done", near=self.state.aside, aside=0),
                )
            case "remove":
                yield "removes the step", self.go("done", aside=0, mark=0)
