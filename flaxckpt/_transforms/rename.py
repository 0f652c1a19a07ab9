"""Transforms that add, remove and rename leaves."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from flaxckpt import _util, errors
from flaxckpt._state.leaf import Leaf, LeafInfo, LeafTable
from flaxckpt._transforms import base
from flaxckpt._transforms.base import NewLeaf, TableTransform, Transform
from flaxckpt._transforms.moment_slots import Mirror, find_mirrors
from flaxckpt._transforms.patterns import (
    check_replacement,
    compile_pattern,
    expand,
    invert,
    no_match,
)
from flaxckpt._types import LeafPath


@dataclasses.dataclass(frozen=True)
class _Rename(TableTransform):
    """Implements `rename` and `copy`.

    Attributes:
        rules: Patterns and their replacements.
        keeps_old: True if the leaves also stay at their old paths.
        undoes: The rules that these rules invert.
    """

    rules: tuple[tuple[re.Pattern[str], str], ...]
    keeps_old: bool = False
    undoes: tuple[tuple[re.Pattern[str], str], ...] = ()

    def __call__(self, table: LeafTable) -> LeafTable:
        renamed: dict[LeafPath, LeafPath] = {}
        for pattern, replacement in self.rules:
            for path, match in base.matches(pattern, table).items():
                renamed.setdefault(path, expand(match, replacement))
        self._check_undone(renamed)

        def act(leaves: dict[LeafPath, Leaf], is_mirror: bool) -> Iterable[NewLeaf]:
            for path, leaf in leaves.items():
                if self.keeps_old:
                    yield NewLeaf(path, path, leaf)
                yield NewLeaf(path, renamed[path], leaf)

        return base.replace(table, renamed, act)

    def _check_undone(self, renamed: Mapping[LeafPath, LeafPath]) -> None:
        if not self.undoes:
            return
        for path, old in renamed.items():
            matches = ((p.fullmatch(old), r) for p, r in self.undoes)
            there = next((expand(m, r) for m, r in matches if m), None)
            if there != path:
                raise errors.OptionError(
                    f"the rename of {path} cannot be inverted: {old} would become"
                    f" {there}. Write the inverse of this rename yourself."
                )

    def __str__(self) -> str:
        name = "copy" if self.keeps_old else "rename"
        if len(self.rules) == 1:
            [(pattern, replacement)] = self.rules
            return base.call(name, pattern.pattern, replacement)
        return base.call(name, {p.pattern: r for p, r in self.rules})

    def on_restore(self) -> Transform | None:
        if not self.keeps_old:
            return self.inverse()
        copies = [invert(p.pattern, r)[0] for p, r in self.rules]
        return drop("|".join(f"(?:{pattern})" for pattern in copies))

    def inverse(self) -> Transform:
        if self.keeps_old:
            return super().inverse()
        inverted = [invert(p.pattern, r) for p, r in self.rules]
        return _Rename(_rules(inverted), undoes=self.rules)


def _rules(
    pairs: Iterable[tuple[str, str]],
) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((compile_pattern(p), check_replacement(p, r)) for p, r in pairs)


def _as_rules(
    pattern: str | Mapping[str, str], replacement: str | None
) -> tuple[tuple[re.Pattern[str], str], ...]:
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
        OptionError: A pattern is not a valid regular expression. When applied: it
            matches nothing, or two leaves get the same path.

    Source: `assignment_map` of T5X, which goes from the model to the checkpoint; see
    `assign` for that direction.
    """
    return _Rename(_as_rules(pattern, replacement))


def copy(
    pattern: str | Mapping[str, str], replacement: str | None = None
) -> TableTransform:
    """Copies the matching leaves to new paths; arguments and errors as for `rename`.

    A single leaf of the checkpoint can then fill two leaves of a model.
    """
    return _Rename(_as_rules(pattern, replacement), keeps_old=True)


@dataclasses.dataclass(frozen=True)
class _Drop(TableTransform):
    """Implements `drop`."""

    pattern: re.Pattern[str]

    def __call__(self, table: LeafTable) -> LeafTable:
        chosen = base.matches(self.pattern, table)
        return base.replace(table, chosen, lambda leaves, is_mirror: ())

    def on_restore(self) -> Transform | None:
        return None

    def __str__(self) -> str:
        return base.call("drop", self.pattern.pattern)


