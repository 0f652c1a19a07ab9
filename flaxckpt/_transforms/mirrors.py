"""Finds the optimizer leaves that mirror parameters.

A *mirror* of a parameter is at the same place in its own tree: a moment. Mirrors come
in *slots*, `opt_state/0/mu`: the names below a slot equal those below the *root* of the
parameters, `params`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from flaxckpt import _state
from flaxckpt._state.leaf import Leaf, LeafInfo, LeafTable
from flaxckpt._types import LeafPath

_ROOTS = frozenset(("params", "target"))
"""Names of containers of all parameters, if not outermost."""

_BELOW_PARAMS = frozenset(("m", "v", "v_row", "v_col"))
"""Fields that T5X's own optimizers have below each parameter."""

_DEEPEST_ROOT = 3
_CANDIDATES = 8


def is_optimizer_leaf(path: LeafPath, info: LeafInfo) -> bool:
    """Returns True for a leaf with a role in an optimizer, or in a container of one."""
    return info.role is not None or is_in_optimizer(path)


def is_in_optimizer(path: LeafPath) -> bool:
    """Returns True for the path of a leaf below the usual name of an optimizer."""
    return not _state.optimizer_roles.NAMES.isdisjoint(path.split("/")[:-1])


_HELD: Mapping[str, Mapping[str, int | Literal["copy"]]] = {
    "DoGState": {"init_params": "copy"},
    "DoWGState": {"init_params": "copy"},
    "FactoredState": {"v_row": 2, "v_col": 2, "v": 2},
    "MadgradState": {"grad_sum_sq": 2, "s": 1, "x0": "copy"},
    "MechanicState": {"x0": "copy"},
    "MuonState": {"mu": 1},
    "ProdigyState": {"params0": "copy"},
    "ScaleByAdamState": {"mu": 1, "nu": 2},
    "ScaleByAdanState": {"m": 1, "v": 1, "n": 2, "g": 1},
    "ScaleByAdemamixState": {"m1": 1, "m2": 1, "nu": 2},
    "ScaleByAmsgradState": {"mu": 1, "nu": 2, "nu_max": 2},
    "ScaleByBeliefState": {"mu": 1, "nu": 2},
    "ScaleByLBFGSState": {
        "params": "copy",
        "updates": 1,
        "diff_updates_memory": 1,
        "diff_params_memory": -1,
    },
    "ScaleByLionState": {"mu": 1},
    "ScaleByRStdDevState": {"mu": 1, "nu": 2},
    "ScaleByRStdDevWithCountState": {"mu": 1, "nu": 2},
    "ScaleByRmsState": {"nu": 2},
    "ScaleByRmsWithCountState": {"nu": 2},
    "ScaleByRssState": {"sum_of_squares": 2},
    "ScaleBySimplifiedAdEMAMixState": {"m": 1, "n": 2},
    "ScheduleFreeState": {"z": "copy"},
}
"""Class and field of a mirror -> the power of the gradient that it holds, or a copy.

`TraceState`, `EmaState` and `ScaleByOptimisticGradientState` are absent: behind another
transform, as in `rmsprop`, they hold updates, and nothing in their roles says so.
"""


def held(leaf: Leaf) -> int | Literal["copy"] | None:
    """Returns the power of the gradient in a mirror, or "copy"; None if unknown."""
    role = leaf.info.role
    return None if role is None else _HELD.get(role.state_class, {}).get(role.field)


class Slot(NamedTuple):
    """The place of mirrors, before and after the parameter's name: `opt_state/0/mu`."""

    head: str
    tail: str

    def path(self, name: LeafPath) -> LeafPath:
        return "/".join(part for part in (self.head, name, self.tail) if part)


class Mirror(NamedTuple):
    """A leaf that mirrors a parameter; `name` is the path below the root of all."""

    param: LeafPath
    name: LeafPath
    slot: Slot

    @property
    def root(self) -> str:
        """The path before the parameter's name, with its final slash."""
        return self.param.removesuffix(self.name)

    def renamed(self, param: LeafPath, *, has_root: bool) -> LeafPath:
        """Returns the new name if the parameter moves to the path `param`.

        `has_root` is False if the first key of the path is no root, because other
        parameters that move with this one have another first key.
        """
        if param.startswith(self.root):
            return param.removeprefix(self.root)
        return _below_root(param, has_root=has_root)


