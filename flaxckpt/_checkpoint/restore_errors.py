"""Errors of restores that do not fit, and their advice."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence, Set

from flaxckpt import _state, errors
from flaxckpt._checkpoint import mismatch, moved
from flaxckpt._checkpoint.plan import RestorePlan
from flaxckpt._formats.reader import Stored
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._transforms import mirrors
from flaxckpt._types import LeafPath
from flaxckpt.errors import Mismatch

ADVICE_ON_TYPES = (
    "Begin the run with a state of the types that it saves, those after a step:"
    " jax.eval_shape(step, state) shows them, and restore_or_init takes it as the state"
    " where the run has a step. To change the state, begin another run from this one"
    " with source= and source_transforms=."
)

_ADVICE_ON_WIDTH = (
    "Set jax_enable_x64, as when these values were saved, or use numpy arrays for these"
    " leaves of the state."
)
_ADVICE_ON_TRANSFORMS = (
    "The run saves with {made}, which may remove or change leaves: leave out what does."
    " To continue from this step, pass checkpointer.restore transforms=[...] that undo"
    ' it, or missing="init" for the state\'s own values. Otherwise, the types differ.'
)

_NAMED = 3
"""The most patterns of leaves that advice names."""


def make_error(
    planned: RestorePlan,
    stored: Stored,
    *,
    has_transforms: bool,
    has_state: bool,
    is_source: bool,
    is_resume: bool,
) -> errors.RestoreMismatchError:
    """Returns the error of a plan with problems: its rows and advice."""
    argument = "source_transforms" if is_source or is_resume else "transforms"
    groups = [] if has_transforms else moved.find_moved(planned, stored.table)
    others = [problem for problem in planned.problems if not problem.advice]
    kinds = {problem.kind for problem in others}
    changed = bool(kinds) and kinds <= {"differs", "missing"}
    if is_resume and "too_wide" in kinds:
        advice = _ADVICE_ON_WIDTH
    elif is_resume and not groups and changed and not _advise_on_items(others, stored):
        made = ", ".join(stored.metadata.transforms)
        own = [_ADVICE_ON_TRANSFORMS.format(made=made[:300])] if made else []
        theirs = [p.advice for p in planned.problems if p.advice]
        advice = " ".join(dict.fromkeys([*own, ADVICE_ON_TYPES, *theirs]))
    else:
        advice = _give_advice(planned, stored, groups, argument, has_state=has_state)
        if is_resume and argument in advice:
            advice += (
                " A run takes source_transforms if it begins from source=: this run."
            )
    return errors.RestoreMismatchError(
        planned.path,
        planned.problems,
        advice,
        shown=_format_rows(planned.problems, groups),
    )


def advise(
    planned: RestorePlan,
    stored: Stored,
    *,
    has_transforms: bool,
    has_state: bool,
    is_source: bool,
) -> RestorePlan:
    argument = "source_transforms" if is_source else "transforms"
    groups = [] if has_transforms else moved.find_moved(planned, stored.table)
    advice = _give_advice(planned, stored, groups, argument, has_state=has_state)
    renames = [each.rename(stored.table) for each in groups]
    known = tuple(each for each in renames if each is not None)
    return dataclasses.replace(
        planned,
        advice=advice,
        renames=known if len(known) == len(groups) else (),
        drops=_find_drops(planned),
    )


def make_unbuilt_error(
    path: str, unbuilt: _state.leaf_types.UnbuiltLeavesError
) -> errors.RestoreMismatchError:
    """Returns the error of leaves of registered classes that refuse their parts."""
    problems = []
    for leaf, (leaf_type, parts, reason) in unbuilt.leaves.items():
        found = [
            f"{name} {_state.describe.describe_value(part)}"
            for name, part in _state.flax_state.leaves_by_path(parts).items()
        ]
        text = f"{errors.first_few(found, 3)} ({reason})"
        problems.append(Mismatch(leaf, f"the parts of a {leaf_type.name}", text))
    return errors.RestoreMismatchError(
        path,
        problems,
        "Correct from_arrays in register_leaf, or pass a state that has dicts in place"
        " of these leaves.",
    )


def make_unequal_error(
    path: str, unequal: _state.nnx_objects.UnequalVariablesError
) -> errors.RestoreMismatchError:
    """Returns the error of NNX variables that are shared, but not equal."""
    problems = [
        Mismatch(variable, f"the value of {first}, which the state shares", "another")
        for variable, first in unequal.variables.items()
    ]
    branches = sorted({variable.split("/")[0] for variable in unequal.variables})
    return errors.RestoreMismatchError(
        path,
        problems,
        f"Restore {errors.first_few(branches)} apart from the other items, each with"
        " load(path, {item: object}), or pass a state that does not share variables.",
    )


def _format_rows(
    problems: Sequence[Mismatch], groups: Sequence[moved.Moved]
) -> list[str] | None:
    """Returns lines that show `problems`, a single line for leaves moved together."""
    if not groups:
        return None
    several = [each for each in groups if len(each.names) > 1]
    elsewhere = {
        _state.tree.inside(each.wanted) + name
        for each in several
        for name in each.names
    }
    others = [problem.row for problem in problems if problem.leaf not in elsewhere]
    return [*map(str, several), *others]


def _give_advice(
    planned: RestorePlan,
    stored: Stored,
    groups: Sequence[moved.Moved],
    argument: str,
    *,
    has_state: bool,
) -> str:
    """Returns advice on the problems of a plan; see `_advise`."""
    parts = dict.fromkeys(p.advice for p in planned.problems if p.advice)
    others = tuple(problem for problem in planned.problems if not problem.advice)
    if others:
        rest = dataclasses.replace(planned, problems=others)
        parts[_advise(rest, stored, groups, argument, has_state=has_state)] = None
    return " ".join(parts)


def _advise(
    planned: RestorePlan,
    stored: Stored,
    groups: Sequence[moved.Moved],
    argument: str,
    *,
    has_state: bool,
) -> str:
    """Returns advice on problems that have none; `groups` are leaves that moved."""
    problems = planned.problems
    kinds = {problem.kind for problem in problems}
    if "too_wide" in kinds:
        wide = [
            wanted
            for problem in problems
            if problem.kind == "too_wide"
            and (wanted := planned.leaves[problem.leaf].wanted) is not None
        ]
        return _advise_on_width(wide, argument, has_state=has_state)
    renames = [_as_code(each.rename(stored.table)) for each in groups]
    if groups and sum(len(each.names) for each in groups) == len(problems):
        return _advise_move(groups, renames, argument, are_all=True)
    advice = _advise_on_rest(planned, stored, argument)
    if groups:
        move = _advise_move(groups, renames, argument, are_all=False)
        return f"{move} For the other leaves: {advice[0].lower()}{advice[1:]}"
    return advice


def _advise_on_rest(planned: RestorePlan, stored: Stored, argument: str) -> str:
    """Returns advice on leaves that are not stored in another container."""
    problems = planned.problems
    kinds = {problem.kind for problem in problems}
    if "unused" in kinds:
        return 'Add these leaves to the state, or pass unused="ignore".'
    if "several" in kinds:
        return 'Load into the old optimizer first, or pass optimizer="reinit".'
    if kinds == {"missing"}:
        if advice := _advise_on_items(problems, stored):
            return advice
        return (
            "Pass a state with only the leaves of the checkpoint, or a state with"
            ' values and missing="init" to keep them.'
        )
    if reshapes := _find_reshapes(planned):
        code = ", ".join(
            [f'reshape(r"{re.escape(path)}", {shape})' for path, shape in reshapes]
        )
        return f"These shapes differ in axes of size 1: pass {argument}=[{code}]."
    if drops := _find_drops(planned):
        code = ", ".join([f'drop(r"{pattern}")' for pattern in drops])
        return (
            "To begin these leaves and their moments anew, pass"
            f' {argument}=[{code}], missing="init" and a state with values for them.'
            " Other transforms rename, grow, slice and map leaves."
        )
    return (
        f"Change the state to fit the checkpoint, or pass {argument}=[...], which can"
        ' rename, drop, grow, slice and map leaves: drop(pattern) with missing="init"'
        " keeps your own values, such as of a new head. Floating types are cast;"
        " integers are only widened, unless cast(pattern, dtype, lossy=True) narrows"
        " them."
    )


def _find_reshapes(planned: RestorePlan) -> Sequence[tuple[LeafPath, tuple[int, ...]]]:
    """Returns parameters, if few, and their shapes, if nothing else is wrong."""
    found = []  # moments follow
    for problem in planned.problems:
        leaf = planned.leaves[problem.leaf]
        if leaf.wanted is None or leaf.found is None:
            return ()
        if not mismatch.fits_reshaped(leaf.wanted, leaf.found):
            return ()
        if not mirrors.is_optimizer_leaf(problem.leaf, leaf.wanted):
            found.append((problem.leaf, leaf.wanted.shape))
    return found if len(found) <= _NAMED else ()


def _find_drops(planned: RestorePlan) -> tuple[str, ...]:
    """Returns patterns of parameters with other shapes, as a head; none if many."""
    other = {
        path
        for path, leaf in planned.leaves.items()
        if "conflict" in leaf.actions
        and leaf.wanted is not None
        and leaf.found is not None
        and leaf.wanted.shape != leaf.found.shape
    }
    patterns: dict[str, None] = {}
    for problem in planned.problems:
        path = problem.leaf
        if path not in other:
            return ()
        wanted = planned.leaves[path].wanted
        if wanted is None or mirrors.is_optimizer_leaf(path, wanted):
            continue
        if any(re.fullmatch(pattern, path) for pattern in patterns):
            continue
        branch = _whole_branch(path, other, planned.leaves)
        name = re.escape(path) if branch is None else f"{re.escape(branch)}/.*"
        patterns[name] = None
        if len(patterns) > _NAMED:
            return ()
    return tuple(patterns)


def _whole_branch(
    path: LeafPath, leaves: Set[LeafPath], known: Iterable[LeafPath]
) -> LeafPath | None:
    """Returns the largest container of `path` with only `leaves`, or None."""
    found, parent = None, path.rpartition("/")[0]
    while parent and (found is None or "/" in parent):
        if any(p.startswith(f"{parent}/") and p not in leaves for p in known):
            break
        found, parent = parent, parent.rpartition("/")[0]
    return found


def _advise_on_items(problems: Sequence[Mismatch], stored: Stored) -> str:
    """Returns advice if only leaves of JSON items and left out items are missing."""
    names = [_state.tree.unescape(p.leaf.partition("/")[0]) for p in problems]
    texts = [name for name in dict.fromkeys(names) if stored.is_json(name)]
    others = stored.left_out.keys() & names
    if not {*names} <= {*texts, *others}:
        return ""
    advice = ""
    if others:
        advice = (
            "Restore another step, pass a state without the item, or, for the item of"
            ' an optimizer, pass load or checkpointer.restore optimizer="reinit". '
        )
    if texts:
        advice += (
            f"metadata(path).json[{texts[0]!r}] has the content of the item: leave it"
            " out of the state."
        )
    return advice.rstrip()


def _advise_on_width(
    wide: Sequence[LeafInfo], argument: str, *, has_state: bool
) -> str:
    """Returns advice on 64-bit leaves: how to keep all bits, or how to load 32 bits."""
    first: dict[str, LeafPath] = {}
    for wanted in wide:
        first.setdefault(mismatch.widest_dtype(wanted), wanted.path)
    casts = ", ".join(
        f'cast("{path}", "{dtype}"{"" if dtype == "float32" else ", lossy=True"})'
        for dtype, path in first.items()
    )
    if len(wide) > len(first):
        casts += ", and the same for the others"
    limit = " (values above 3.4e38 become inf)" if "float32" in first else ""
    if not has_state:
        return (
            "To keep all bits, set jax_enable_x64, or pass a state with numpy arrays"
            f" for these leaves; for 32 bits, pass {argument}=[{casts}]{limit}."
        )
    return (
        "To keep all bits, set jax_enable_x64, or use numpy arrays for these leaves of"
        f" the state; for 32 bits, use {' and '.join(first)}, and pass"
        f" {argument}=[{casts}]{limit}."
    )


def _advise_move(
    groups: Sequence[moved.Moved],
    renames: Sequence[str | None],
    argument: str,
    *,
    are_all: bool,
) -> str:
    """Returns advice on leaves stored in another container."""
    ways = []
    if all(renames):
        more = ", …" if len(renames) > _NAMED else ""
        named = ", ".join(map(str, renames[:_NAMED]))
        ways.append(f"pass {argument}=[{named}{more}]")
    [only] = groups if len(groups) == 1 else [None]
    if are_all and only is not None and not only.wanted:
        ways.append(f"nest the state below {only.found}/{_nesting_hint(only.found)}")
    elif not ways:
        ways.append(f"pass {argument}=[rename({{...}})]")
    text = ", or ".join(ways)
    return f"{text[0].upper()}{text[1:]}."


def _as_code(rename: tuple[str, str] | None) -> str | None:
    return None if rename is None else f'rename(r"{rename[0]}", r"{rename[1]}")'


def _nesting_hint(above: LeafPath) -> str:
    """Returns text that shows how to nest a state below `above`; empty if long."""
    if above == "0":
        return ", as (state,)"
    return f', as {{"{above}": state}}' if above.isidentifier() else ""