def drop(pattern: str) -> TableTransform:
    """Removes the matching leaves, and their moments.

    Args:
        pattern: Regular expression on the whole leaf path.

    Raises:
        OptionError: `pattern` is not a valid regular expression, or, when applied,
            matches nothing.
    """
    return _Drop(compile_pattern(pattern))


@dataclasses.dataclass(frozen=True)
class _Keep(TableTransform):
    """Implements `keep`."""

    pattern: re.Pattern[str]

    def __call__(self, table: LeafTable) -> LeafTable:
        chosen = base.matches(self.pattern, table)
        return {path: leaf for path, leaf in table.items() if path in chosen}

    def on_restore(self) -> Transform | None:
        return None

    def __str__(self) -> str:
        return base.call("keep", self.pattern.pattern)


def keep(pattern: str) -> TableTransform:
    """Keeps only the matching leaves; moments must match as well.

    Args:
        pattern: Regular expression on the whole leaf path, as `params/.*`.

    Raises:
        OptionError: `pattern` is not a valid regular expression, or, when applied,
            matches nothing.
    """
    return _Keep(compile_pattern(pattern))


@dataclasses.dataclass(frozen=True)
class _Assign(TableTransform):
    """Implements `assign`."""

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
        moments = _Moments(table)
        replaced = set(assigned)
        for param in assigned:  # these now belong to other parameters, or to none
            replaced.update(path for path, _ in moments.of(param))
        wanted_mirrors = find_mirrors(self.wanted).known
        for path, mirror in wanted_mirrors.items():
            if path not in assigned and mirror.param in assigned:
                source = assigned[mirror.param]
                assigned[path] = source and moments.find(
                    source, self.wanted[path].info, mirror
                )
        taken = set(assigned.values())
        new = {
            path: leaf
            for path, leaf in table.items()
            if path not in replaced and (path not in taken or path in self.wanted)
        }
        for path, source in assigned.items():
            if source is not None:
                leaf = base.move(table[source], path)
                if path in wanted_mirrors:
                    role = self.wanted[path].info.role
                    info = dataclasses.replace(leaf.info, role=role)
                    leaf = dataclasses.replace(leaf, info=info)
                new[path] = leaf
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

    def __str__(self) -> str:
        rules = [(p.pattern, r) for p, r in self.rules]
        return base.call("assign", rules, strict=None if self.strict else False)


class _Moments:
    """The moments in a table, by their parameters."""

    def __init__(self, table: LeafTable) -> None:
        self._table = table
        self._of: dict[LeafPath, list[tuple[LeafPath, Mirror]]] = {}
        for path, mirror in find_mirrors(table).known.items():
            self._of.setdefault(mirror.param, []).append((path, mirror))

    def of(self, param: LeafPath) -> Sequence[tuple[LeafPath, Mirror]]:
        """Returns the moments of a parameter, with their mirrors."""
        return self._of.get(param, ())

    def find(
        self, param: LeafPath, wanted: LeafInfo, mirror: Mirror
    ) -> LeafPath | None:
        """Returns the moment of `param` that corresponds to `wanted`, or None.

        A moment in the same slot, else in the same field of the same transform.
        """
        same = [path for path, other in self.of(param) if other.slot == mirror.slot]
        alike = same or [
            path
            for path, other in self.of(param)
            if self._is_alike(self._table[path].info, other, wanted, mirror)
        ]
        return alike[0] if len(alike) == 1 else None

    def _is_alike(
        self, found: LeafInfo, of_found: Mirror, wanted: LeafInfo, mirror: Mirror
    ) -> bool:
        (one, field), (other, wanted_field) = (
            _field(found, of_found),
            _field(wanted, mirror),
        )
        return field == wanted_field and (one == other or not one or not other)


def _field(info: LeafInfo, mirror: Mirror) -> tuple[str, str]:
    """Returns class and field of a moment; the class is empty if unknown."""
    if info.role is not None and info.role.state_class:
        return info.role.state_class, info.role.field
    return "", mirror.slot.tail or mirror.slot.head.rpartition("/")[2]


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
    their own paths, and unused leaves keep their paths. Moments go with their
    parameters.

    Args:
        rules: Regular expressions on whole leaf paths of the state, each with the path
            in the checkpoint (`\1` stands for a group), or None to leave the leaf to
            `missing="init"`. The first match wins.
        strict: True if every rule must match.

    Raises:
        OptionError: A pattern is not a valid regular expression. When applied: a rule
            is not used, or the checkpoint lacks an assigned leaf.

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
