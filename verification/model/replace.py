"""The protocol of a replacement in a directory: a step never loses both its contents.

Overwriters replace one step, each by a finished directory of its own, and sweepers
remove what dead ones have left, each once; after a power cut there is a sweeper more. A
content is a directory (an inode), by the number of its writer. A power cut undoes any
of the changes that were not synced, in the order of the file system or not.
"""

import itertools
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from verification.model.engine import Actions, Event, Protocol, put, subsets

ASSUMPTIONS = {
    "locks": "a lock is seen by every process, and ends with its holder (on other than"
    " local file systems: a live process touches its directory within 10 minutes)",
    "atomic renames": "after a power cut, a rename has happened or not",
    "syncs": "a rename is durable once the directory was synced",
}
RULES = {
    "new name": "a rename never replaces a step",
    "aside": "the old step is renamed, not removed, before the new one has its name",
    "restore": "a sweep gives a replaced step its name again if no other has taken it",
    "sync to report": "a replacement is reported after the directory was synced",
    "sync to remove": "the old step is removed after the directory was synced",
    "sync to sweep": "a sweep syncs the directory before it removes anything",
    "unlocked": "a sweep removes only what nobody has locked",
}
WHOLE = "a listed step is whole"
NAMED = "after a sweep, the step has its name"
KEPT = "a replacement that was reported stays, or gives way to a later one"

FREE, BROKEN, OLD = 0, -1, 9
END = ("done", "dead")


class State(NamedTuple):
    """A state of the directory and of the processes, which have the numbers from 1.

    Attributes:
        at: Where each process is, and a number that it remembers.
        names: The content of the step's name, and of two temporary names for each
            process: the new directory of an overwriter, and the step that it replaces.
        durable: The contents of these names after the last sync.
        unsynced: The changes since: (kind, from, to).
        locks: The locked contents, and the holder of each.
        history: The contents that have had the step's name, in order.
        reported: The last replacement that was reported.
        is_cut: Whether the power was cut.
    """

    at: tuple[tuple[str, int], ...]
    names: tuple[int, ...]
    durable: tuple[int, ...]
    unsynced: tuple[tuple[str, int, int], ...] = ()
    locks: frozenset[tuple[int, int]] = frozenset()
    history: tuple[int, ...] = (OLD,)
    reported: int = OLD
    is_cut: bool = False


def _is_named(state: State) -> bool:
    is_swept = all(at in END for at, _ in state.at) and not any(state.names[1:])
    return not is_swept or state.names[0] != FREE


def _is_kept(state: State) -> bool:
    final, history = state.names[0], state.history
    if final in (FREE, BROKEN):
        return True
    later = history[history.index(state.reported) :]
    return final in later


INVARIANTS = {
    WHOLE: lambda state: state.names[0] != BROKEN,
    NAMED: _is_named,
    KEPT: _is_kept,
}


def apply(names: tuple[int, ...], change: tuple[str, int, int]) -> tuple[int, ...]:
    """Returns the contents of the names after a change, if it is possible."""
    kind, source, target = change
    if kind == "remove":  # the files of a content, whatever its name is now
        return tuple(
            (BROKEN if not at else FREE) if c == source else c
            for at, c in enumerate(names)
        )
    if kind == "swap" and names[source] and names[target]:
        return put(put(names, source, names[target]), target, names[source])
    if kind == "move" and names[source] and not names[target]:
        return put(put(names, target, names[source]), source, FREE)
    if kind == "lose":
        return put(names, source, FREE)
    return names