@dataclasses.dataclass(frozen=True, slots=True)
class Mirrors:
    """All mirrors in a table.

    Attributes:
        known: Leaf path -> the mirrored parameter.
        unclear: Leaf path -> its slot, and root -> parameter, for leaves with several
            possible parameters.
        lost: Leaves that mirror an unknown parameter.
    """

    known: Mapping[LeafPath, Mirror]
    unclear: Mapping[LeafPath, tuple[Slot, Mapping[str, LeafPath]]]
    lost: Sequence[LeafPath]


def _below_root(path: LeafPath, *, has_root: bool) -> LeafPath:
    """Returns the part of a path below `params` or, if a root, the first key."""
    parts = path.split("/")
    for i, part in enumerate(parts[:_DEEPEST_ROOT]):
        if part in _ROOTS and i + 1 < len(parts):
            return "/".join(parts[i + 1 :])
    return ("/".join(parts[1:]) or path) if has_root else path


def find_mirrors(table: LeafTable) -> Mirrors:
    """Finds the mirrors in a table, by recorded roles or by names.

    Without roles, a slot is a container in an optimizer's state with the same names as
    below a root. Of several roots, the nearest is chosen: a discriminator's moments are
    beside its own parameters. Next comes a root called `params`, and then the root that
    shares most names with the slot.
    """
    params: dict[LeafPath, None] = {}  # ordered, so that all processes agree
    by_role: dict[Slot, dict[LeafPath, LeafPath]] = {}
    by_path: dict[Slot, dict[LeafPath, LeafPath]] = {}
    empties = []
    for path, leaf in table.items():
        role = leaf.info.role
        if leaf.info.kind == "empty":
            empties.append(path)
        elif role is not None and role.state_class:
            slot = _slot_of_role(path, role.param)
            if slot is not None:
                by_role.setdefault(slot, {})[role.param] = path
        elif is_optimizer_leaf(path, leaf.info):
            for slot, name in _possible_slots(path):
                by_path.setdefault(slot, {})[name] = path
        else:
            params[path] = None
    by_role = _below_params(by_role, params)
    roots = _Roots(params, [*by_role.values(), *by_path.values()])
    settled = _SettledMirrors(params, roots)
    for slot, members in by_role.items():
        settled.settle(slot, members, strict=False)
    heads: set[str] = set()
    for slot in sorted(by_path, key=lambda slot: slot.head.count("/")):
        # All names in a slot must match, else the container holds several slots.
        inside = not heads.isdisjoint(_state.tree.prefixes(slot.head))
        if not inside and settled.settle(slot, by_path[slot], strict=True):
            heads.add(slot.head)
    for path in empties:
        settled.settle_empty(path)
    lost = [
        path
        for members in by_role.values()
        for path in members.values()
        if path not in settled.known and path not in settled.unclear
    ]
    return Mirrors(settled.known, settled.unclear, lost)


def outside(table: LeafTable) -> LeafTable:
    """Returns the leaves of no optimizer, without empty containers."""
    mirrors = find_mirrors(table)
    return {
        path: leaf
        for path, leaf in table.items()
        if leaf.info.kind != "empty"
        and leaf.info.role is None
        and path not in mirrors.known
        and path not in mirrors.unclear
    }


def is_parameter(info: LeafInfo) -> bool:
    """Returns True for a leaf of no optimizer that is an array, and no counter."""
    return info.kind == "array" and (
        bool(info.shape) or _state.dtypes.kind(info.dtype or "") not in ("int", "uint")
    )


def _below_params(
    by_role: Mapping[Slot, Mapping[LeafPath, LeafPath]], params: Iterable[LeafPath]
) -> dict[Slot, dict[LeafPath, LeafPath]]:
    """Splits slots that have several leaves for each parameter, as SM3's have.

    Of `mu/kernel/0` and `mu/kernel/1`, the slots have the tails `0` and `1`.
    """
    names = {name for path in params for _, name in _splits(path)}
    divided: dict[Slot, dict[LeafPath, LeafPath]] = {}
    for slot, members in by_role.items():
        if not names.isdisjoint(members):
            divided.setdefault(slot, {}).update(members)
            continue
        for name, path in members.items():
            param, _, last = name.rpartition("/")
            if param in names:
                tail = f"{last}/{slot.tail}" if slot.tail else last
                divided.setdefault(Slot(slot.head, tail), {})[param] = path
            else:
                divided.setdefault(slot, {})[name] = path
    return divided


