"""Compares two checkpoints leaf by leaf."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np

from flaxckpt import _arrays, _state, _storage, _util, errors
from flaxckpt._formats import locate
from flaxckpt._formats.reader import Stored
from flaxckpt._inspect import subtrees
from flaxckpt._state.leaf import Leaf, LeafInfo, LeafTable
from flaxckpt._transforms import base as _transforms
from flaxckpt._transforms import mirrors, patterns
from flaxckpt._types import LeafPath, PathLike
from flaxckpt._zarr.metadata import Array

_PIECE_BYTES = 16 * 2**20
_AT_ONCE = 64 * 2**20
"""Bytes read from each side at once; the comparison takes several times as many."""

_ROWS_PRINTED = 40
_LONGEST_REASON = 200

Kind: TypeAlias = Literal["kind", "shape", "dtype", "values"]


@dataclasses.dataclass(frozen=True, slots=True)
class LeafDiff:
    """A difference in a leaf that both checkpoints have.

    Attributes:
        kind: The first difference in this order: the kind of leaf (an array, a string),
            its `shape`, its `dtype`, its `values`. The values of leaves of different
            shapes are not compared.
        a: The leaf in the first checkpoint.
        b: The leaf in the second.
        different: The number of elements with different bits; of leaves of different
            dtypes, with different numbers.
        max_abs: The largest difference of two elements, exact for integers; infinite
            if only one of them is a number, or finite.
        max_rel: The largest difference of two elements relative to the larger element:
            at most 2.
        rel_norm: The norm of the difference relative to the norm of the first leaf;
            infinite if that norm is 0.
        bits_only: How many of the different elements are equal as numbers: 0.0 and
            -0.0, or NaNs with different bits.
        change: The norm of the difference.
    """

    kind: Kind
    a: LeafInfo
    b: LeafInfo
    different: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    rel_norm: float = 0.0
    bits_only: int = 0
    change: float = 0.0

    def __str__(self) -> str:
        if self.kind in ("kind", "shape"):
            return f"{self.a} -> {self.b}"
        types = f"{self.a.dtype} -> {self.b.dtype}, " if self.kind == "dtype" else ""
        if self.a.kind == "string":
            return "different text"
        text = (
            f"{types}{self.different} of {self.elements} elements, by"
            f" {self.max_abs:.3g} at most; norm {self.rel_norm:.3g}"
        )
        return f"{text}; {self.note}" if self.bits_only else text

    @property
    def elements(self) -> int:
        """The number of elements of the first leaf, of which `different` differ."""
        if self.a.kind == "string":
            return 1
        return math.prod(self.a.stored_shape)

    @property
    def note(self) -> str:
        """What is different of elements that are equal as numbers; empty for none."""
        if not self.bits_only:
            return ""
        all_of_them = self.bits_only == self.different
        count = "only bits differ" if all_of_them else f"{self.bits_only} in bits only"
        return f"{count} (sign of 0 or NaN)"


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointDiff:
    """The differences between the checkpoints `a` and `b`.

    Attributes:
        a: Path of the first.
        b: Path of the second.
        only_in_a: Leaf paths that only the first has.
        only_in_b: Leaf paths that only the second has.
        changed: Leaf path -> its difference: branch by branch in the order of the
            state, the optimizer's last; the largest changes first in each branch.
        same: Leaf paths of equal leaves; None and empty containers have no value, and
            are not among them.
        bytes_compared: Size of all compared values of one side.
        unreadable: Leaf path -> the checkpoint in which its values cannot be read, and
            the reason. Such a leaf is in none of the above.
        metrics: Metric of either checkpoint -> its value in the first and in the
            second, None without a value. Metrics do not make checkpoints unequal.
        damaged_items: Item that is damaged or missing -> the checkpoint, and the
            reason. Its leaves are in none of the above.
    """

    a: str
    b: str
    only_in_a: tuple[LeafPath, ...]
    only_in_b: tuple[LeafPath, ...]
    changed: Mapping[LeafPath, LeafDiff]
    same: tuple[LeafPath, ...]
    bytes_compared: int
    unreadable: Mapping[LeafPath, str] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, tuple[float | None, float | None]] = dataclasses.field(
        default_factory=dict
    )
    damaged_items: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """True if all leaves are equal; False if any could not be compared."""
        differs = self.only_in_a or self.only_in_b or self.changed
        return not (differs or self.unreadable or self.damaged_items)

    @property
    def layer_of(self) -> dict[LeafPath, LeafPath]:
        """Leaf that could be compared -> its layer, as of `subtrees.find_layers`."""
        return subtrees.find_layers((*self.changed, *self.same))

    @property
    def layers(self) -> dict[LeafPath, tuple[int, float]]:
        """Layer -> how many of its leaves have other values, and `rel_norm`.

        The norms are those of these leaves together. The largest changes come first.
        """
        layer_of = self.layer_of
        sums: dict[LeafPath, tuple[int, float, float]] = {}
        for path, leaf in self.changed.items():
            if leaf.different:
                name, norm = layer_of[path], 0.0
                if 0.0 < leaf.rel_norm < math.inf:
                    norm = leaf.change / leaf.rel_norm
                count, change, before = sums.get(name, (0, 0.0, 0.0))
                change, before = (
                    math.hypot(change, leaf.change),
                    math.hypot(before, norm),
                )
                sums[name] = count + 1, change, before
        found = {
            name: (count, change / before if before else math.inf if change else 0.0)
            for name, (count, change, before) in sums.items()
        }
        return {name: found[name] for name in sorted(found, key=lambda n: -found[n][1])}

    @property
    def retyped(self) -> tuple[LeafPath, ...]:
        """The leaves in `changed` of another kind, shape or dtype."""
        return tuple(p for p, leaf in self.changed.items() if leaf.kind != "values")

    _repr_pretty_ = _util.card.show_printed

    def __str__(self) -> str:
        lines = [f"{self.a} and {self.b}: {summarize(self)}"]
        lines += _rows("only in the first", dict.fromkeys(self.only_in_a, ""))
        lines += _rows("only in the second", dict.fromkeys(self.only_in_b, ""))
        retyped = {path: self.changed[path] for path in self.retyped}
        changed = {p: leaf for p, leaf in self.changed.items() if p not in retyped}
        lines += _rows("of another shape or dtype", retyped)
        lines += _rows("changed", changed)
        lines += _rows("cannot be read", self.unreadable)
        lines += _rows("items not compared", self.damaged_items)
        return "\n".join(lines)


def summarize(found: CheckpointDiff) -> str:
    """Returns the numbers of leaves that differ and that are equal, in one line."""
    count, equal = _util.humanize.count, len(found.same)
    if found.is_empty:
        return "1 leaf is equal" if equal == 1 else f"all {equal} leaves are equal"
    retyped = len(found.retyped)
    differing = len(found.changed) - retyped
    unmatched = len(found.only_in_a) + len(found.only_in_b)
    lost, items = len(found.unreadable), len(found.damaged_items)
    other = "another shape or dtype"
    parts = [
        (differing or not retyped, count(differing, "leaf differs", "leaves differ")),
        (retyped, f"{count(retyped, 'leaf has', 'leaves have')} {other}"),
        (True, count(equal, "is equal", "are equal")),
        (unmatched, f"{count(unmatched, 'is', 'are')} only in one of them"),
        (lost, f"{lost:,} cannot be read"),
        (items, f"{count(items, 'item')} not compared"),
    ]
    return ", ".join(text for is_shown, text in parts if is_shown)


def _rows(title: str, leaves: Mapping[LeafPath, object]) -> list[str]:
    if not leaves:
        return []
    rows = [f"{path}: {text}" if text else path for path, text in leaves.items()]
    return [f"{title}: {len(rows)}", *_util.humanize.rows(rows, _ROWS_PRINTED)]


@_util.guessed_names.explain
def diff(
    a: PathLike,
    b: PathLike,
    *,
    step_a: int | None = None,
    step_b: int | None = None,
    values: bool = True,
    only: str | None = None,
    transforms: Sequence[_transforms.Transform] = (),
) -> CheckpointDiff:
    """Compares two checkpoints of any formats, or two steps of a run, leaf by leaf.

    Values are read in pieces, which limits the memory for leaves of any size. Damaged
    leaves are in `unreadable`, damaged items in `damaged_items`, and all others are
    compared.

    ```python
    print(flaxckpt.diff("run", "run", step_a=1000, step_b=2000))
    ```

    Args:
        a: A checkpoint, or a run directory of steps.
        b: Another checkpoint, or the same directory.
        step_a: The step of `a`; the newest by default.
        step_b: The step of `b`; the newest by default.
        values: True to compare values; else only names, shapes and types.
        only: A regular expression on whole leaf paths: the leaves to compare.
        transforms: Applied to `a` first, so that its leaves get the names in `b`.

    Raises:
        CheckpointNotFoundError, CheckpointFormatError: As for `load`.
        DamagedCheckpointError: The metadata is damaged, so no leaf is known.
        OptionError: `only` is not a regular expression, or matches no leaf.
    """
    sides = [
        locate.open_checkpoint(path, step, types=None)
        for path, step in ((a, step_a), (b, step_b))
    ]
    names = _names(sides)
    damaged = _damaged_branches(sides)
    table_a = _transforms.apply(_transforms.check(transforms), sides[0].table)
    table_b = sides[1].table
    if only is not None:
        damaged = _select_branches(only, damaged, table_a, table_b)
        table_a, table_b = _select(only, table_a, table_b)
    lost = _describe_items(damaged, sides, names, table_a, table_b)
    table_a, table_b = (_without(damaged, table) for table in (table_a, table_b))
    both = [path for path in table_a if path in table_b]
    changed: dict[LeafPath, LeafDiff] = {}
    pairs: list[tuple[Leaf, Leaf]] = []
    for path in both:
        pair = (table_a[path], table_b[path])
        kind = _kind(pair[0].info, pair[1].info)
        if kind is not None and (kind != "dtype" or not values):
            changed[path] = LeafDiff(kind, pair[0].info, pair[1].info)
        elif values and pair[0].info.kind != "empty":
            pairs.append(pair)
    for side, leaves in zip(sides, zip(*pairs, strict=True), strict=False):
        _arrays.read.check_supported(leaves, side.metadata.path)
    counter = _util.progress.Counter(f"comparing {sides[0].metadata.path}")
    unreadable: dict[LeafPath, str] = {}
    with _util.progress.bar(counter):
        changed |= _compare(pairs, names, counter, unreadable)
    order = _Order((table_b, table_a))
    ranked = sorted(
        changed, key=lambda path: (*order.place(path), -_rank(changed[path]))
    )
    return CheckpointDiff(
        sides[0].metadata.path,
        sides[1].metadata.path,
        tuple(sorted(_only(table_a, table_b), key=order.place)),
        tuple(sorted(_only(table_b, table_a), key=order.place)),
        {path: changed[path] for path in ranked},
        tuple(
            path
            for path in both
            if table_a[path].info.kind != "empty"
            and path not in changed
            and path not in unreadable
        ),
        counter.done,
        {path: unreadable[path] for path in sorted(unreadable, key=order.place)},
        _pair_metrics(*[side.metadata.metrics for side in sides]),
        lost,
    )


def _names(sides: Sequence[Stored]) -> tuple[str, str]:
    """Returns short names of two checkpoints, which tell them apart."""
    paths = [_storage.paths.from_text(side.metadata.path) for side in sides]
    steps = [side.metadata.step for side in sides]
    runs = [
        "" if paths[0].parent == paths[1].parent else f" of {path.parent.name}"
        for path in paths
    ]
    if None in steps:  # not two steps
        runs = [f" of {path.parent.name}" for path in paths]
    a, b = (
        path.name if step is None else f"step {step}{run}"
        for path, step, run in zip(paths, steps, runs, strict=True)
    )
    return (a, b) if a != b else (str(paths[0]), str(paths[1]))


# ---- damaged items ----------------------------------------------------------------


def _damaged_branches(sides: Sequence[Stored]) -> dict[LeafPath, str]:
    """Returns branches of damaged items, or raises an error if there are no others."""
    for side in sides:
        if not side.table:
            side.check_items(side.items.trees)
    return {
        branch: item
        for side in sides
        for branch, item in side.damaged_branches.items()
        if item in side.items.trees
    }


def _select_branches(
    only: str, damaged: Mapping[LeafPath, str], *tables: LeafTable
) -> dict[LeafPath, str]:
    """Returns the damaged branches that may have leaves which the pattern matches."""
    pattern = patterns.compile_pattern(only)
    selected = {}
    for branch, item in damaged.items():
        known = [p for table in tables for p in table if _branch_of(p) == branch]
        if not known or any(map(pattern.fullmatch, known)):
            selected[branch] = item
    return selected


def _describe_items(
    damaged: Mapping[LeafPath, str],
    sides: Sequence[Stored],
    names: Sequence[str],
    *tables: LeafTable,
) -> dict[str, str]:
    """Returns damaged item -> the checkpoints, the reasons, and what is left out."""
    described = {}
    for branch, item in damaged.items():
        reasons = [
            f"in {name}: it {side.metadata.damaged_items[item]}"
            for side, name in zip(sides, names, strict=True)
            if item in side.metadata.damaged_items
        ]
        known = {p for table in tables for p in table if _branch_of(p) == branch}
        if known:
            leaves = _util.humanize.count(len(known), "leaf", "leaves")
            reasons.append(f"{leaves} not compared")
        described[item] = errors.one_line("; ".join(reasons), _LONGEST_REASON)
    return described


def _without(damaged: Mapping[LeafPath, str], table: LeafTable) -> LeafTable:
    """Returns the leaves that are in no damaged item of either checkpoint."""
    return {p: leaf for p, leaf in table.items() if _branch_of(p) not in damaged}


def _branch_of(path: LeafPath) -> LeafPath:
    return path.partition("/")[0]


# ---- leaves -----------------------------------------------------------------------


def _pair_metrics(
    a: Mapping[str, float], b: Mapping[str, float]
) -> dict[str, tuple[float | None, float | None]]:
    return {name: (a.get(name), b.get(name)) for name in (*a, *b)}


def _only(table: LeafTable, other: LeafTable) -> list[LeafPath]:
    return [path for path in table if path not in other]


def _select(only: str, *tables: LeafTable) -> list[dict[LeafPath, Leaf]]:
    """Returns the leaves that match; raises OptionError if none, or a bad pattern."""
    pattern = patterns.compile_pattern(only)
    selected = [
        {path: leaf for path, leaf in table.items() if pattern.fullmatch(path)}
        for table in tables
    ]
    if not any(selected):
        raise patterns.no_match(only, {path for table in tables for path in table})
    return selected


class _Order:
    """The order of leaves by branch: that of the root counts, optimizers are last."""

    def __init__(self, tables: Sequence[LeafTable]) -> None:
        self._infos = {p: leaf.info for table in tables for p, leaf in table.items()}
        self._branches: dict[str, int] = {}
        for path in self._infos:
            self._branches.setdefault(_branch(path), len(self._branches))

    def place(self, path: LeafPath) -> tuple[bool, int]:
        is_optimizer = mirrors.is_optimizer_leaf(path, self._infos[path])
        return is_optimizer, self._branches[_branch(path)]


def _branch(path: LeafPath) -> str:
    top, slash, _ = path.partition("/")
    return top if slash else ""


def _rank(difference: LeafDiff) -> float:
    return math.inf if difference.kind in ("kind", "shape") else difference.rel_norm


def _kind(a: LeafInfo, b: LeafInfo) -> Kind | None:
    """Returns the difference between two leaves without reading values, or None."""
    numbers = ("array", "scalar")
    if a.kind != b.kind and not (a.kind in numbers and b.kind in numbers):
        return "kind"
    if a.kind == "empty" and a.python_type != b.python_type:
        return "kind"
    if a.shape != b.shape or a.prng_impl != b.prng_impl:
        return "shape"
    return "dtype" if a.dtype != b.dtype else None


# ---- values -----------------------------------------------------------------------


def _compare(
    pairs: Sequence[tuple[Leaf, Leaf]],
    names: tuple[str, str],
    counter: _util.progress.Counter,
    unreadable: dict[LeafPath, str],
) -> dict[LeafPath, LeafDiff]:
    """Returns the differences of pairs of leaves; adds damaged ones to `unreadable`."""
    changed: dict[LeafPath, LeafDiff] = {}
    arrays = []
    for a, b in pairs:
        if a.info.kind == "string":
            if a.text != b.text:
                changed[a.info.path] = LeafDiff("values", a.info, b.info, 1)
        else:
            arrays.append((a, b))
    counter.total = sum(a.info.stored_bytes for a, _ in arrays)
    differences = {a.info.path: _Differences() for a, _ in arrays}
    others = {a.info.path: b for a, b in arrays}
    pieces = [
        piece
        for a, _ in arrays
        for piece in _arrays.blockwise.cut(a, chunk_shape=None, max_bytes=_PIECE_BYTES)
    ]
    for batch in _arrays.blockwise.batches(pieces, _AT_ONCE):
        beside = [_arrays.blockwise.Piece(others[p.path], p.region) for p in batch]
        left = _read(batch, names[0], unreadable)
        right = _read(beside, names[1], unreadable)
        for piece, x, y in zip(batch, left, right, strict=True):
            if x is not None and y is not None:
                differences[piece.path].add(x, y)
                counter.add(piece.nbytes)
    for a, b in arrays:
        total = differences[a.info.path]
        if a.info.path in unreadable:
            continue
        if a.info.dtype != b.info.dtype:
            changed[a.info.path] = total.leaf_diff("dtype", a.info, b.info)
        elif total.different:
            changed[a.info.path] = total.leaf_diff("values", a.info, b.info)
    return changed


def _read(
    pieces: Sequence[_arrays.blockwise.Piece],
    side: str,
    unreadable: dict[LeafPath, str],
) -> list[Array | None]:
    """Returns the values of pieces; None for those added to `unreadable`.

    If a batch fails, each piece is read alone, as an error names stored leaves.
    """
    intact = [piece for piece in pieces if piece.path not in unreadable]
    try:
        values = _arrays.blockwise.read(intact, max_bytes=_AT_ONCE)
    except errors.DamagedCheckpointError as error:
        if len(intact) > 1:
            return [value for p in pieces for value in _read([p], side, unreadable)]
        [path] = [piece.path for piece in intact]
        unreadable[path] = f"in {side}: {_reason(path, error)}"
        return [None] * len(pieces)
    found = iter(values)
    return [None if piece.path in unreadable else next(found) for piece in pieces]


def _reason(path: LeafPath, error: errors.DamagedCheckpointError) -> str:
    reasons = [
        why if source == path else f"{source}: {why}"
        for source, why in error.leaves.items()
    ]
    return "; ".join(reasons) or errors.one_line(str(error), _LONGEST_REASON)


@dataclasses.dataclass(slots=True)
class _Differences:
    """Differences summed over the compared parts of a leaf."""

    different: int = 0
    bits_only: int = 0
    max_abs: float = 0
    max_rel: float = 0.0
    changes: float = 0.0
    squares: float = 0.0

    def add(self, a: Array, b: Array) -> None:
        self.squares += _square(_state.bits.as_wide(a))
        differs = _differing(a, b)
        if differs is None:
            return
        a, b = a[differs], b[differs]
        distances = _state.bits.distances(a, b)
        self.different += distances.size
        self.bits_only += int(np.count_nonzero(distances == 0))
        self.max_abs = max(self.max_abs, _state.bits.largest(distances))
        change = distances.astype(np.float64)
        x, y = _state.bits.as_wide(a), _state.bits.as_wide(b)
        with np.errstate(all="ignore"):
            relative = change / np.maximum(np.abs(x), np.abs(y))
        # The difference from NaN or infinity is the largest possible.
        relative = np.where(np.isnan(relative), 1.0, relative)
        relative = np.where(change == 0, 0.0, relative)
        self.max_rel = max(self.max_rel, float(relative.max()))
        self.changes += _square(change) if np.isfinite(change).all() else math.inf

    def leaf_diff(self, kind: Kind, a: LeafInfo, b: LeafInfo) -> LeafDiff:
        norm = math.sqrt(self.squares)
        change = math.sqrt(self.changes)
        relative = change / norm if norm else (math.inf if change else 0.0)
        return LeafDiff(
            kind,
            a,
            b,
            self.different,
            self.max_abs,
            self.max_rel,
            relative,
            self.bits_only,
            change,
        )


def _differing(a: Array, b: Array) -> Array | None:
    """Returns which elements of two pieces differ; None for none."""
    if a.dtype == b.dtype:
        flips = _state.bits.count_flips(a, b)
        return None if flips is None else flips > 0
    differs = _state.bits.distances(a, b) != 0
    return differs if differs.any() else None


def _square(array: Array) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(np.vdot(finite, finite).real)
