"""The protocol of commit markers and locks in object stores.

Processes save, overwrite, delete or sweep one step, each once. The step has two
objects, `data` and `manifest`, and its commit marker; the value of an object is the
process that wrote it. The clock is abstract: a lock becomes old when 45 s pass without
its renewal. Some processes know at once that the holder of a lock is dead; then its
requests may still arrive until these 45 s have passed.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from verification.model.engine import Actions, Event, Protocol, put

ASSUMPTIONS = {
    "conditions": "the store creates an object only if there is none, and replaces it"
    " only"
    " if it is unchanged",
    "fresh reads": "a read or a listing shows every change that was answered before it",
    "prompt removals": "a removal arrives within 45 s of the renewal of the lock before"
    " it, or never",
    "prompt marker": "so does the commit marker",
    "prompt data": "so does each other object",
}
RULES = {
    "lock": "a lock is created only if there is none",
    "unchanged lock": "a lock is taken over only if it is still the same",
    "marker last": "the commit marker is written last",
    "marker first": "the commit marker is removed first",
    "create": "an object of a new checkpoint is created only if it does not exist",
    "renew to replace": "an object that exists is replaced only if it is unchanged"
    " since a"
    " renewal of the lock",
    "renew to commit": "the lock is renewed right before the commit marker is written",
    "renew to report": "the lock is renewed after the commit and before its report",
    "renew to remove": "the lock is renewed right before objects are removed",
    "wait": "a lock that was taken over from a dead process before it was old is kept"
    " until its requests have arrived",
    "clean": "after a take-over, objects without a commit marker are removed",
}
WHOLE = "a listed step is whole"
REPORTED = "a step that is reported as saved was committed"
KEPT = "a committed step stays until it is overwritten or deleted"
CLEAN = "nothing is left of abandoned saves and deletions"

NONE, OLD = 0, 9
AWAITED, ARRIVED = 1, 2
MARKER = 2
NAMES = ("data", "the manifest", "the marker")
END = ("done", "dead")


class State(NamedTuple):
    """A state of the store and of the processes, which have the numbers from 1.

    Attributes:
        at: Where each process is, and a number that it remembers.
        objects: The writers of the data, the manifest and the commit marker.
        kept: The writer of the committed step.
        lock: The holder of the lock.
        is_old: Whether the lock was not renewed for 45 s.
        is_free: Whether the holder has released the lock, which is only kept.
        until: Whether requests of dead holders before may still arrive (`AWAITED`), or
            could when the lock was taken over (`ARRIVED`).
        late: Requests of dead processes that may still arrive: (object, writer, whether
            the writer had the lock).
        has_strays: Whether an object was created without the lock.
        committed: The processes that committed a step.
        reported: The processes that reported it.
    """

    at: tuple[tuple[str, int], ...]
    objects: tuple[int, int, int]
    kept: int
    lock: int = NONE
    is_old: bool = False
    is_free: bool = False
    until: int = NONE
    late: frozenset[tuple[int, int, bool]] = frozenset()
    has_strays: bool = False
    committed: frozenset[int] = frozenset()
    reported: frozenset[int] = frozenset()


def _is_whole(state: State) -> bool:
    data, manifest, marker = state.objects
    return not marker or not (data or manifest) or data == manifest == marker


def _is_clean(state: State) -> bool:
    is_idle = not state.lock and all(name in END for name, _ in state.at)
    is_left = any(state.objects[:MARKER]) and not state.objects[MARKER]
    return not (is_idle and is_left) or state.has_strays


INVARIANTS = {
    WHOLE: _is_whole,
    REPORTED: lambda state: state.reported <= state.committed,
    KEPT: lambda state: not state.kept or state.objects == (state.kept,) * 3,
    CLEAN: _is_clean,
}


def protocol(
    *operations: str, has_step: bool = False, without: Collection[str] = ()
) -> Protocol:
    """Returns the protocol of some operations, perhaps without rules or assumptions.

    Args:
        operations: `save`, `overwrite`, `delete` or `sweep`, for each process.
        has_step: Whether there is a step at the beginning.
        without: Names in `RULES` and `ASSUMPTIONS`.
    """
    old = OLD if has_step else NONE
    initial = State((("start", 0),) * len(operations), (old,) * 3, old)
    if "conditions" in without:
        without = {*without, "lock", "unchanged lock", "create"}

    def actions(state: State) -> Actions:
        for me, (name, _) in enumerate(state.at, 1):
            if name in END:
                continue
            actor = f"{operations[me - 1]} {me}"
            for text, after in _Process(state, me, operations[me - 1], without).act():
                yield Event(actor, text), after
            yield from _kill(state, me, without)
        if state.lock and not state.is_old and not _is_prompt(state, without):
            yield Event("time", "passes"), _settle(state, without)._replace(is_old=True)
        if state.until == AWAITED:
            yield Event("time", "passes for the dead"), _settle(state, without)
        for which, writer, had_lock in state.late:
            late = state._replace(late=state.late - {(which, writer, had_lock)})
            if "create" in without or not state.objects[which]:
                objects = put(state.objects, which, writer)
                has_strays = state.has_strays or not had_lock
                late = late._replace(objects=objects, has_strays=has_strays)
            yield Event("network", f"delivers {NAMES[which]} of {writer}"), late

    return Protocol(initial, actions, INVARIANTS)


def _kill(state: State, me: int, without: Collection[str]) -> Actions:
    name, which = state.at[me - 1]
    dead = state._replace(at=put(state.at, me - 1, ("dead", 0)))
    yield Event("time", f"kills {me}"), dead
    if name == "write" and (which != MARKER or "prompt marker" in without):
        had_lock = which != MARKER and state.lock == me and not state.is_old
        late = dead._replace(late=state.late | {(which, me, had_lock)})
        yield Event("time", f"kills {me} during a request"), late


def _settle(state: State, without: Collection[str]) -> State:
    """Lets the time pass in which requests of dead holders may arrive."""
    until = ARRIVED if state.until else NONE
    if "prompt data" in without:
        return state._replace(until=until)
    late = frozenset(request for request in state.late if not request[-1])
    return state._replace(until=until, late=late)


def _is_prompt(state: State, without: Collection[str]) -> bool:
    """Returns True if the holder has a request under way that must arrive in time."""
    name, which = state.at[state.lock - 1]
    if name in ("unmark", "remove"):
        return "prompt removals" not in without
    return (name, which) == ("write", MARKER) and "prompt marker" not in without


Steps = Iterator[tuple[str, State]]


class _Process(NamedTuple):
    """A process in a state; see `act`."""

    state: State
    me: int
    operation: str
    without: Collection[str]

    def go(self, name: str, number: int = 0, **changes: object) -> State:
        at = put(self.state.at, self.me - 1, (name, number))
        return self.state._replace(at=at, **changes)

    def act(self) -> Steps:
        """Yields what the process may do next, and the state after it."""
        name, number = self.state.at[self.me - 1]
        match name:
            case "start":
                yield from self.acquire()
            case "heir":
                yield from self.take_over(number)
            case "look":
                yield from self.look(is_heir=bool(number))
            case "unmark":
                yield from self.unmark(number)
            case "remove":
                yield from self.remove(number)
            case "write":
                yield from self.write(number)
            case "replace":
                yield from self.replace(*divmod(number, 10))
            case "release":
                yield from self.release()
            case "leave":
                yield from self.leave()
            case _:  # "renew to …"
                yield from self.renew(name, number)

    def acquire(self) -> Steps:
        if self.operation != "sweep":
            if not self.state.lock or "lock" in self.without:
                yield "creates the lock", self.go("look", **self.lock())
            if self.state.lock:
                yield "is refused the lock", self.go("done")
        if self.is_unused():
            seen = 2 * self.state.lock + self.state.is_free
            yield "finds the lock unused", self.go("heir", seen)

    def is_unused(self) -> bool:
        """Returns True if the process may take over the lock."""
        state = self.state
        if not state.lock or state.is_old:
            return state.is_old
        if state.is_free:
            return self.operation != "sweep" or state.until == ARRIVED
        return state.at[state.lock - 1][0] == "dead"

    def take_over(self, seen: int) -> Steps:
        state = self.state
        is_same = seen == 2 * state.lock + state.is_free and self.is_unused()
        if is_same or "unchanged lock" in self.without:
            until = AWAITED
            if state.is_old or (state.is_free and state.until == ARRIVED):
                until = NONE
            yield "takes the lock over", self.go("look", 1, **self.lock(until))
        else:
            yield "is refused the lock", self.go("done")

    def lock(self, until: int = NONE) -> dict[str, object]:
        """Returns the changes to a state in which this process has the lock."""
        until = NONE if "wait" in self.without else until
        return {"lock": self.me, "is_old": False, "is_free": False, "until": until}

    def look(self, *, is_heir: bool) -> Steps:
        seen = [self.state.objects]
        if "fresh reads" in self.without:
            seen.append((NONE, NONE, NONE))
        for data, manifest, marker in seen:
            is_left = bool(data or manifest) and not marker
            is_step = bool(data or manifest) and bool(marker)
            if self.operation in ("overwrite", "delete"):
                is_removed = bool(marker)
            else:
                is_removed = self.operation == "save" and bool(marker) and not is_step
            if is_removed:
                yield "sees a marker to remove", self.begin_removal(marker)
            elif is_step or (marker and self.operation == "sweep"):
                yield "sees a step", self.go("release")
            elif self.operation in ("delete", "sweep"):
                yield "sees no marker", self.begin_removal(NONE)
            elif is_left and is_heir:
                yield "sees leftovers", self.begin_removal(NONE)
            elif is_left:
                yield "sees files of others", self.go("release")
            else:
                yield "sees no step", self.after_removal()

    def begin_removal(self, marker: int) -> State:
        if "clean" in self.without and not marker:
            return self.after_removal()
        if "marker first" in self.without or not marker:
            return self.go("renew to remove")
        return self.go("renew to unmark", marker)

    def unmark(self, seen: int) -> Steps:
        if self.state.objects[MARKER] == seen:
            objects = put(self.state.objects, MARKER, NONE)
            after = self.go("renew to remove", objects=objects, kept=NONE)
            yield "removes the marker", after
        else:
            yield "finds another marker", self.go("renew to remove")

    def remove(self, which: int) -> Steps:
        self = self._replace(
            state=self.state._replace(objects=put(self.state.objects, which, NONE))
        )
        after = self.after_removal() if which else self.go("remove", which + 1)
        yield f"removes {NAMES[which]}", after

    def after_removal(self) -> State:
        if self.operation in ("delete", "sweep"):
            return self.go("release")
        return self.go("renew to commit" if "marker last" in self.without else "write")

    def write(self, which: int) -> Steps:
        if not self.state.objects[which] or "create" in self.without:
            yield f"creates {NAMES[which]}", self.after_write(which)
        else:
            found = 10 * which + self.state.objects[which]
            yield f"finds {NAMES[which]}", self.go("renew to replace", found)

    def replace(self, which: int, writer: int) -> Steps:
        if self.state.objects[which] == writer:
            yield f"replaces {NAMES[which]}", self.after_write(which)
        else:
            yield f"cannot replace {NAMES[which]}", self.go("write", which)

    def after_write(self, which: int) -> State:
        objects = put(self.state.objects, which, self.me)
        changes: dict[str, object] = {"objects": objects}
        if self.state.lock != self.me:
            changes["has_strays"] = True
        if objects == (self.me,) * 3:
            committed = self.state.committed | {self.me}
            changes |= {"committed": committed, "kept": self.me}
        if "marker last" in self.without:
            name, number = [("write", 1), ("renew to report", 0), ("write", 0)][which]
        else:
            name, number = [
                ("write", 1),
                ("renew to commit", 0),
                ("renew to report", 0),
            ][which]
        return self.go(name, number, **changes)

    def renew(self, name: str, number: int) -> Steps:
        changes: dict[str, object] = {}
        match name.removeprefix("renew to "):
            case "unmark":
                goal, name = "unmark", "renew to remove"
            case "commit":
                goal, number = "write", MARKER
            case "report":
                goal, changes = "release", {"reported": self.state.reported | {self.me}}
            case goal:
                pass
        if name in self.without:
            yield "does not renew the lock", self.go(goal, number, **changes)
        elif self.state.lock == self.me:
            yield "renews the lock", self.go(goal, number, is_old=False, **changes)
        else:
            yield "has lost the lock", self.go("leave")

    def leave(self) -> Steps:
        """Leaves a lock: what it wrote last may have come after the other's removal."""
        if self.state.lock:
            yield "is refused the lock", self.go("done")
        else:
            yield "creates the lock", self.go("done", **self.lock())

    def release(self) -> Steps:
        if self.state.lock != self.me:
            yield "releases the lock", self.go("done")
        elif self.state.until:
            yield "frees the lock", self.go("done", is_free=True)
        else:
            released = self.lock() | {"lock": NONE}
            yield "releases the lock", self.go("done", **released)
