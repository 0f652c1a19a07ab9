"""Transforms that change which leaves there are, and what they are called."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from flaxckpt import errors
from flaxckpt._info import Leaf, LeafTable
from flaxckpt._types import LeafPath
from flaxckpt.transforms import _table
from flaxckpt.transforms._patterns import compile_pattern, expand, invert, no_match
from flaxckpt.transforms._table import Row, TableTransform, Transform


@dataclasses.dataclass(frozen=True)
class _Rename(TableTransform):
    """See `rename` and `copy`.

    Attributes:
        rules: Patterns and what replaces them.
        keeps_old: Whether the leaves stay under their old paths, too.
        undoes: The rules that these are the inverse of.
    """

    rules: tuple[tuple[re.Pattern[str], str], ...]
    keeps_old: bool = False
    undoes: tuple[tuple[re.Pattern[str], str], ...] = ()

    def __call__(self, table: LeafTable) -> LeafTable:
        renamed: dict[LeafPath, LeafPath] = {}
        for pattern, replacement in self.rules:
            for path, match in _table.matches(pattern, table).items():
                renamed.setdefault(path, expand(match, replacement))
        self._check_undone(renamed)

        def act(leaves: dict[LeafPath, Leaf], is_mirror: bool) -> Iterable[Row]:
            for path, leaf in leaves.items():
                if self.keeps_old:
                    yield Row(path, path, leaf)
                yield Row(path, renamed[path], leaf)

        return _table.replace(table, renamed, act)

    def _check_undone(self, renamed: Mapping[LeafPath, LeafPath]) -> None:
        if not self.undoes:
            return
        for path, old in renamed.items():
            matches = ((p.fullmatch(old), r) for p, r in self.undoes)
            there = next((expand(m, r) for m, r in matches if m), None)
            if there != path:
                raise errors.OptionError(
                    f"{path} may have had several names before it was renamed: {old}"
                    f" would become {there}. Write the inverse of this rename yourself."
                )

    def __str__(self) -> str:
        name = "copy" if self.keeps_old else "rename"
        if len(self.rules) == 1:
            [(pattern, replacement)] = self.rules
            return _table.call(name, pattern.pattern, replacement)
        return _table.call(name, {p.pattern: r for p, r in self.rules})

    def inverse(self) -> Transform:
        if self.keeps_old:
            return super().inverse()
        inverted = [invert(p.pattern, r) for p, r in self.rules]
        return _Rename(_rules(inverted), undoes=self.rules)


def _rules(
    pairs: Iterable[tuple[str, str]],
) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((compile_pattern(p), r) for p, r in pairs)


def _as_rules(
    pattern: str | Mapping[str, str], replacement: str | None
) -> tuple[tuple[re.Pattern[str], str], ...]:
    if isinstance(pattern, str) == (replacement is None):
        raise errors.OptionError(
            "wanted a pattern and its replacement, or a dict of them, got"
            f" {pattern!r} and {replacement!r}"
        )
    if isinstance(pattern, str):
        return _rules([(pattern, replacement or "")])
    return _rules(pattern.items())


def rename(
    pattern: str | Mapping[str, str], replacement: str | None = None
) -> TableTransform:
    r"""Gives other paths to the leaves that match, and to their moments.

    ```python
    rename(r"target/encoder/(.*)", r"params/backbone/\1")
    rename({"params/a/(.*)": r"params/b/\1", "params/b/(.*)": r"params/a/\1"})  # swaps
    ```

    Args:
        pattern: Regular expression on the whole leaf path; or several of them, each
            with its replacement. They apply at the same time, the first that matches
            wins.
        replacement: The new path; `\1` or `\g<name>` stand for groups.

    Raises:
        OptionError: A pattern is no regular expression. When applied: it matches
            nothing, or two leaves get one path.

    Source: `assignment_map` of T5X, which goes from the model to the checkpoint; see
    `assign` for that direction.
    """
    return _Rename(_as_rules(pattern, replacement))


def copy(
    pattern: str | Mapping[str, str], replacement: str | None = None
) -> TableTransform:
    """Like `rename`, but the leaves stay under their old paths as well.

    So two leaves of a model are filled from one of the checkpoint.
    """
    return _Rename(_as_rules(pattern, replacement), keeps_old=True)


@dataclasses.dataclass(frozen=True)
class _Drop(TableTransform):
    """See `drop`."""

    pattern: re.Pattern[str]

    def __call__(self, table: LeafTable) -> LeafTable:
        chosen = _table.matches(self.pattern, table)
        return _table.replace(table, chosen, lambda leaves, is_mirror: ())

    def __str__(self) -> str:
        return _table.call("drop", self.pattern.pattern)


def drop(pattern: str) -> TableTransform:
    """Leaves out the leaves that match, and their moments.

    Args:
        pattern: Regular expression on the whole leaf path.

    Raises:
        OptionError: It is none, or, when applied, matches nothing.
    """
    return _Drop(compile_pattern(pattern))


@dataclasses.dataclass(frozen=True)
class _Keep(TableTransform):
    """See `keep`."""

    pattern: re.Pattern[str]

    def __call__(self, table: LeafTable) -> LeafTable:
        chosen = _table.matches(self.pattern, table)
        return {path: leaf for path, leaf in table.items() if path in chosen}

    def __str__(self) -> str:
        return _table.call("keep", self.pattern.pattern)


def keep(pattern: str) -> TableTransform:
    """Leaves out all leaves but those that match: moments too, unless they match.

    Args:
        pattern: Regular expression on the whole leaf path, as `params/.*`.

    Raises:
        OptionError: It is none, or, when applied, matches nothing.
    """
    return _Keep(compile_pattern(pattern))


@dataclasses.dataclass(frozen=True)
class _Assign(TableTransform):
    """See `assign`."""

    rules: tuple[tuple[re.Pattern[str], str | None], ...]
    strict: bool
    wanted: LeafTable | None = None

    def with_wanted(self, wanted: LeafTable | None) -> Transform:
        return dataclasses.replace(self, wanted=wanted)

    def __call__(self, table: LeafTable) -> LeafTable:
        if self.wanted is None:
            raise errors.OptionError(
                f"{self} goes by the leaves of a state to fill: pass an abstract state,"
                " or use rename, which goes by those of the checkpoint"
            )
        assigned = self._assigned(self.wanted)
        mirrors = _table.mirrors(self.wanted)
        assigned |= self._mirrored(assigned, mirrors)
        lacking = {
            path: source
            for path, source in assigned.items()
            if source is not None and source not in table
        }
        if lacking := {p: s for p, s in lacking.items() if self._is_param(p)}:
            raise errors.OptionError(
                f"{len(lacking)} assigned leaves are not in the checkpoint:\n"
                + errors.rows(f"{path}: from {s}" for path, s in lacking.items())
                + f"\nIt has {', '.join(sorted(table)[:5])}, …"
            )
        taken = set(assigned.values())
        new = {
            path: leaf
            for path, leaf in table.items()
            if path not in assigned and (path not in taken or path in self.wanted)
        }
        for path, source in assigned.items():
            if source is not None and source in table:
                leaf = table[source]
                if path in mirrors:
                    leaf = _table.with_role_of(leaf, mirrors[path].name)
                new[path] = _table.moved(leaf, path)
        return new

    def _assigned(self, wanted: LeafTable) -> dict[LeafPath, LeafPath | None]:
        assigned: dict[LeafPath, LeafPath | None] = {}
        unused = [pattern.pattern for pattern, _ in self.rules]
        for path, leaf in wanted.items():
            if leaf.info.kind == "empty":
                continue
            for i, (pattern, replacement) in enumerate(self.rules):
                if match := pattern.fullmatch(path):
                    unused[i] = ""
                    assigned[path] = (
                        None if replacement is None else expand(match, replacement)
                    )
                    break
        left = [pattern for pattern in unused if pattern]
        if self.strict and left:
            raise no_match(left[0], list(wanted))
        return assigned

    def _mirrored(
        self,
        assigned: Mapping[LeafPath, LeafPath | None],
        mirrors: Mapping[LeafPath, _table.Mirror],
    ) -> dict[LeafPath, LeafPath | None]:
        found: dict[LeafPath, LeafPath | None] = {}
        for path, mirror in mirrors.items():
            if path in assigned or mirror.param not in assigned:
                continue
            source = assigned[mirror.param]
            found[path] = source and mirror.slot.path(mirror.renamed(source))
        return found

    def _is_param(self, path: LeafPath) -> bool:
        return any(pattern.fullmatch(path) for pattern, _ in self.rules)

    def __str__(self) -> str:
        rules = [(p.pattern, r) for p, r in self.rules]
        return _table.call("assign", rules, strict=None if self.strict else False)


def assign(
    rules: Sequence[tuple[str, str | None]], *, strict: bool = True
) -> TableTransform:
    r"""Says for leaves of the wanted state which leaves of the checkpoint fill them.

    ```python
    assign([(r"params/layer_\d+/(.*)", r"target/layer/\1"), ("params/head/.*", None)])
    ```

    Two leaves may be filled from one. What is not assigned is found under its own path,
    and what is not taken stays where it is. Moments go with their parameters.

    Args:
        rules: Regular expressions on whole leaf paths of the state, each with the path
            in the checkpoint (`\1` stands for a group), or None to leave the leaf to
            `missing="init"`. The first that matches wins.
        strict: Whether every rule must match.

    Raises:
        OptionError: A pattern is no regular expression. When applied: a rule is not
            used, or the checkpoint lacks what is assigned.

    Source: `assignment_map` and `require_all_rules_match` of T5X.
    """
    compiled = tuple((compile_pattern(p), r) for p, r in rules)
    return _Assign(compiled, strict)