def protocol(
    *kinds: str, can_exchange: bool, without: Collection[str] = ()
) -> Protocol:
    """Returns the protocol of some processes, perhaps without rules or assumptions.

    Args:
        kinds: `overwriter` or `sweeper`, for each process; a sweeper among them.
        can_exchange: Whether the system exchanges two names in one step.
        without: Names in `RULES` and `ASSUMPTIONS`.
    """
    if "locks" in without:
        without = {*without, "unlocked"}
    names: tuple[int, ...] = (OLD,)
    for me, kind in enumerate(kinds, 1):
        names += (me if kind == "overwriter" else FREE, FREE)
    locks = frozenset((me, me) for me in names[1:] if me)
    initial = State((("start", 0),) * len(kinds), names, names, locks=locks)

    def actions(state: State) -> Actions:
        for me, (at, number) in enumerate(state.at, 1):
            if at in END:
                continue
            process = _Process(state, me, frozenset(without), can_exchange)
            for text, after in getattr(process, kinds[me - 1])(at, number):
                yield Event(f"{kinds[me - 1]} {me}", text), after
            yield Event("time", f"kills {me}"), process.end("dead")
        if not state.is_cut:
            yield from _cut(state, kinds.index("sweeper"), without)

    return Protocol(initial, actions, INVARIANTS)


def _cut(state: State, sweeper: int, without: Collection[str]) -> Actions:
    """Yields what a power cut may leave; the sweeper begins again."""
    at = put((("dead", 0),) * len(state.at), sweeper, ("start", 0))
    for kept in subsets(state.unsynced):
        halves: list[tuple[Any, ...]] = [(change, change) for change in kept]
        if "atomic renames" in without:
            halves = [(change, ("lose", change[1], 0)) for change in kept]
        for changes in set(itertools.product(*halves)):
            names = state.durable
            for change in changes:
                names = apply(names, change)
            after = state._replace(
                names=names, durable=names, unsynced=(), locks=frozenset()
            )
            yield Event("time", "cuts the power"), after._replace(at=at, is_cut=True)


_ASIDE = 100
"""Added to the name at which a sweeper found a directory that it has set aside."""

Steps = Iterator[tuple[str, State]]


