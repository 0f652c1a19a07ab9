"""Adapters of LoRA under the names of PEFT, by the map of the model that they adapt.

The map of a kernel tells the module of torch, and the axes that are joined there: the
leaves of an adapter are joined alike.

Sources: `LoraLayer` of PEFT, https://github.com/huggingface/peft, v0.21; `LoraProvider`
of Qwix, https://github.com/google/qwix, v0.1.8; `flax.nnx.LoRA`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxckpt import _state, errors
from flaxckpt._maps import family as maps_family
from flaxckpt._maps import named
from flaxckpt._maps.checked import CheckedMap
from flaxckpt._state.leaf import LeafTable
from flaxckpt._transforms import affine, export, lora
from flaxckpt._transforms import base as transforms_base
from flaxckpt._transforms import remap as transforms_remap
from flaxckpt._transforms.axis_form import Form
from flaxckpt._transforms.base import TableTransform
from flaxckpt._transforms.rows import LeafRow, apply_rows
from flaxckpt._types import LeafPath
from flaxckpt.transforms import Transform

MODEL = "base_model/model"
"""The containers that PEFT puts around a model."""

# ---- pairs --------------------------------------------------------------------------


class Pair(NamedTuple):
    """The two leaves of an adapter: `a` has the input axes, `b` the output axes.

    `bases` are the possible paths of the adapted kernel.
    """

    kind: str
    bases: tuple[LeafPath, ...]
    a: LeafPath
    b: LeafPath


def find_pairs(table: LeafTable) -> list[Pair]:
    """Returns the adapters in a table, in the order of their first leaves.

    Raises OptionError if there are none, or a leaf has no other, or is another
    update's.
    """
    below = lora.count_below(
        path for path, leaf in table.items() if leaf.info.kind != "empty"
    )
    pairs = []
    faults: dict[LeafPath, str] = {}
    for kind, stem, a, b in lora.find_pairs(table, faults, ("nnx", "qwix")):
        pairs.append(Pair(kind, tuple(lora.possible_bases(kind, stem, below)), a, b))
    taken = {path for pair in pairs for path in (pair.a, pair.b)}
    for path in table:
        is_lora = any("lora_" in part.lower() for part in path.split("/")[-2:])
        if is_lora and path not in taken and path not in faults:
            faults[path] = "is of another kind of update"
    if faults or not pairs:
        rows = errors.rows(f"{path}: {why}" for path, why in faults.items())
        found = f"leaves that are no part of adapters:\n{rows}" if faults else "none"
        raise errors.OptionError(
            f"wanted adapters, found {found}\nAdapters have the names of NNX, lora_a"
            " and lora_b, or of Qwix, w_lora_a and w_lora_b: rename them, or drop other"
            " leaves."
        )
    return pairs


# ---- the transform ------------------------------------------------------------------


class _Part(NamedTuple):
    """What an adapter is for a module of torch.

    `taken` is the axis of the second leaf, and the position there, that is the
    module's; None for all.
    """

    module: LeafPath
    taken: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class ToPeft(TableTransform):
    """Gives adapters the names and shapes of PEFT; leaves out all other leaves.

    `map` are transforms from the published model to the parameters: one `remap`, and
    changes of values that adapters have no part in. If `needs_alpha`, adapters whose
    update has a factor are refused.
    """

    map: tuple[Transform, ...]
    needs_alpha: bool = False

    def __call__(self, table: LeafTable) -> LeafTable:
        params = export.without_optimizer(table)
        pairs = find_pairs(params)
        parts: dict[LeafPath, list[_Part]] = {}
        faults: dict[LeafPath, str] = {}
        of_modules: dict[LeafPath, LeafPath] = {}
        remap = self._find_remap()
        for pair in pairs:
            try:
                found = self._parts(pair, remap, params)
                for part in found:
                    other = of_modules.setdefault(part.module, pair.a)
                    if other != pair.a:
                        raise _UnfitError(f"{other} updates {part.module}, too")
                parts[pair.a] = parts[pair.b] = found
            except _UnfitError as error:
                faults[pair.a] = str(error)
        if faults:
            raise errors.OptionError(
                f"{len(faults)} of {len(pairs)} adapters cannot be written for PEFT:\n"
                + errors.rows(f"{path}: {why}" for path, why in faults.items())
                + "\nMerge them, merge_lora(), and export the model; or leave them out:"
                " transforms=[drop(pattern)]."
            )
        ends = {pair.a: "lora_A" for pair in pairs}
        ends |= {pair.b: "lora_B" for pair in pairs}
        rows = []
        for path, listed in parts.items():
            names = [f"{MODEL}/{part.module}/{ends[path]}/weight" for part in listed]
            is_first = ends[path] == "lora_A"
            fns = [_first if is_first else _second_fn(part.taken) for part in listed]
            rows.append(LeafRow([path], list(zip(names, fns, strict=True))))
        return apply_rows({path: params[path] for path in parts}, rows, str(self))

    def _find_remap(self) -> transforms_remap.Remap:
        """Returns the only `remap` of the map, which may have no other transforms."""
        changes = [t.remap if isinstance(t, CheckedMap) else t for t in self.map]
        remaps = [t for t in changes if isinstance(t, transforms_remap.Remap)]
        known = (
            transforms_remap.Remap,
            affine.Affine,
            maps_family.NewNames,
            maps_family.Copies,
        )
        others = [t for t in changes if not isinstance(t, known)]
        if len(remaps) != 1 or others:
            raise errors.OptionError(
                "the map must be one remap, and perhaps offset and scale, to tell the"
                " modules of adapters; it is"
                f" {', '.join(transforms_base.describe(self.map))}"
            )
        return remaps[0]

    def _parts(
        self, pair: Pair, remap: transforms_remap.Remap, table: LeafTable
    ) -> list[_Part]:
        """Returns the modules of torch that an adapter is for."""
        a, b = table[pair.a].info, table[pair.b].info
        if any(_state.dtypes.kind(info.dtype or "") != "float" for info in (a, b)):
            raise _UnfitError(f"wanted floats, found {a} and {b}")
        if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[0]:
            raise _UnfitError(f"{a} and {b} are not two matrices of one rank")
        if self.needs_alpha and pair.kind == "qwix":
            raise _UnfitError("its update has a factor: pass alpha=")
        for base, rule in itertools.product(pair.bases, remap.rules):
            sizes = {**remap.sizes, **rule.words}
            values = rule.target.match(base, sizes)
            if values is not None:
                self._check_base(base, pair, table)
                return _parts_of(rule, values, sizes, len(b.shape))
        raise _UnfitError(f"the map has no row for {' or '.join(pair.bases)}")

    def _check_base(self, base: LeafPath, pair: Pair, table: LeafTable) -> None:
        for change in self.map:
            if isinstance(change, affine.Affine) and change.pattern.fullmatch(base):
                raise _UnfitError(f"{change} changes the values of {base}")
        a, b = table[pair.a].info.shape, table[pair.b].info.shape
        shape = table[base].info.shape if base in table else None
        if shape is not None and math.prod(shape) != math.prod((*a[:-1], *b[1:])):
            raise _UnfitError(
                f"the product of {a} and {b} does not have the size of {base}, {shape}"
            )

    def __str__(self) -> str:
        return transforms_base.call("to_peft", list(transforms_base.describe(self.map)))


class _UnfitError(Exception):
    """An adapter that PEFT does not have."""


def _parts_of(
    rule: transforms_remap.RemapRule,
    values: Mapping[str, int],
    sizes: Mapping[str, int],
    axes: int,
) -> list[_Part]:
    """Returns the modules whose weights a kernel is made of.

    `values` are those of the indices in its path; `axes` is the number of axes of the
    second leaf.
    """
    name = rule.source.text
    if not name.endswith("/weight") or "emb" in name or re.search("wte|wpe", name):
        raise _UnfitError(f"its weight, {name}, is not that of a linear layer")
    if rule.scattered:
        raise _UnfitError(f"it is for a part of {name} alone")
    words = [axis for axis in rule.gathered if axis in rule.source.counts]
    if len(words) != len(rule.gathered) or len(words) > 1:
        raise _UnfitError(
            f"{name} are stacked: take the layers apart first, with unstack"
        )
    if rule.form is not None and not _keeps_order(rule.form, len(words)):
        raise _UnfitError(f"the form {rule.form.text} of {name} reorders values")
    if not words:
        return [_Part(rule.source.format(values, sizes).removesuffix("/weight"))]
    assert rule.form is not None
    [word] = words
    joined = {*rule.form.old[1], word}
    outer = [axis for axis in rule.form.new if {*axis} <= joined]
    if (word,) not in outer or axes != 1 + len(outer):
        raise _UnfitError(f"its second leaf has {axes} axes, wanted {1 + len(outer)}")
    return [
        _Part(
            rule.source.format({**values, word: at}, sizes).removesuffix("/weight"),
            (1 + outer.index((word,)), at),
        )
        for at in range(rule.source.counts[word])
    ]


def _keeps_order(form: Form, first: int) -> bool:
    """Returns True if the names of an old axis, from `first` on, keep their order."""
    order = [name for axis in form.new for name in axis]
    return all(
        [*axis] == [name for name in order if name in axis] for axis in form.old[first:]
    )


def _first(a: jax.Array) -> jax.Array:
    return jnp.reshape(a, (-1, a.shape[-1])).T


def _second_fn(taken: tuple[int, int] | None) -> Callable[[jax.Array], jax.Array]:
    def second(b: jax.Array) -> jax.Array:
        if taken is not None:
            b = jnp.take(b, taken[1], axis=taken[0])
        return jnp.reshape(b, (b.shape[0], -1)).T

    return second


# ---- maps by name -------------------------------------------------------------------


def find_map(
    name: str,
    config: Mapping[str, Any] | None,
    table: LeafTable,
    *,
    target: str | None = None,
    prefix: LeafPath | None = None,
) -> Sequence[Transform]:
    """Returns the map of a model; like `find_for_export`, but may lack kernels."""
    family = named.family_of_config(name, config)
    assert config is not None
    params = export.without_optimizer(table)
    pairs = find_pairs(params)
    bases = {base: params[pair.a] for pair in pairs for base in pair.bases}
    counts = {}
    for candidate in named.candidates(family, config, bases, target, prefix):
        kernels = [p for p in pairs if not candidate.matched.isdisjoint(p.bases)]
        counts[candidate] = len(kernels)
        if len(kernels) == len(pairs):
            return candidate.make()
    best = max(counts, key=counts.__getitem__)
    lacking = [p.bases[0] for p in pairs if best.matched.isdisjoint(p.bases)]
    raise errors.OptionError(
        f"no layout of maps.{family.name} has the kernels of all {len(pairs)} adapters:"
        f" {best.target} lacks {len(lacking)}:\n{errors.rows(lacking)}\nPass target and"
        " prefix, or a list with one remap as the map."
    )
