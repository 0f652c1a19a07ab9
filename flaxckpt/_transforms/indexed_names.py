"""Names with indices, such as `layers/{i}/attention/{c:q|k|v}`."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from flaxckpt import errors
from flaxckpt._types import LeafPath

Values: TypeAlias = dict[str, int]
"""Index -> its value; of an index over words, the position of the word."""

_INDEX = re.compile(r"\{([^{}]*)\}")
_AXIS = r"[A-Za-z][A-Za-z0-9_]*"
_FORMS = re.compile(
    rf"(?P<axis>{_AXIS})(?:(?P<first>\+[0-9]+)|:(?P<words>[^|]+(?:\|[^|]+)+))?"
    rf"|\((?P<axes>{_AXIS}(?:[ ]+{_AXIS})+)\)(?P<start>\+[0-9]+)?"
)


class NameIndex(NamedTuple):
    """An index in a name: one of `words`, or a number from `first` on, of `axes`."""

    axes: tuple[str, ...]
    words: tuple[str, ...] = ()
    first: int = 0


@dataclasses.dataclass(frozen=True)
class IndexedName:
    """A leaf path with indices: plain text and indices, in order."""

    text: str
    parts: tuple[str | NameIndex, ...]

    @functools.cached_property
    def indices(self) -> tuple[NameIndex, ...]:
        return tuple(part for part in self.parts if isinstance(part, NameIndex))

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """The indices of the name, in order, each once."""
        return tuple(dict.fromkeys(a for index in self.indices for a in index.axes))

    @functools.cached_property
    def inner(self) -> tuple[str, ...]:
        """The indices whose sizes a composed number needs."""
        return tuple(axis for index in self.indices for axis in index.axes[1:])

    @functools.cached_property
    def beginning(self) -> str:
        """The text before the first index."""
        first = self.parts[0] if self.parts else ""
        return first if isinstance(first, str) else ""

    @functools.cached_property
    def counts(self) -> dict[str, int]:
        """The sizes of the indices over words."""
        return {i.axes[0]: len(i.words) for i in self.indices if i.words}

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """The pattern of all paths that the name stands for; a group for each index."""
        return re.compile("".join(map(_pattern_of, self.parts)))

    def match(self, path: LeafPath, sizes: Mapping[str, int]) -> Values | None:
        """Returns the values of the indices in a path; None if it is another."""
        if not path.startswith(self.beginning):
            return None
        match = self.pattern.fullmatch(path)
        if match is None:
            return None
        values: Values = {}
        for index, text in zip(self.indices, match.groups(), strict=True):
            number = index.words.index(text) if index.words else int(text) - index.first
            if number < 0:
                return None
            for axis in reversed(index.axes[1:]):
                number, value = divmod(number, sizes[axis])
                if values.setdefault(axis, value) != value:
                    return None
            if values.setdefault(index.axes[0], number) != number:
                return None
        if any(value >= sizes.get(axis, value + 1) for axis, value in values.items()):
            return None
        return values

    def format(self, values: Mapping[str, int], sizes: Mapping[str, int]) -> LeafPath:
        text = ""
        for part in self.parts:
            if isinstance(part, str):
                text += part
                continue
            number = values[part.axes[0]]
            for axis in part.axes[1:]:
                number = number * sizes[axis] + values[axis]
            text += part.words[number] if part.words else str(number + part.first)
        return text


def _pattern_of(part: str | NameIndex) -> str:
    if isinstance(part, str):
        return re.escape(part)
    words = "|".join(map(re.escape, part.words))
    return f"({words})" if words else "(0|[1-9][0-9]{0,8})"


def parse_name(text: str) -> IndexedName:
    if not text:
        raise errors.OptionError("a name must be a leaf path, got an empty str")
    parts: list[str | NameIndex] = []
    for i, piece in enumerate(_INDEX.split(text)):
        if i % 2:
            parts.append(_parse_index(piece, text))
        elif "{" in piece or "}" in piece:
            raise errors.OptionError(f"{text!r} has a brace without its partner")
        elif piece:
            parts.append(piece)
    return IndexedName(text, tuple(parts))


def _parse_index(piece: str, text: str) -> NameIndex:
    match = _FORMS.fullmatch(piece)
    if match is None:
        raise errors.OptionError(
            f"{{{piece}}} in {text!r} is not an index: write {{i}} for a number,"
            " {i+1} for one that begins at 1, {(b r)} for one made of two, or {c:q|k|v}"
            " for words"
        )
    words = tuple((match["words"] or "").split("|")) if match["words"] else ()
    if len(set(words)) < len(words):
        raise errors.OptionError(f"{{{piece}}} in {text!r} has a word twice")
    axes = (match["axis"],) if match["axis"] else tuple(match["axes"].split())
    if len(set(axes)) < len(axes):
        raise errors.OptionError(f"{{{piece}}} in {text!r} has an index twice")
    return NameIndex(axes, words, int(match["first"] or match["start"] or 0))