class _Process(NamedTuple):
    """A process in a state. A method for each kind yields what it may do next."""

    state: State
    me: int
    without: frozenset[str]
    can_exchange: bool

    def go(self, at: str, number: int = 0, **changes: Any) -> State:
        where = put(self.state.at, self.me - 1, (at, number))
        after = self.state._replace(at=where, **changes)
        if at in ("discard", "give up"):  # it keeps only the lock of its directory
            others = {lock for lock in after.locks if lock[1] != self.me}
            after = after._replace(locks=frozenset(others | {(self.me, self.me)}))
        return after

    def end(self, at: str, **changes: Any) -> State:
        mine = {lock for lock in self.state.locks if lock[1] == self.me}
        return self.go(at, **{"locks": self.state.locks - mine, **changes})

    def change(self, kind: str, source: int, target: int = 0) -> dict[str, Any]:
        """Returns the changes of the state by a change of names."""
        names = apply(self.state.names, (kind, source, target))
        changes: dict[str, Any] = {
            "names": names,
            "unsynced": (*self.state.unsynced, (kind, source, target)),
        }
        if names[0] not in (*self.state.history, FREE, BROKEN):
            changes["history"] = (*self.state.history, names[0])
        return changes

    def sync(self) -> dict[str, Any]:
        if "syncs" in self.without:
            return {}
        return {"durable": self.state.names, "unsynced": ()}

    def lock(self, content: int) -> dict[str, Any]:
        is_locked = any(locked == content for locked, _ in self.state.locks)
        return {} if is_locked else {"locks": self.state.locks | {(content, self.me)}}

    # ---- overwriters ------------------------------------------------------------

    def overwriter(self, at: str, number: int) -> Steps:
        names, (new, aside) = self.state.names, (2 * self.me - 1, 2 * self.me)
        first = "sync"
        if "sync to remove" in self.without:
            first = "discard"
        if "sync to report" in self.without:
            first = "report"
        match at:
            case "start" if not names[0]:
                yield "sees no step", self.go("second")
            case "start":
                goal = "exchange" if self.can_exchange else "first"
                yield "claims the step", self.go(goal, **self.lock(names[0]))
            case "exchange" if names[0]:
                yield (
                    "exchanges the names",
                    self.go(first, **self.change("swap", new, 0)),
                )
            case "exchange":
                yield "finds no step", self.go("give up")
            case "first" if not names[0]:
                yield "finds no step", self.go("give up")
            case "first" if "aside" in self.without:
                changes = self.change("remove", names[0])
                yield "removes the step", self.go("second", **changes)
            case "first":
                changes = self.change("move", 0, aside)
                yield "renames the step", self.go("second", **changes)
            case "second" if names[0] and "new name" in self.without:
                yield (
                    "removes the step",
                    self.go("second", **self.change("remove", names[0])),
                )
            case "second" if not names[0]:
                goal = "third" if names[aside] else first
                yield "publishes", self.go(goal, **self.change("move", new, 0))
            case "second":
                yield "finds a step", self.go("undo" if names[aside] else "give up")
            case "undo":  # it stays under its temporary name if another has its name
                changes = {} if names[0] else self.change("move", aside, 0)
                yield "restores the step", self.go("give up", **changes)
            case "third" if names[aside]:
                changes = self.change("move", aside, new)
                yield "renames the old step", self.go(first, **changes)
            case "third":
                yield "finds no old step", self.go("give up")
            case "sync":
                yield "syncs", self.go("discard", **self.sync())
            case "discard" | "give up":
                goal = "report" if at == "discard" else "done"
                changes = self.change("remove", names[new]) if names[new] else {}
                after = self.go(goal, **changes)
                if goal == "done":
                    after = self.end("done", **changes)
                yield "removes its directory", after
            case "report":
                yield "reports", self.end("done", reported=self.me)

    def let_go(self, number: int, **changes: Any) -> State:
        """Goes on to the next name."""
        after = self.go("look", number + 1, **changes)
        held = {lock for lock in after.locks if lock[1] == self.me}
        return after._replace(locks=after.locks - held)

    # ---- sweepers ---------------------------------------------------------------

    def sweeper(self, at: str, number: int) -> Steps:
        """Looks at one temporary name after another; `number` is the name."""
        names, mine = self.state.names, 2 * self.me - 1
        if at == "start":
            yield "lists", self.go("look", 1)
        elif number == len(names):
            yield "ends", self.end("done")
        elif at == "look":
            content = names[number]
            is_locked = any(locked == content for locked, _ in self.state.locks)
            if content and (not is_locked or "unlocked" in self.without):
                yield "claims", self.go("claimed", number, **self.lock(content))
            else:
                yield "skips", self.go("look", number + 1)
        elif at == "claimed":
            is_replaced = number % 2 == 0 and "restore" not in self.without
            if not names[number]:
                yield "finds nothing", self.let_go(number)
            elif is_replaced and not names[0]:
                yield "finds no step", self.go("restore", number)
            else:
                goal = "aside" if "sync to sweep" in self.without else "sync"
                yield "finds a step", self.go(goal, number)
        elif at == "restore" and names[0]:
            yield "is refused", self.end("done")
        elif at == "restore":
            yield (
                "restores the step",
                self.go("settle", number, **self.change("move", number, 0)),
            )
        elif at == "settle":
            yield "syncs", self.let_go(number, **self.sync())
        elif at == "sync":
            yield "syncs", self.go("aside", number, **self.sync())
        elif at == "aside" and not names[number]:
            yield "finds nothing", self.let_go(number)
        elif at == "aside":
            changes = {}
            if number != mine and not names[mine]:
                changes = self.change("move", number, mine)
                number += _ASIDE
            yield "sets a directory aside", self.go("remove", number, **changes)
        elif at == "remove":
            content = names[mine if number >= _ASIDE else number]
            changes = self.change("remove", content) if content else {}
            yield "removes a directory", self.let_go(number % _ASIDE, **changes)
