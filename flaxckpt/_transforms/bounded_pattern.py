"""Regular expressions from files, matched in bounded time: `re` may take forever."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import TypeAlias

_Ends: TypeAlias = Callable[[int], frozenset[int]]
"""Place in the text -> the places at which a part of the pattern may end."""

_MOST_CHARS = 1000
_MOST_REPEATS = 100
_MOST_DEPTH = 20
_MOST_STEPS = 4 * 10**6

_PLAIN = re.compile(r"(?:\w|\.|\\\.)*")

_TOKEN = re.compile(
    r"(?P<one>\\[^a-zA-Z0-9]|\\[dDwWsS]|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[()|*+?{}^$])"
    r"|(?P<edge>\\b|\\B|\\Z|\\A|\^|\$)|(?P<open>\((?:\?(?::|=|!|P<\w+>))?)"
    r"|(?P<close>\))|(?P<bar>\|)|(?P<repeat>[*+?]|\{\d{1,3}(?:,\d{0,3})?\})\??",
    re.DOTALL,
)


class Matcher:
    """Matches the patterns of a file, all together in a limited number of steps."""

    def __init__(self) -> None:
        self._steps = 0

    def matches(self, pattern: str, text: str) -> bool:
        """Returns True if a pattern matches the beginning of a text, as `re.match`.

        Raises ValueError if it is invalid, is too long, takes too many steps, or has
        syntax other than groups, alternatives, repetitions, classes, edges, lookaheads.
        """
        if len(pattern) > _MOST_CHARS:
            raise ValueError(f"it has more than {_MOST_CHARS} characters")
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"it is not a valid regular expression: {error}") from None
        return bool(_Parser(pattern, text, self._count).parse()(0))

    def matches_end(self, pattern: str, name: str) -> bool:
        """Returns True if a pattern matches the last parts of a dotted name."""
        if _PLAIN.fullmatch(pattern):  # takes no steps
            return bool(re.search(rf"(?:^|\.)(?:{pattern})$", name))
        return self.matches(rf"(.*\.)?({pattern})$", name)

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise ValueError(f"it takes more than {_MOST_STEPS:,} steps")


class _Parser:
    """Makes the function of a pattern on a text."""

    def __init__(self, pattern: str, text: str, count: Callable[[int], object]) -> None:
        self._text, self._count = text, count
        self._tokens = _split(pattern)
        self._next = next(self._tokens, ("", ""))

    def parse(self) -> _Ends:
        found = self._alternatives(0)
        if self._next[0]:
            raise ValueError("a group is not closed")
        return found

    def _take(self) -> str:
        _, text = self._next
        self._next = next(self._tokens, ("", ""))
        return text

    def _alternatives(self, depth: int) -> _Ends:
        if depth > _MOST_DEPTH:
            raise ValueError(f"groups are nested more than {_MOST_DEPTH} deep")
        options = [self._sequence(depth)]
        while self._next[0] == "bar":
            self._take()
            options.append(self._sequence(depth))
        return functools.cache(lambda at: frozenset().union(*(o(at) for o in options)))

    def _sequence(self, depth: int) -> _Ends:
        parts = []
        while self._next[0] not in ("", "bar", "close"):
            parts.append(self._repeated(self._part(depth)))

        def ends(at: int) -> frozenset[int]:
            places = frozenset([at])
            for part in parts:
                places = self._from_all(part, places)
            return places

        return functools.cache(ends)

    def _part(self, depth: int) -> _Ends:
        kind, _ = self._next
        token = self._take()
        if kind == "open":
            inner = self._alternatives(depth + 1)
            self._take()  # the bracket: `re` has compiled the pattern
            if token in ("(?=", "(?!"):
                wanted = token == "(?="
                return lambda at: frozenset([at] * (bool(inner(at)) is wanted))
            return inner
        if kind not in ("one", "edge"):
            raise ValueError(f"{token!r} is not known here")
        compiled = re.compile(token)

        def ends(at: int) -> frozenset[int]:
            match = compiled.match(self._text, at)
            return frozenset() if match is None else frozenset([match.end()])

        return functools.cache(ends)

    def _repeated(self, part: _Ends) -> _Ends:
        while self._next[0] == "repeat":
            part = self._repeat(part, *_counts(self._take()))
        return part

    def _repeat(self, part: _Ends, least: int, most: int | None) -> _Ends:
        def ends(at: int) -> frozenset[int]:
            places = frozenset([at])
            for _ in range(least):
                places = self._from_all(part, places)
            found = new = places
            left = -1 if most is None else most - least
            while new and left:
                new = self._from_all(part, new) - found
                found |= new
                left -= 1
            return found

        return functools.cache(ends)

    def _from_all(self, part: _Ends, places: frozenset[int]) -> frozenset[int]:
        found: frozenset[int] = frozenset().union(*map(part, places))
        self._count(len(places) + len(found))
        return found


def _split(pattern: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(pattern):
        match = _TOKEN.match(pattern, at)
        if match is None or match.lastgroup is None:
            raise ValueError(f"{pattern[at : at + 8]!r} is not known here")
        yield match.lastgroup, match[match.lastgroup]
        at = match.end()


def _counts(text: str) -> tuple[int, int | None]:
    """Returns the least and the most repetitions."""
    if text in ("*", "+", "?"):
        return int(text == "+"), 1 if text == "?" else None
    least, comma, most = text[1:-1].partition(",")
    counts = int(least), int(most) if most else None if comma else int(least)
    if max(filter(None, counts), default=0) > _MOST_REPEATS:
        raise ValueError(f"{text} repeats more than {_MOST_REPEATS} times")
    return counts
