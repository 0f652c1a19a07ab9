"""The cases of each protocol, and what breaks without each of its rules."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from types import ModuleType

from verification.model import commit, reading, replace, uploads
from verification.model.engine import Protocol, Result, exhaust

PROTOCOLS = {
    "commit": commit,
    "reading": reading,
    "uploads": uploads,
    "replace": replace,
}


def cases(name: str, processes: int, without: Sequence[str] = ()) -> Iterator[Protocol]:
    """Yields a protocol for each choice of what that many processes do.

    Processes that do the same are equal but for their numbers, and no action and no
    invariant compares numbers, except whether they are equal: renumbering the processes
    of a history gives a history, which breaks the same invariants. So one order of the
    processes stands for all.
    """
    kinds: Sequence[str]
    if name == "commit":
        kinds = ("save", "overwrite", "delete", "sweep")
        for chosen in itertools.combinations_with_replacement(kinds, processes):
            for has_step in (False, True):
                yield commit.protocol(*chosen, has_step=has_step, without=without)
    elif name == "uploads":
        kinds = ("uploader", "changer", "cleaner", "writer")
        for chosen in itertools.combinations_with_replacement(kinds, processes):
            yield uploads.protocol(*chosen, without=without)
    elif name == "reading":
        for readers in range(1, processes):
            for in_store in (False, True):
                chosen = ("reader",) * readers + ("deleter",) * (processes - readers)
                yield reading.protocol(*chosen, in_store=in_store, without=without)
    else:
        for overwriters in range(1, processes):
            for can_exchange in (False, True):
                yield replace.protocol(
                    *("overwriter",) * overwriters,
                    *("sweeper",) * (processes - overwriters),
                    can_exchange=can_exchange,
                    without=without,
                )


def exhaust_all(name: str, processes: int, without: Sequence[str] = ()) -> Result:
    """Exhausts all cases, or those up to the first counterexample."""
    states = 0
    for protocol in cases(name, processes, without):
        found = exhaust(protocol)
        states += found.states
        if found.counterexample is not None:
            return Result(states, found.counterexample)
    return Result(states, None)


def rules(module: ModuleType) -> tuple[str, ...]:
    """Returns the names of the rules and the assumptions of a protocol."""
    return (*module.RULES, *module.ASSUMPTIONS)


def broken_without(name: str, rule: str) -> list[str]:
    """Returns the invariants that the fewest processes break without a rule."""
    for processes in (2, 3):
        broken = {
            invariant
            for invariant in PROTOCOLS[name].INVARIANTS
            for protocol in cases(name, processes, (rule,))
            if exhaust(only(protocol, invariant)).counterexample
        }
        if broken:
            return [each for each in PROTOCOLS[name].INVARIANTS if each in broken]
    return []


def only(protocol: Protocol, invariant: str) -> Protocol:
    """Returns a protocol with a single invariant, or without it if it has it not."""
    invariants = {
        name: holds for name, holds in protocol.invariants.items() if name == invariant
    }
    return dataclasses.replace(protocol, invariants=invariants)