class _SettledMirrors:
    def __init__(self, params: Mapping[LeafPath, None], roots: _Roots) -> None:
        self.known: dict[LeafPath, Mirror] = {}
        self.unclear: dict[LeafPath, tuple[Slot, dict[str, LeafPath]]] = {}
        self._params = params
        self._roots = roots
        self._root_of_head: dict[str, tuple[Slot, str]] = {}

    def settle(
        self, slot: Slot, members: Mapping[LeafPath, LeafPath], *, strict: bool
    ) -> bool:
        """Finds the root of a slot and returns True if there is a root."""
        candidate_roots = self._roots.of(slot, members, strict=strict)
        for name, path in members.items():
            if len(candidate_roots) == 1 and candidate_roots[0] + name in self._params:
                self.known[path] = Mirror(candidate_roots[0] + name, name, slot)
                self._root_of_head[slot.head] = slot, candidate_roots[0]
            elif len(candidate_roots) > 1:
                candidates = {root: root + name for root in candidate_roots}
                self.unclear[path] = slot, candidates
        return bool(candidate_roots)

    def settle_empty(self, path: LeafPath) -> None:
        """Records an empty container in a slot as a mirror, such as a masked moment."""
        for head in _state.tree.prefixes(path):
            if head in self._root_of_head:
                slot, root = self._root_of_head[head]
                name = path[len(head) + 1 :]
                if not slot.tail and root + name in self._params:
                    self.known[path] = Mirror(root + name, name, slot)
                return


def _slot_of_role(path: LeafPath, param: LeafPath) -> Slot | None:
    head = _state.tree.before(path, param) if param else None
    return Slot(head, path[len(f"{head}/{param}/") :]) if head else None


def _possible_slots(path: LeafPath) -> Iterator[tuple[Slot, LeafPath]]:
    """Yields every possible slot of an optimizer leaf, and its name in the slot."""
    parts = path.split("/")
    first = (
        next((i for i, p in enumerate(parts) if p in _state.optimizer_roles.NAMES), 0)
        + 1
    )
    tail = parts[-1] if parts[-1] in _BELOW_PARAMS and "param_states" in parts else ""
    end = len(parts) - bool(tail)
    for start in range(first, end):
        yield Slot("/".join(parts[:start]), tail), "/".join(parts[start:end])


class _Roots:
    """Finds roots with parameters of given names."""

    def __init__(
        self,
        params: Mapping[LeafPath, None],
        slots: Sequence[Mapping[LeafPath, LeafPath]],
    ) -> None:
        self._params = params
        self._names = {name for path in params for _, name in _splits(path)}
        wanted = {self._first(members) for members in slots}
        self._beside: dict[tuple[LeafPath, str], list[str]] = {}
        for path in params:
            for root, name in _splits(path):
                if name in wanted:
                    for beginning in _state.tree.prefixes(root):
                        near_roots = self._beside.setdefault((name, beginning), [])
                        if len(near_roots) <= _CANDIDATES:
                            near_roots.append(root)

    def _first(self, members: Mapping[LeafPath, LeafPath]) -> LeafPath:
        """Returns the first name shared with a parameter; else the first."""
        first = next(iter(members))
        if first in self._names:
            return first
        return next((name for name in members if name in self._names), first)

    def of(
        self, slot: Slot, members: Mapping[LeafPath, LeafPath], *, strict: bool
    ) -> list[str]:
        """Returns the best roots for a slot; if `strict`, those with all its names."""
        first = self._first(members)
        for beginning in _state.tree.prefixes(f"{slot.head}/x"):
            near = self._beside.get((first, beginning), [])
            counts = {
                root: sum(root + name in self._params for name in members)
                for root in near
            }
            most = max(counts.values(), default=0)
            if most == 0 or (strict and most < len(members)):
                continue
            best = [root for root in near if counts[root] == most]
            named = [r for r in best if r.rstrip("/").rpartition("/")[2] in _ROOTS]
            best = named or best
            if len(best) > 1:
                words = set(slot.head.split("/"))
                shared = {root: len(words & set(root.split("/"))) for root in best}
                best = [r for r in best if shared[r] == max(shared.values())]
            return best
        return []


def _splits(path: LeafPath) -> Iterator[tuple[str, LeafPath]]:
    """Yields each possible root, with its final slash, and the name below it."""
    yield "", path
    end = path.find("/")
    for _ in range(_DEEPEST_ROOT):
        if end < 0:
            return
        yield path[: end + 1], path[end + 1 :]
        end = path.find("/", end + 1)
