"""`suggest`: guesses the transforms from a checkpoint to a state with other names."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from flaxckpt import _state, _util, errors
from flaxckpt import transforms as tf
from flaxckpt._formats import locate
from flaxckpt._state.leaf import LeafInfo, LeafTable
from flaxckpt._suggest import alike, forms, names, values
from flaxckpt._suggest import match as matching
from flaxckpt._suggest import rows as rows_of
from flaxckpt._suggest.fused import find_cuts
from flaxckpt._suggest.match import Link, Match
from flaxckpt._suggest.padded import find_resizes
from flaxckpt._suggest.patterns import FEWEST, Pattern, find_patterns, number_places
from flaxckpt._suggest.renames import find_renames
from flaxckpt._suggest.rows import Row
from flaxckpt._transforms import base as _transforms
from flaxckpt._transforms.mirrors import outside
from flaxckpt._types import LeafPath, PathLike, PyTree
from flaxckpt.transforms import Transform, remap

SURE = 0.5
"""Matches of less confidence are listed as ambiguous."""

_ROWS_PRINTED = 40

_FEWEST = (FEWEST, 2, 33)
"""The least numbers of modules that are taken for repeated, in the order of trial. A
series beyond all of them is never compared module by module, which takes long."""

# ---- the result ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class LeafMatch:
    """The source that was found for a leaf.

    Attributes:
        sources: The leaves of the checkpoint; several if they are stacked.
        form: How their axes become those of the leaf, in einops notation; None if the
            values stay as they are.
        confidence: From 0 to 1; below 0.5 only if the leaf is ambiguous.
        reason: The evidence.
    """

    sources: tuple[LeafPath, ...]
    form: str | None
    confidence: float
    reason: str

    def _of_wholes(self, wholes: Mapping[LeafPath, LeafPath]) -> LeafMatch:
        """Returns the match with fused leaves in the place of their parts."""
        sources = (wholes.get(path, path) for path in self.sources)
        return dataclasses.replace(self, sources=tuple(dict.fromkeys(sources)))


@dataclasses.dataclass(frozen=True, slots=True)
class Ambiguity:
    """A choice that neither names nor shapes decide.

    Attributes:
        leaves: The leaves concerned.
        choices: The rows to choose from, as Python text; the preferred one first. None
            if all rows are concerned.
        reason: Why nothing decides.
    """

    leaves: tuple[LeafPath, ...]
    choices: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        choices = "\n    or ".join(self.choices)
        return f"{self.reason}\n    {choices}" if choices else self.reason


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """Transforms that were guessed, with the evidence for each leaf.

    Attributes:
        leaves: Leaf path of the state -> its source.
        ambiguous: Choices that nothing decides; `transforms` is refused meanwhile.
        left: Leaf path of the state without a source -> the nearest candidate.
        unused: Leaves of the checkpoint that fill no leaf.
        rows: The rows of `remap`.
        sizes: The sizes of axes that the rows need.
        given: The transforms that were applied first.
        gguf: Path of the GGUF file whose `maps.detect(gguf).transforms` come before
            all others; None for other checkpoints, or if its values stay as they are.
        published: These transforms.
    """

    leaves: Mapping[LeafPath, LeafMatch]
    ambiguous: tuple[Ambiguity, ...]
    left: Mapping[LeafPath, str]
    unused: tuple[LeafPath, ...]
    rows: tuple[Row, ...]
    sizes: Mapping[str, int]
    given: tuple[Transform, ...] = ()
    gguf: str | None = None
    published: tuple[Transform, ...] = ()

    @property
    def transforms(self) -> list[Transform]:
        """The transforms, for `load` and `restore_or_init`.

        Raises:
            OptionError: A choice is ambiguous.
        """
        if self.ambiguous:
            shown = [str(one).replace("\n   ", "") for one in self.ambiguous]
            raise errors.OptionError(
                f"in the suggested transforms, {self._count_choices()} ambiguous:\n"
                + errors.rows(shown)
                + "\nPass the right rows, suggest(…, transforms=[remap([…])]), or take"
                " the first of each: accept()."
            )
        sizes: dict[str, Any] = dict(self.sizes)
        remaps = [remap(self.rows, **sizes)] if self.rows else []
        return [*self.published, *self.given, *remaps]

    def accept(self) -> Suggestion:
        """Returns the suggestion with the preferred choice wherever it is ambiguous."""
        return dataclasses.replace(self, ambiguous=())

    @property
    def renames(self) -> tuple[tuple[str, str], ...]:
        """The pattern and the replacement of each `rename` that does the same.

        It is empty if the transforms do more than rename, or a choice is ambiguous.
        """
        if self.ambiguous or self.given or self.published:
            return ()
        used = {path for match in self.leaves.values() for path in match.sources}
        wanted = {path: match.sources for path, match in self.leaves.items()}
        wanted |= dict.fromkeys(self.left, ())
        return find_renames(self.rows, [*used, *self.unused], wanted)

    @property
    def code(self) -> str:
        """The transforms as lines of Python."""
        if not self._has_transforms:
            return "transforms = []"
        given = _transforms.describe(self.given)
        used = {text.partition("(")[0] for text in given} & {*tf.__all__}
        used |= {"remap"} if self.rows else set()
        lines = [f"from flaxckpt.transforms import {', '.join(sorted(used))}", ""]
        lines = lines if used else []
        lines += ["transforms = ["]
        if self.gguf is not None:
            lines = ["from flaxckpt import maps", *lines]
            lines += [f"    *maps.detect({self.gguf!r}).transforms,"]
        lines += [f"    {text}," for text in given]
        if self.rows:
            sizes = [f"        {name}={size}," for name, size in self.sizes.items()]
            rows = [f"            {rows_of.as_code(row)}," for row in self.rows]
            lines += ["    remap(", "        [", *rows, "        ],", *sizes, "    ),"]
        return "\n".join([*lines, "]"])

    def _count_choices(self) -> str:
        return _util.humanize.count(len(self.ambiguous), "choice is", "choices are")

    @property
    def _has_transforms(self) -> bool:
        return bool(self.rows or self.given or self.gguf is not None)

    _repr_pretty_ = _util.card.show_printed

    def __str__(self) -> str:
        wanted = len(self.leaves) + len(self.left)
        lines = [
            f"{len(self.leaves)} of {wanted} leaves have a source;"
            f" {self._count_choices()} ambiguous;"
            f" {_util.humanize.count(len(self.unused), 'leaf', 'leaves')} of the source"
            " unused"
        ]
        if self._has_transforms:
            lines += ["", self.code]
        elif self.leaves:
            lines += ["", "no leaf with a source needs a transform"]
        lines += _part("kinds of leaves", _evidence(self.leaves))
        lines += _part("ambiguous", map(str, self.ambiguous))
        lines += _part("without a source", (f"{p}: {t}" for p, t in self.left.items()))
        lines += _part("unused in the source", self.unused)
        return "\n".join(lines)


def _evidence(leaves: Mapping[LeafPath, LeafMatch]) -> Iterator[str]:
    """Yields a line for each kind of leaf: those of all layers together."""
    alike: dict[object, list[LeafPath]] = defaultdict(list)
    for path, match in leaves.items():
        kind = (re.sub("[0-9]+", "0", path), match.confidence, match.reason, match.form)
        alike[kind].append(path)
    for first, *others in alike.values():
        match = leaves[first]
        more = f" and {len(others)} like it" if others else ""
        sources = errors.first_few(match.sources, 2)
        yield f"{first}{more}: {match.confidence:.2f}, from {sources}; {match.reason}"


def _part(title: str, rows: Iterable[str]) -> list[str]:
    listed = ["\n".join(map(errors.printable, row.split("\n"))) for row in rows]
    if not listed:
        return []
    lines = _util.humanize.rows(listed, _ROWS_PRINTED)
    return ["", f"{title}: {len(listed)}", *lines]


_HOW_TO_CHANGE = "maps.find has the map of a known family; or add scale and offset"

# ---- the guess ----------------------------------------------------------------------


@_util.guessed_names.explain
def suggest(
    source: PathLike,
    abstract_state: PyTree,
    *,
    step: int | None = None,
    transforms: Sequence[Transform] = (),
) -> Suggestion:
    """Guesses the transforms from a checkpoint to a state with other names.

    ```python
    suggestion = flaxckpt.suggest("hf_dir/", abstract_state)
    print(suggestion)  # the lines to paste, and the evidence for each leaf
    state = flaxckpt.load("hf_dir/", abstract_state, transforms=suggestion.transforms)
    ```

    Compares names, numbers of layers and shapes, and reads no values. It finds kernels
    to transpose, heads to split, layers to stack, and query, key and value in one
    array. Shapes do not show changes of values. Those of a GGUF file are undone first,
    as by `maps.detect(source).transforms`; leaves of layouts in `flaxckpt.maps` with
    other values, such as queries of MaxText, are ambiguous. Other changes are not
    found: compare the outputs of both models. Optimizers are left out: moments follow
    their parameters.

    Args:
        source: A checkpoint, or a run directory.
        abstract_state: The state to fill, as for `load`; values are not needed.
        step: Step of a run directory; by default the newest.
        transforms: Transforms to apply to the checkpoint first, such as rows that you
            know: leaves that get the path and the shape that the state wants are done.
            Of a GGUF file, they get the names of Hugging Face.

    Returns:
        The transforms, with a confidence and a reason for each leaf; choices that are
        ambiguous; and leaves that are left.

    Raises:
        CheckpointNotFoundError, CheckpointFormatError, DamagedCheckpointError: As for
            `metadata`.
        OptionError: No leaf of the checkpoint fits the state.
    """
    stored = locate.open_checkpoint(source, step)
    flat = _state.flax_state.flatten(abstract_state)
    wanted = flat.table_with_roles()
    published = values.publish(stored, wanted)
    given = _transforms.check(transforms)
    first = len(published.transforms)
    if _transforms.describe(given[:first]) == _transforms.describe(
        published.transforms
    ):
        given = given[first:]
    suggestion = suggest_for_tables(published.table, wanted, given)
    if published.doubt:
        doubt = Ambiguity(tuple(suggestion.leaves), (), published.doubt)
        return dataclasses.replace(suggestion, ambiguous=(doubt, *suggestion.ambiguous))
    gguf = stored.metadata.path if published.transforms else None
    return dataclasses.replace(suggestion, gguf=gguf, published=published.transforms)


def suggest_for_tables(
    source: LeafTable, wanted: LeafTable, given: Sequence[Transform] = ()
) -> Suggestion:
    """Guesses the transforms from one leaf table to another.

    A number does not show if it counts repeated modules, such as layers, or tells
    modules apart: of the readings that are possible, the one that fills the most leaves
    is taken, and of these the least ambiguous. The transforms `given` are applied to
    the checkpoint first. Raises OptionError if no leaf fits.
    """
    table = _transforms.apply(given, source, wanted)
    moved = {
        path
        for path, leaf in table.items()
        if path not in source or leaf.transforms != source[path].transforms
    }
    targets = _arrays_of(wanted)
    drafts: dict[tuple[int, ...], tuple[Suggestion, _Guess]] = {}
    for fewest in _FEWEST:
        sides = [_patterns_of(side, fewest) for side in (_arrays_of(table), targets)]
        reading = tuple(map(len, sides))
        if reading in drafts:
            continue
        draft, _ = drafts[reading] = _draft(table, wanted, moved, sides, fewest)
        if len(draft.leaves) == len(targets) and not draft.ambiguous:
            break
    suggestion, guess = max(drafts.values(), key=lambda one: _rank(one[0]))
    left = {p: guess.nearest(p) for p in targets if p not in suggestion.leaves}
    if targets and not suggestion.leaves:
        raise errors.OptionError(
            "no leaf of the source fits any leaf of the state:\n"
            + errors.rows(f"{path}: {nearest}" for path, nearest in left.items())
            + "\nCheck that both are of one model, with the same sizes."
        )
    given = (*given, *suggestion.given)
    return dataclasses.replace(suggestion, left=left, given=given)


def _rank(draft: Suggestion) -> tuple[int, int]:
    """Returns the number of leaves with a source, and that of those in no doubt."""
    asked = {path for one in draft.ambiguous for path in one.leaves}
    return len(draft.leaves), len(draft.leaves.keys() - asked)


def _draft(
    source: LeafTable,
    wanted: LeafTable,
    moved: Collection[LeafPath],
    sides: Sequence[Sequence[Pattern]],
    fewest: int,
) -> tuple[Suggestion, _Guess]:
    """Returns a suggestion without `left`, and the guess that it is made of.

    `source` are the leaves of the checkpoint, after the transforms of the user, which
    have changed those in `moved`; `sides` are the patterns of both.
    """
    targets = _arrays_of(wanted)
    cuts, resizes = find_cuts(*sides), find_resizes(*sides)
    splits = [cut.transform for cut in cuts] + [one.transform for one in resizes]
    wholes = {part: whole for cut in cuts for part, whole in cut.wholes.items()}
    sources = _arrays_of(_transforms.apply(splits, source, wanted))
    same = {
        path: LeafMatch((path,), None, 1.0, "the path and the shape are the same")
        for path in _find_same(sources, targets, moved)
    }
    guess = _Guess(
        {path: info for path, info in sources.items() if path not in same},
        {path: info for path, info in targets.items() if path not in same},
        [values.find_changes(side) for side in (sources, targets)],
        [
            matching.observe_same(path, sources[path].shape)
            for path in same.keys() - moved
        ],
    )
    guess.run(fewest)
    leaves = {
        p: same.get(p) or guess.leaves[p]
        for p in targets
        if p in same or p in guess.leaves
    }
    leaves = {
        path: match._of_wholes(wholes) if cuts else match
        for path, match in leaves.items()
    }
    guess.ambiguous += [
        Ambiguity(
            cut.targets,
            (str(cut.transform),),
            "the parts of one array are taken to be blocks of it, in this order",
        )
        for cut in cuts
    ]
    guess.ambiguous += [
        Ambiguity((one.target,), (str(one.transform),), one.reason) for one in resizes
    ]
    used = {path for match in leaves.values() for path in match.sources}
    used |= {part for part, whole in wholes.items() if whole in used}
    unused = tuple(path for path in sources if path not in used)
    suggestion = Suggestion(
        leaves,
        tuple(guess.ambiguous),
        {},
        unused,
        tuple(guess.rows),
        dict(guess.names.sizes),
        tuple(splits),
    )
    return suggestion, guess


def _find_same(
    sources: Mapping[LeafPath, LeafInfo],
    targets: Mapping[LeafPath, LeafInfo],
    moved: Collection[LeafPath],
) -> list[LeafPath]:
    """Returns the paths of leaves that fill the leaf of the same path and shape.

    Leaves with numbers that both sides count in other ways, as from 0 and from 1, are
    left out: which belong together shows only if the whole series are compared. Leaves
    that were moved on purpose are in their place, whatever their numbers.
    """
    counted: list[dict[str, set[int]]] = []
    for side in (sources, targets):
        series = defaultdict(set)
        for path in side:
            for before, number in () if path in moved else number_places(path):
                series[before].add(number)
        counted.append(series)
    mine, theirs = counted
    unlike = {
        before
        for before in mine.keys() & theirs.keys()
        if not (mine[before] <= theirs[before] or mine[before] >= theirs[before])
    }
    return [
        path
        for path, info in targets.items()
        if path in sources
        and sources[path].shape == info.shape
        and (path in moved or not any(at in unlike for at, _ in number_places(path)))
    ]


def _patterns_of(infos: Mapping[LeafPath, LeafInfo], fewest: int) -> list[Pattern]:
    shapes = {p: i.shape for p, i in infos.items() if _is_plain(p)}
    return find_patterns(shapes, fewest)


def _arrays_of(table: LeafTable) -> dict[LeafPath, LeafInfo]:
    leaves = outside(table).items()
    return {path: leaf.info for path, leaf in leaves if leaf.info.kind == "array"}


class _Guess:
    """Collects the matches of two tables, their rows, and what nothing decides.

    `changes` are those of values, of each side; `same` are the leaves that both have.
    """

    def __init__(
        self,
        sources: Mapping[LeafPath, LeafInfo],
        targets: Mapping[LeafPath, LeafInfo],
        changes: Sequence[Mapping[LeafPath, values.ValueChange]],
        same: Sequence[forms.Observation],
    ) -> None:
        self.leaves: dict[LeafPath, LeafMatch] = {}
        self.ambiguous: list[Ambiguity] = []
        self.rows: list[Row] = []
        self.names = rows_of.RowNames()
        self._sources = {p: i for p, i in sources.items() if _is_plain(p)}
        self._targets = {p: i for p, i in targets.items() if _is_plain(p)}
        self._changes = changes
        self._same = same

    def run(self, fewest: int) -> None:
        """Matches all leaves, kind of number by kind of number; see `find_patterns`."""
        sides = [_by_kind(self._sources), _by_kind(self._targets)]
        for kind in sides[0].keys() & sides[1].keys():
            self._match(*(find_patterns(side[kind], fewest) for side in sides))

    def _match(self, sources: list[Pattern], targets: list[Pattern]) -> None:
        matches = matching.match(sources, targets)
        clear = [
            forms.Observation(one.link.scope, one.link.kind, one.link.forms[0])
            for one in matches
            if len(one.link.forms) == 1
        ]
        seen = forms.Evidence(clear, self._same)
        for one in sorted(matches, key=lambda one: str(one.link.source)):
            self._take(
                one, forms.decide(one.link.forms, one.link.scope, one.link.kind, seen)
            )
        for tied in matching.find_tied(sources, targets, matches):
            decision = forms.decide(tied.forms, tied.scope, tied.kind, seen)
            self._take_tied(tied, decision)

    def _take(self, match: Match, decision: forms.Decision) -> None:
        link = match.link
        confidence, reason = _judge(match, decision)
        is_sure = confidence >= SURE
        change = self._find_change(link)
        if change is not None:
            confidence, reason = min(confidence, SURE - 0.1), f"{reason}; {change}"
        elif link.is_by_order:
            confidence = min(confidence, SURE - 0.1)
        rows = self._add(link, decision.forms[0], confidence, reason)
        if change is not None:
            self._ask(link, rows[:1], f"{change}: {_HOW_TO_CHANGE}")
        if len(decision.forms) > 1:
            others = [self.names.rows(link, form)[0] for form in decision.forms[1:]]
            self._ask(link, [rows[0], *others], "several forms fit the shapes")
        others = [self.names.rows(rival, rival.forms[0])[0] for rival in match.rivals]
        if link.is_by_order:
            self._ask(link, [rows[0], *others], "only the order of the numbers fits")
        elif link.similarity < matching.WEAK:
            reason = "the shapes fit, but the names are not alike"
            self._ask(link, [rows[0], *others], reason)
        elif others:
            self._ask(link, [rows[0], *others], "the names fit other leaves as well")
        elif not is_sure and len(decision.forms) == 1:
            self._ask(link, rows[:1], "the names are hardly alike")

    def _find_change(self, link: Link) -> values.ValueChange | None:
        """Returns a change of values that only one side of a link has."""
        ends = link.groups[0].sources, link.groups[0].targets
        found = [
            {c.texts: c for path in paths if (c := changes.get(path))}
            for changes, paths in zip(self._changes, ends, strict=True)
        ]
        if found[0].keys() == found[1].keys():
            return None
        return next(iter([*found[0].values(), *found[1].values()]))

    def _take_tied(self, link: Link, decision: forms.Decision) -> None:
        reason = "a copy of the embedding, as the source has no head"
        rows = self._add(link, decision.forms[0], SURE - 0.1, reason)
        self._ask(link, rows[:1], "the source has no head: is the embedding its head?")

    def _add(
        self, link: Link, form: forms.Candidate, confidence: float, reason: str
    ) -> list[Row]:
        rows = self.names.rows(link, form)
        self.rows += [row for row in rows if row[0] != row[1] or row[2:]]
        for group in link.groups:
            for path in group.targets:
                self.leaves[path] = LeafMatch(
                    group.sources, rows_of.form_of(rows[0]), confidence, reason
                )
        return rows

    def _ask(self, link: Link, rows: Sequence[Row], reason: str) -> None:
        leaves = tuple(path for group in link.groups for path in group.targets)
        self.ambiguous.append(
            Ambiguity(leaves, tuple(map(rows_of.as_code, rows)), reason)
        )

    @functools.cached_property
    def _candidates(
        self,
    ) -> tuple[
        list[LeafPath], list[tuple[names.Meaning, ...]], alike.Index, names.Similarity
    ]:
        """The leaves of the source, their meanings, and how to compare them."""
        left = [p for p in self._targets if p not in self.leaves]
        meanings, wanted = (
            [names.meanings(p.split("/")) for p in paths]
            for paths in (self._sources, left)
        )
        similarity = names.Similarity(wanted, meanings)
        return [*self._sources], meanings, alike.Index(meanings), similarity

    @functools.cached_property
    def _used(self) -> set[LeafPath]:
        return {p for match in self.leaves.values() for p in match.sources}

    @functools.cached_property
    def _counts(self) -> tuple[Counter[str], Counter[str]]:
        """How many leaves of the source and the state are alike but for numbers."""
        return Counter(map(names.without_numbers, self._sources)), Counter(
            map(names.without_numbers, self._targets)
        )

    def nearest(self, path: LeafPath) -> str:
        """Describes the leaf of the source whose name is most like that of a leaf."""
        info = self._targets.get(path)
        if info is None:
            return "its path has one of the characters { } #, which rows cannot have"
        if not self._sources:
            return f"{info}; the source has no other leaf"
        wanted = names.meanings(path.split("/"))
        paths, meanings, index, similarity = self._candidates
        best = paths[
            max(
                index.near(wanted) or [0],
                key=lambda at: similarity(meanings[at], wanted),
            )
        ]
        why = ", which fills another leaf" if best in self._used else ""
        why = why or self._explain_blocks(path, best)
        return f"{info}; the nearest is {best}, {self._sources[best]}{why}"

    def _explain_blocks(self, path: LeafPath, nearest: LeafPath) -> str:
        """Returns a hint if layers of the source may be numbered in blocks.

        Which of the two numbers runs faster is not known: a state may have blocks of
        several layers that repeat, or several stages of stacked layers.
        """
        layers, others = (
            counts[names.without_numbers(p)]
            for counts, p in zip(self._counts, (nearest, path), strict=True)
        )
        sizes = [
            math.prod(side[p].shape)
            for side, p in ((self._sources, nearest), (self._targets, path))
        ]
        stacked, rest = divmod(sizes[1], sizes[0]) if sizes[0] else (0, 0)
        numbers = [names.without_numbers(p).count(names.HOLE) for p in (nearest, path)]
        in_axis = stacked > 1 and numbers == [1, 1]
        in_names = stacked == 1 and numbers == [1, 2]
        if rest or not 1 < stacked * others <= layers:
            return ""
        if not (in_axis or in_names):
            return ""
        return (
            f"; its {layers} layers may be numbered in blocks, which are not"
            " guessed: pass rows of remap with {(b r)}"
        )


def _is_plain(path: LeafPath) -> bool:
    return not {"{", "}", names.HOLE} & {*path}


def _by_kind(
    infos: Mapping[LeafPath, LeafInfo],
) -> dict[str, dict[LeafPath, tuple[int, ...]]]:
    """Groups shapes by the kind of number: floats do not fill integers."""
    grouped: dict[str, dict[LeafPath, tuple[int, ...]]] = defaultdict(dict)
    for path, info in infos.items():
        kind = "".join(c for c in str(info.dtype).split("_")[0] if c.isalpha())
        grouped["float" if "float" in kind else kind][path] = info.shape
    return grouped


def _judge(match: Match, decision: forms.Decision) -> tuple[float, str]:
    link = match.link
    confidence = min(1.0, 0.4 + 0.6 * match.score)
    shared = link.shared
    reasons = [
        f"both names say {', '.join(shared)}" if shared else "only the shape fits"
    ]
    if link.similarity < matching.WEAK:
        confidence = min(confidence, 0.3)
    if match.rivals:
        confidence = min(confidence, 0.3)
    else:
        confidence *= min(1.0, 0.8 + match.margin)
    if len(decision.forms) > 1:
        confidence = min(confidence, 0.4)
    elif decision.reason:
        confidence *= 0.95
        reasons.append(decision.reason)
    elif link.forms[0].orientation and not link.forms[0].is_plain:
        reasons.append("only this form fits the shapes")
    return round(confidence, 2), "; ".join(reasons)
