"""Transforms that add, remove and rename leaves."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from flaxckpt import _util, errors
from flaxckpt._state.leaf import LeafTable
from flaxckpt._transforms import base
from flaxckpt._transforms.base import TableTransform, Transform
from flaxckpt._transforms.mirrors import find_mirrors
from flaxckpt._transforms.patterns import (
    check_replacement,
    compile_pattern,
    expand,
    invert,
    no_match,
)
from flaxckpt._transforms.rows import ALONE, LeafRow, RowTransform, apply_rows
from flaxckpt._types import LeafPath

_Rules: TypeAlias = tuple[tuple[re.Pattern[str], str], ...]
"""Patterns and their replacements."""


def _rename(
    rules: _Rules, *, keeps_old: bool = False, undoes: _Rules = ()
) -> RowTransform:
    """Returns `rename` or `copy`; the first match wins. `undoes` are inverse rules."""
    pairs = [(pattern.pattern, replacement) for pattern, replacement in rules]
    args = pairs[0] if len(pairs) == 1 else [dict(pairs)]

    def find(table: LeafTable) -> Iterator[LeafRow]:
        renamed: dict[LeafPath, LeafPath] = {}
        for pattern, replacement in rules:
            for path, match in base.matches(pattern, table).items():
                renamed.setdefault(path, expand(match, replacement))
        _check_undone(renamed, undoes)
        for path, new in renamed.items():
            yield LeafRow([path], [*[(path, None)] * keeps_old, (new, None)])

    def undo() -> Transform:
        return _rename(_rules(invert(*pair) for pair in pairs), undoes=rules)

    def drop_copies() -> Transform:
        return drop("|".join(f"(?:{invert(*pair)[0]})" for pair in pairs))

    if keeps_old:
        name = base.call("copy", *args)
        return RowTransform(name, find, undo_on_restore=drop_copies)
    return RowTransform(base.call("rename", *args), find, undo)


def _check_undone(renamed: Mapping[LeafPath, LeafPath], rules: _Rules) -> None:
    """Raises OptionError if rules do not rename leaves back; they may be empty."""
    faults = []
    for path, old in renamed.items() if rules else ():
        matches = ((p.fullmatch(old), r) for p, r in rules)
        there = next((expand(m, r) for m, r in matches if m), None)
        if there != path:
            faults.append(f"{path} comes from {old}, which would become {there}")
    if faults:
        raise errors.OptionError(
            f"the rename cannot be inverted: {errors.one_or_rows(faults)}\nWrite the"
            " inverse of this rename yourself."
        )


def _rules(pairs: Iterable[tuple[str, str]]) -> _Rules:
    return tuple((compile_pattern(p), check_replacement(p, r)) for p, r in pairs)


def _as_rules(pattern: str | Mapping[str, str], replacement: str | None) -> _Rules:
    if isinstance(pattern, Mapping) and replacement is None:
        return _rules(pattern.items())
    if not isinstance(pattern, str) or not isinstance(replacement, str):
        raise errors.OptionError(
            "wanted a pattern and its replacement, or a dict, got"
            f" {_util.arguments.describe(pattern)} and"
            f" {_util.arguments.describe(replacement)}"
        )
    return _rules([(pattern, replacement)])


def rename(
    pattern: str | Mapping[str, str], replacement: str | None = None
) -> TableTransform:
    r"""Renames the matching leaves, and their moments.

    ```python
    rename(r"target/encoder/(.*)", r"params/backbone/\1")
    rename({"params/a/(.*)": r"params/b/\1", "params/b/(.*)": r"params/a/\1"})  # swaps
    ```

    Args:
        pattern: Regular expression on the whole leaf path; or several with their
            replacements. They apply at the same time, and the first match wins.
        replacement: The new path; `\1` or `\g<name>` stand for groups.

    Raises:
        OptionError: A pattern is not valid. When applied: it matches nothing, or two
            leaves get the same path.

    Source: `assignment_map` of T5X, which maps the other way, as `assign` does.
    """
    return _rename(_as_rules(pattern, replacement))


def copy(
    pattern: str | Mapping[str, str], replacement: str | None = None
) -> TableTransform:
    """Copies the matching leaves to new paths; arguments and errors as for `rename`."""
    return _rename(_as_rules(pattern, replacement), keeps_old=True)


def drop(pattern: str) -> TableTransform:
    """Removes the leaves whose whole paths match `pattern`, and their moments.

    Raises:
        OptionError: `pattern` is not a valid regular expression, or, when applied,
            matches nothing.
    """
    compiled = compile_pattern(pattern)

    def find(table: LeafTable) -> Iterator[LeafRow]:
        return (LeafRow([path], []) for path in base.matches(compiled, table))

    name = base.call("drop", pattern)
    return RowTransform(name, find, undo_on_restore=lambda: None)


@dataclasses.dataclass(frozen=True)
class _Keep(TableTransform):
    pattern: re.Pattern[str]

    def __call__(self, table: LeafTable) -> LeafTable:
        chosen = base.matches(self.pattern, table)
        return {path: leaf for path, leaf in table.items() if path in chosen}

    def on_restore(self) -> Transform | None:
        return None

    def __str__(self) -> str:
        return base.call("keep", self.pattern.pattern)


def keep(pattern: str) -> TableTransform:
    """Keeps only the leaves that match `pattern`; moments must match as well.

    Raises:
        OptionError: As for `drop`.
    """
    return _Keep(compile_pattern(pattern))


@dataclasses.dataclass(frozen=True)
class _Assign(TableTransform):
    rules: tuple[tuple[re.Pattern[str], str | None], ...]
    strict: bool
    wanted: LeafTable | None = None

    def with_wanted(self, wanted: LeafTable | None) -> Transform:
        return dataclasses.replace(self, wanted=wanted)

    def __call__(self, table: LeafTable) -> LeafTable:
        if self.wanted is None:
            raise errors.OptionError(
                f"{self} matches the leaves of a state: pass an abstract state, or use"
                " rename, which matches those of the checkpoint"
            )
        assigned = self._assigned(self.wanted)
        lacking = {
            path: source
            for path, source in assigned.items()
            if source is not None and source not in table
        }
        if lacking:
            raise errors.OptionError(
                f"{len(lacking)} assigned leaves are not in the checkpoint:\n"
                + errors.rows(f"{path}: from {s}" for path, s in lacking.items())
                + f"\nIt has {', '.join(sorted(table)[:5])}, …"
            )
        mirrored = {m.param for m in find_mirrors(self.wanted).known.values()}
        rows = []
        for path, source in assigned.items():
            if source is not None:
                fn = None if path in mirrored else ALONE
                rows.append(LeafRow([source], [(path, fn)]))
        sources = dict.fromkeys(row.old[0] for row in rows)
        left = self.wanted.keys() & sources.keys() - assigned.keys()
        replaced = [path for path in assigned if path in table and path not in sources]
        rows += [LeafRow([path], [(path, None)]) for path in sources if path in left]
        rows += [LeafRow([path], []) for path in replaced]
        return apply_rows(table, rows, str(self), moves_unclear=False)

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

    def __str__(self) -> str:
        rules = [(p.pattern, r) for p, r in self.rules]
        return base.call("assign", rules, strict=None if self.strict else False)


def assign(
    rules: Sequence[tuple[str, str | None]] | Mapping[str, str | None],
    *,
    strict: bool = True,
) -> TableTransform:
    r"""Assigns leaves of the checkpoint to leaves of the wanted state.

    ```python
    assign([(r"params/layer_\d+/(.*)", r"target/layer/\1"), ("params/head/.*", None)])
    ```

    A leaf of the checkpoint may fill two leaves. Leaves without a rule are found by
    their own paths. Moments go with their parameters.

    Args:
        rules: Regular expressions on whole leaf paths of the state, each with the path
            in the checkpoint (`\1` stands for a group), or None to leave the leaf to
            `missing="init"`. The first match wins.
        strict: True if every rule must match.

    Raises:
        OptionError: A pattern is not valid. When applied: a rule is not used, or the
            checkpoint lacks an assigned leaf.

    Source: `assignment_map` and `require_all_rules_match` of T5X.
    """
    pairs = rules.items() if isinstance(rules, Mapping) else rules
    is_list = isinstance(rules, Mapping) or _util.arguments.is_list(rules)
    pairs = tuple(pairs) if is_list else ()
    if not is_list or not all(
        _util.arguments.is_list(pair) and len(pair) == 2 for pair in pairs
    ):
        raise errors.OptionError(
            "assign needs a list of pairs or a dict: a pattern on the paths of the"
            f" state, and a path in the checkpoint or None; got {rules!r:.80}"
        )
    compiled = tuple(
        (compile_pattern(p), None if r is None else check_replacement(p, r))
        for p, r in pairs
    )
    return _Assign(compiled, strict)
