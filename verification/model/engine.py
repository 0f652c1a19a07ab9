"""Exhausts a protocol: every order of its actions, with a shortest counterexample.

A protocol has hashable states. `Protocol.actions` yields, for a state, each possible
next event with the state after it. The search visits all reachable states, breadth
first, so the first state that breaks an invariant is reached by a shortest history.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple


class Event(NamedTuple):
    """Something that happens: an actor, and what it does."""

    actor: str
    text: str

    def __str__(self) -> str:
        return f"{self.actor} {self.text}"


Actions = Iterator[tuple[Event, Any]]


@dataclasses.dataclass(frozen=True)
class Protocol:
    """A protocol of some processes in some environment.

    Attributes:
        initial: The initial state.
        actions: Yields the events that are possible in a state, and the states after.
        invariants: What holds in every state -> function that checks a state.
    """

    initial: Hashable
    actions: Callable[[Any], Actions]
    invariants: Mapping[str, Callable[[Any], bool]]


class Counterexample(NamedTuple):
    """A shortest history that breaks an invariant."""

    invariant: str
    history: tuple[Event, ...]
    state: Any

    def __str__(self) -> str:
        rows = [f"{number:3} {event}" for number, event in enumerate(self.history, 1)]
        return "\n".join([f"broken: {self.invariant}", *rows, f"    {self.state}"])


class Result(NamedTuple):
    """The number of states that were visited, and what was found."""

    states: int
    counterexample: Counterexample | None


def exhaust(protocol: Protocol) -> Result:
    """Visits all reachable states, or those up to the first broken invariant."""
    came_from: dict[Any, tuple[Any, Event] | None] = {protocol.initial: None}
    waiting = collections.deque([protocol.initial])
    while waiting:
        state = waiting.popleft()
        for invariant, holds in protocol.invariants.items():
            if not holds(state):
                history = _history(came_from, state)
                found = Counterexample(invariant, history, state)
                return Result(len(came_from), found)
        for event, successor in protocol.actions(state):
            if successor not in came_from:
                came_from[successor] = (state, event)
                waiting.append(successor)
    return Result(len(came_from), None)


def _history(came_from: Mapping[Any, Any], state: Any) -> tuple[Event, ...]:
    events = []
    while (step := came_from[state]) is not None:
        state, event = step
        events.append(event)
    return tuple(reversed(events))


def refused(
    protocol: Protocol, trace: Iterable[Event], is_hidden: Callable[[Event], bool]
) -> str | None:
    """Returns None if a trace is a path of the protocol, or why it is not.

    Args:
        protocol: The protocol.
        trace: The observed events, in order.
        is_hidden: Returns True for events that nobody observes: any number of them may
            happen between two events of the trace.
    """
    states = _with_hidden(protocol, {protocol.initial}, is_hidden)
    for number, event in enumerate(trace, 1):
        possible = {
            step for state in states for step in protocol.actions(state)
        }  # fmt: skip
        after = {successor for each, successor in possible if each == event}
        if not after:
            others = sorted({str(each) for each, _ in possible})
            return f"event {number}: {event}; the model has {', '.join(others)}"
        states = _with_hidden(protocol, after, is_hidden)
    return None


def _with_hidden(
    protocol: Protocol, states: set[Any], is_hidden: Callable[[Event], bool]
) -> set[Any]:
    """Returns the states, and all that hidden events lead to."""
    reached, waiting = set(states), list(states)
    while waiting:
        for event, successor in protocol.actions(waiting.pop()):
            if is_hidden(event) and successor not in reached:
                reached.add(successor)
                waiting.append(successor)
    return reached


def put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    """Returns a tuple with another value at an index."""
    return (*values[:index], value, *values[index + 1 :])


def subsets(values: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Yields all subsequences."""
    values = tuple(values)
    for size in range(len(values) + 1):
        yield from itertools.combinations(values, size)
