"""A map that compares the leaves with the configuration before it renames them."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flaxckpt import errors
from flaxckpt._maps import model_config, model_sizes
from flaxckpt._state.leaf import LeafTable
from flaxckpt._transforms.base import TableTransform
from flaxckpt._transforms.indexed_names import parse_name
from flaxckpt.transforms import Transform


@dataclasses.dataclass(frozen=True)
class Side:
    """The names of a family's leaves on one side of a map.

    Attributes:
        names: The names of the leaves that the model has.
        base: Name -> its name in a checkpoint of the base model alone, or the reverse.
        advice: What to do if the leaves have the names in `base`.
        excluded: The names of other leaves of the family, each with the condition under
            which a model has them.
        heads: The names of leaves that a model may lack, each with the condition under
            which it may, which does not hold.
        modules: The names of leaves that a model has together, or lacks together.
        ignored: Pattern of the leaf paths that are left out.
    """

    names: frozenset[str]
    base: Mapping[str, str]
    advice: str
    excluded: Mapping[str, str]
    heads: Mapping[str, str]
    modules: Sequence[Sequence[str]] = ()
    ignored: str = ""

    def check(self, title: str, config: Mapping[str, Any], table: LeafTable) -> None:
        """Raises OptionError for leaves of another model of the family."""
        as_base = _pattern(self.base.values())
        if not any(map(_pattern(self.base).fullmatch, table)) and (
            found := next(filter(as_base.fullmatch, table), None)
        ):
            raise errors.OptionError(f"{title}: found {found}: {self.advice}")
        known = _pattern(self.names)
        ignored = re.compile(self.ignored)
        faults: dict[str, str] = {}
        keys: set[str] = set()
        for name, condition in self.excluded.items():
            for path in filter(_pattern([name]).fullmatch, table):
                if not (known.fullmatch(path) or ignored.fullmatch(path)):
                    faults[path] = _describe(config, condition, "has no such leaf")
                    keys.add(model_config.find_fault(config, condition)[1])
        if faults:
            hints = (hint for key, hint in _HINTS.items() if key in keys)
            raise _error(
                f"{title}: leaves contradict its config",
                faults,
                f"Pass the config of this model, or correct it{''.join(hints)}. Or drop"
                " the leaves first: drop(pattern).",
            )
        missing = {
            name: _describe(config, condition, "has such a leaf")
            for name, condition in self.heads.items()
            if not any(map(_pattern([name]).fullmatch, table))
        }
        if missing:
            raise _error(
                f"{title}: the leaves of a head are missing",
                missing,
                "Add them. Or pass the config of a model without this head: its"
                " architectures say which class it is.",
            )
        parts = dict(_find_parts(self.modules, table))
        if parts:
            raise _error(
                f"{title}: leaves of modules are missing",
                parts,
                "Add them. Or drop the other leaves of these modules: drop(pattern).",
            )


_HINTS = {
    "architectures": "; its architectures name the class of the model",
    "tie_word_embeddings": "; tie_word_embeddings is False for a head that was trained"
    " apart",
}
"""Key of a configuration -> advice about its value."""


def _describe(config: Mapping[str, Any], condition: str, verdict: str) -> str:
    """Returns why a condition does not hold, and the `verdict` on such a model."""
    part, key = model_config.find_fault(config, condition)
    if key == "architectures" and (name := model_config.find_class(config)):
        return f"a {name:.80} {verdict}"
    return f"wanted {part}, found {key} {model_config.look_up(config, key)!r:.80}"


def _find_parts(
    modules: Sequence[Sequence[str]], table: LeafTable
) -> Iterator[tuple[str, str]]:
    """Yields the missing leaves of modules, each with another leaf that is there."""
    for module in modules:
        found = {
            name: next(filter(_pattern([name]).fullmatch, table), None)
            for text in module
            for name in _spell_out(text)
        }
        there = next(filter(None, found.values()), None)
        if there is not None:
            yield from ((name, f"found {there}") for name, p in found.items() if not p)


def _spell_out(text: str) -> list[str]:
    """Returns the leaf paths of a name whose indices are over words; else the name."""
    name = parse_name(text)
    if name.counts.keys() != {*name.axes}:
        return [text]
    return [
        name.format(dict(zip(name.counts, values, strict=True)), name.counts)
        for values in itertools.product(*map(range, name.counts.values()))
    ]


def _error(title: str, faults: Mapping[str, str], advice: str) -> errors.OptionError:
    """Returns the error for leaves, each with the reason why it is a fault."""
    rows = errors.rows(f"{name}: {why}" for name, why in faults.items())
    return errors.OptionError(f"{title}:\n{rows}\n{advice}")


def _pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Returns the pattern of all leaf paths that names stand for."""
    patterns = (parse_name(name).pattern.pattern for name in names)
    return re.compile("|".join(patterns) or "(?!)")


@dataclasses.dataclass(frozen=True)
class CheckedMap(TableTransform):
    """A table of names and forms, whose leaves must fit a configuration.

    `sides` are the names before the map, and after it. The vocabulary may be larger on
    the way back if `may_grow`.
    """

    remap: TableTransform
    title: str
    config: Mapping[str, Any]
    sides: tuple[Side, Side]
    shapes: tuple[model_sizes.Rule, ...]
    may_grow: bool
    is_inverse: bool = False

    def __call__(self, table: LeafTable) -> LeafTable:
        self.sides[self.is_inverse].check(self.title, self.config, table)
        if self.is_inverse:
            table = dict(self.remap(table))
        self._check_sizes(table)
        return table if self.is_inverse else self.remap(table)

    def _check_sizes(self, table: LeafTable) -> None:
        model_sizes.check(
            self.title,
            self.shapes,
            self.config,
            {p: x.info.shape for p, x in table.items() if x.info.kind == "array"},
            may_grow=self.is_inverse and self.may_grow,
        )

    def __str__(self) -> str:
        return str(self.remap)

    def inverse(self) -> Transform:
        remap = self.remap.inverse()
        assert isinstance(remap, TableTransform), remap
        return dataclasses.replace(self, remap=remap, is_inverse=not self.is_inverse)
