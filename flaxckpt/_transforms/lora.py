"""Merges the low-rank updates of LoRA into the weights that they adapt.

Sources: `LoraLayer` of PEFT, https://github.com/huggingface/peft, v0.21;
`flax.nnx.LoRA`, https://github.com/google/flax, v0.12; `LoraProvider` of Qwix,
https://github.com/google/qwix, v0.1.8.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp

from flaxckpt import _state, _storage, _util, errors
from flaxckpt._state.leaf import Leaf, LeafTable
from flaxckpt._transforms import base as transforms_base
from flaxckpt._transforms import bounded_pattern
from flaxckpt._transforms.base import TableTransform
from flaxckpt._transforms.merge import merge
from flaxckpt._transforms.mirrors import outside
from flaxckpt._transforms.patterns import name_nearest
from flaxckpt._transforms.rows import ALONE, LeafRow, ValueMap, apply_rows
from flaxckpt._types import LeafPath, PathLike, Shape

_Kind: TypeAlias = Literal["peft", "peft embedding", "nnx", "qwix"]

ADAPTERS: tuple[tuple[_Kind, str, str], ...] = (
    ("peft", r"(.*)/lora_A(?:/default)?/weight", r"(.*)/lora_B(?:/default)?/weight"),
    (
        "peft embedding",
        r"(.*)/lora_embedding_A(?:/default)?",
        r"(.*)/lora_embedding_B(?:/default)?",
    ),
    ("nnx", r"(?:(.*)/)?lora_a", r"(?:(.*)/)?lora_b"),
    ("qwix", r"(.*)_lora_a", r"(.*)_lora_b"),
)
"""Kinds of adapters, each with the names of the pair; the groups must be equal."""

_WRAPPER = "base_model/model/"
"""The containers that PEFT puts around a model."""

UNSUPPORTED = (
    *("use_dora", "use_qalora", "lora_bias", "layer_replication", "use_bdlora"),
    *("trainable_token_indices", "alora_invocation_tokens", "target_parameters"),
    *("arrow_config", "monteclora_config", "kasa_config", "velora_config"),
)
"""Settings of PEFT with other updates than `alpha / rank * B @ A`."""

KEEPS_BASE = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base weights as they are. PiSSA, OLoRA
and others subtract the first update from them."""

_MAX_CONFIG_BYTES = 1 << 20


class _Adapter(NamedTuple):
    """A pair of leaves, `a` with the input axes and `b` with the output axes."""

    kind: _Kind
    module: str
    base: LeafPath
    a: LeafPath
    b: LeafPath


@dataclasses.dataclass(frozen=True)
class _MergeLora(TableTransform):
    source: str | None
    alpha: float | None
    rank: int | None

    def __call__(self, table: LeafTable) -> LeafTable:
        config: Mapping[str, Any] = {}
        if self.source is not None:
            table = merge(self.source)(table)
            config = _read_config(self.source)
        matcher = bounded_pattern.Matcher()
        adapters = _find_adapters(table, str(self))
        updates: dict[LeafPath, _Adapter] = {}
        pairs = {path for adapter in adapters for path in adapter[-2:]}
        whole = _whole_leaves(table, pairs)
        rows = []
        faults = []
        for adapter in adapters:
            try:
                other = updates.setdefault(adapter.base, adapter)
                if other is not adapter:
                    raise ValueError(
                        f"{other.a} updates it as well: merge one adapter, save the"
                        " result, then merge the other"
                    )
                fn = ValueMap(self._update_fn(adapter, table, config, matcher), "wide")
                rows.append(LeafRow(adapter[-3:], [(adapter.base, fn)]))
            except errors.CheckpointError:
                raise
            except ValueError as error:
                base, a, b = (f"{p}, {table[p].info}" for p in adapter[-3:])
                faults.append(f"{base}, by {a} and {b}: {error}")
        if faults:
            raise errors.OptionError(
                f"{self} cannot update {errors.one_or_rows(faults)}"
            )
        table = dict(table)
        for path, new in whole.items():
            table[new if new in updates else path] = _typed(table[path], table, new)
            if new in updates:
                rows.append(LeafRow([path], []))
                continue
            rows.append(LeafRow([path], [(new, ALONE)]))
            if new in table:
                rows.append(LeafRow([new], []))
        return apply_rows(table, rows, str(self))

    def _update_fn(
        self,
        adapter: _Adapter,
        table: LeafTable,
        config: Mapping[str, Any],
        matcher: bounded_pattern.Matcher,
    ) -> Callable[..., jax.Array]:
        """Returns the function from a base leaf and its adapter to the updated leaf."""
        infos = [table[path].info for path in adapter[-3:]]
        if any(_state.dtypes.kind(info.dtype or "") != "float" for info in infos):
            raise ValueError("wanted floats: dequantize them first")
        is_turned = bool(config.get("fan_in_fan_out"))
        base, a, b = (info.shape for info in infos)
        rank, delta = _delta_fn(adapter.kind, base, a, b, is_turned)
        factor = self._scale(adapter, rank, config, matcher)

        def update(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            return x + factor * delta(a, b)

        return update

    def _scale(
        self,
        adapter: _Adapter,
        rank: int,
        config: Mapping[str, Any],
        matcher: bounded_pattern.Matcher,
    ) -> float:
        """Returns the factor of an update; raises ValueError if it is unknown."""
        module = adapter.module.replace("/", ".")

        def find(patterns: str, default: str) -> Any:
            ends = config.get(patterns) or {}
            return _of_module(ends, module, config.get(default), matcher)

        wanted = find("rank_pattern", "r")
        wanted = self.rank if self.rank is not None else wanted
        if wanted is not None and wanted != rank:
            raise ValueError(
                f"wanted the rank {wanted}, but the adapter has the rank {rank}"
            )
        alpha = find("alpha_pattern", "lora_alpha")
        alpha = self.alpha if self.alpha is not None else alpha
        if alpha is not None:
            return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        if adapter.kind == "nnx":
            return 1.0
        raise ValueError(
            "its factor is unknown: pass alpha=, or the directory of the adapter, which"
            " has adapter_config.json"
        )

    def __str__(self) -> str:
        args = () if self.source is None else (self.source,)
        return transforms_base.call(
            "merge_lora", *args, alpha=self.alpha, rank=self.rank
        )


def merge_lora(
    source: PathLike | None = None,
    *,
    alpha: float | None = None,
    rank: int | None = None,
) -> TableTransform:
    r"""Merges LoRA adapters into the weights that they adapt.

    ```python
    load("llama/", state, transforms=[merge_lora("adapter/"), *to_flax])  # PEFT
    load("run", state, transforms=[merge_lora(alpha=16.0)])  # Qwix, Tunix
    load("run", state, transforms=[merge_lora()])  # nnx.LoRA, nnx.LoRALinear
    ```

    Each weight becomes `W + alpha / rank * A @ B`, computed in float32 and rounded once
    to the type of `W`, or of the state if there is one, and the adapter's leaves are
    removed. Adapters are found by their names: `lora_A` and `lora_B` of PEFT, `lora_a`
    and `lora_b` of NNX, `w_lora_a` and `w_lora_b` of Qwix. The weight of `nnx.LoRA` is
    its own `kernel`, that of its `base_module`, or, if it is around no module, that of
    the module around it, as in `nnx.LoRALinear`. Other leaves of PEFT's
    adapter (`modules_to_save`, biases) replace the leaves of the model. Moments of the
    weights stay as they are. There is no inverse: the sum does not have its parts.

    Args:
        source: An adapter that PEFT has saved: a directory with `adapter_config.json`,
            which gives alpha, its patterns, `use_rslora` and `fan_in_fan_out`. By
            default, the adapters are leaves of the checkpoint itself.
        alpha: The numerator of the factor. For NNX, whose update has no factor, the
            factor is 1 by default.
        rank: The rank that all adapters must have; by default, the rank that their
            shapes show.

    Raises:
        OptionError: When applied: there are no adapters, the weight of an adapter is
            missing or has another shape, the factor is unknown, or the configuration
            asks for other updates, such as DoRA.
        CheckpointError: When applied: `source` does not exist, or is damaged.
    """
    if alpha is not None:
        _util.arguments.check_number("alpha", alpha)
    if rank is not None:
        rank = _util.arguments.check_int("rank", rank, least=1)
    resolved = None if source is None else str(_storage.paths.resolve(source))
    return _MergeLora(resolved, alpha, rank)


# ---- the leaves ---------------------------------------------------------------------


def _find_adapters(table: LeafTable, what: str) -> list[_Adapter]:
    """Finds the adapters in a table; raises OptionError if there are none."""
    paths = [p for p, leaf in outside(table).items() if leaf.info.kind == "array"]
    below = count_below(paths)
    adapters = []
    faults: dict[LeafPath, str] = {}
    paired: set[LeafPath] = set()
    for kind, stem, a, b in find_pairs(paths, faults):
        paired |= {a, b}
        bases = possible_bases(kind, stem, below)
        base = [path for path in bases if path in table]
        if base:
            module = stem.rpartition(_WRAPPER)[2]
            adapters.append(_Adapter(kind, module, base[0], a, b))
        else:
            nearest = name_nearest(bases[0], paths)
            faults[a] = f"no weight {' or '.join(bases)}{nearest}"
    for path in paths:
        if path not in paired and path not in faults and _is_other_part(path):
            faults[path] = "is a part of another kind of update"
    if faults or not adapters:
        rows = errors.rows(f"{path}: {why}" for path, why in faults.items())
        found = f"leaves that do not fit:\n{rows}" if faults else "no adapters"
        raise errors.OptionError(
            f"{what} found {found}\nAdapters are found by the names of PEFT, NNX and"
            " Qwix, beside the weight that they adapt: merge them before other"
            " transforms rename leaves."
        )
    return adapters


def find_pairs(
    paths: Collection[LeafPath],
    faults: dict[LeafPath, str],
    kinds: Collection[_Kind] = get_args(_Kind),
) -> Iterator[tuple[_Kind, str, LeafPath, LeafPath]]:
    """Yields kind, stem and leaves of each pair; adds halves of pairs to `faults`."""
    for kind, *patterns in ADAPTERS:
        if kind not in kinds:
            continue
        firsts, seconds = (
            {m[1] or "": path for path in paths if (m := re.fullmatch(pattern, path))}
            for pattern in patterns
        )
        for stem in {**firsts, **seconds}:
            if stem in firsts and stem in seconds:
                yield kind, stem, firsts[stem], seconds[stem]
            else:
                path = firsts.get(stem) or seconds[stem]
                faults[path] = "the other leaf of the pair is missing"


def _is_other_part(path: LeafPath) -> bool:
    return any(part.lower().startswith("lora_") for part in path.split("/")[-2:])


def count_below(paths: Iterable[LeafPath]) -> Counter[LeafPath]:
    """Returns the number of leaves in each container."""
    return Counter(before for path in paths for before in _state.tree.prefixes(path))


def possible_bases(
    kind: _Kind, stem: str, below: Mapping[LeafPath, int]
) -> list[LeafPath]:
    """Returns the possible paths of the weight of an adapter, the nearest first.

    A module of NNX has the weight itself, is around a module with it (`nnx.LoRA`), or
    is, without other leaves, in the module with it (`nnx.LoRALinear`): `below` has the
    numbers of leaves in containers.
    """
    if kind == "qwix":
        return [stem]
    if kind == "nnx":
        around = [stem, f"{stem}/base_module"]
        if stem and below[stem] == 2:
            around.append(stem.rpartition("/")[0])
        return [f"{path}/kernel".lstrip("/") for path in around]
    before, _, module = stem.rpartition(_WRAPPER)
    return [f"{before}{module}/weight"]


def _whole_leaves(table: LeafTable, pairs: set[LeafPath]) -> dict[LeafPath, LeafPath]:
    """Returns the leaves in PEFT's wrapper that replace leaves of the model."""
    if not any(_WRAPPER in path for path in pairs):
        return {}
    inside = [path for path in table if _WRAPPER in path and path not in pairs]
    return {
        path: "".join(path.rpartition(_WRAPPER)[::2]).replace("/base_layer/", "/")
        for path in inside
    }


def _typed(leaf: Leaf, table: LeafTable, path: LeafPath) -> Leaf:
    """Returns a leaf with the type of the leaf of the model that it replaces."""
    if path not in table or leaf.info.dtype is None:
        return leaf
    info = dataclasses.replace(leaf.info, dtype=table[path].info.dtype)
    return dataclasses.replace(leaf, info=info)


# ---- the configuration --------------------------------------------------------------


def _read_config(source: str) -> Mapping[str, Any]:
    """Returns the configuration of an adapter; raises an error for other updates."""
    path = _storage.paths.from_text(source)
    directory = path.parent if path.suffix == ".safetensors" else path
    file = directory / "adapter_config.json"
    try:
        content = _storage.of(file).read(file, max_bytes=_MAX_CONFIG_BYTES)
        config = _util.json_limits.loads(content)
    except FileNotFoundError:
        raise errors.CheckpointFormatError(
            f"{file} does not exist: wanted an adapter of PEFT. Write its config, or"
            f" merge({source!r}) and pass alpha= to merge_lora"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise errors.CheckpointFormatError(
            f"{file} cannot be read: {errors.one_line(error)}"
        ) from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        found = config.get("peft_type") if isinstance(config, dict) else config
        raise errors.OptionError(
            f"{file}: wanted the peft_type 'LORA', found {found!r:.80}"
        )
    if others := [name for name in UNSUPPORTED if config.get(name)]:
        raise errors.OptionError(
            f"{file} has {', '.join(others)}, whose updates cannot be merged as"
            " alpha / rank * B @ A: merge the adapter with PEFT"
        )
    if (initial := config.get("init_lora_weights")) not in KEEPS_BASE:
        raise errors.OptionError(
            f"{file} has init_lora_weights={initial!r:.80}, which changes the base"
            " weights: merge the adapter with PEFT, or save it there as a plain adapter"
            " (path_initial_model_for_weight_conversion)"
        )
    _check_numbers(config, file)
    return config


def _check_numbers(config: Mapping[str, Any], file: object) -> None:
    """Raises OptionError unless the numbers of a configuration are numbers."""
    for name, of_modules in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        patterns = config.get(of_modules) or {}
        values = patterns.values() if isinstance(patterns, dict) else [patterns]
        for value in (config.get(name), *values):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise errors.OptionError(
                    f"{file}: wanted numbers for {name} and {of_modules}, found"
                    f" {value!r:.80}"
                )


def _of_module(
    patterns: Mapping[str, Any],
    module: str,
    default: Any,
    matcher: bounded_pattern.Matcher,
) -> Any:
    """Returns the value for a module; the first pattern that ends its name wins."""
    for pattern, value in patterns.items():
        try:
            if matcher.matches_end(pattern, module):
                return value
        except ValueError as error:
            raise errors.OptionError(
                f"the pattern {errors.printable(pattern)!r:.80} of the adapter's config"
                f" cannot be used: {error}; pass alpha= and rank="
            ) from None
    return default


# ---- the update ---------------------------------------------------------------------

_DeltaFn: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]


def _delta_fn(
    kind: _Kind, shape: Shape, a: Shape, b: Shape, is_turned: bool
) -> tuple[int, _DeltaFn]:
    """Returns the rank, and the function from an adapter to the product of its parts.

    If `is_turned`, the input axis is first. Raises ValueError for another shape.
    """
    if kind in ("nnx", "qwix"):
        return a[-1] if a else 0, _flax_delta_fn(shape, a, b)
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        raise ValueError("its parts are not two matrices of one rank")
    # Embeddings have a row for each token, as kernels that are turned.
    formula = "ri,or->io" if is_turned or kind == "peft embedding" else "ri,or->oi"
    product = (a[1], b[0]) if formula.endswith("io") else (b[0], a[1])
    if product != shape:
        raise ValueError(f"its product has the shape {product}")
    return a[0], _einsum(formula, shape)


def _flax_delta_fn(shape: Shape, a: Shape, b: Shape) -> _DeltaFn:
    """Returns the function from an adapter of NNX or Qwix to the product of its parts.

    `a` has the contracted axes of the kernel and the rank, `b` the rank and the other
    axes; axes of stacked layers come before, and those of a part may be joined to one.
    """
    found: dict[tuple[int, tuple[int, ...]], _DeltaFn] = {}
    for batch in range(min(len(a), len(b))):
        stacked, inner, outer = shape[:batch], a[batch:-1], b[batch + 1 :]
        is_batch = a[:batch] == b[:batch] == stacked
        if not is_batch or b[batch] != a[-1]:
            continue
        rest = shape[batch:]
        letters = "abcdefgh"[: len(inner) + len(outer)]
        for axes in itertools.combinations(range(len(rest)), len(inner)):
            others = [i for i in range(len(rest)) if i not in axes]
            of_inner = tuple(rest[i] for i in axes)
            of_outer = tuple(rest[i] for i in others)
            if (of_inner, of_outer) == (inner, outer):
                in_place = sorted(zip([*axes, *others], letters, strict=True))
                product = "".join(letter for _, letter in in_place)
                formula = _formula(batch, letters, len(inner), product)
                found[batch, axes] = _einsum(formula, shape)
        for count in range(1, len(rest)) if len(inner) == len(outer) == 1 else ():
            joined = (math.prod(rest[:count]), math.prod(rest[count:]))
            if len(rest) > 2 and joined == (*inner, *outer):
                formula = _formula(batch, letters, 1, letters)
                found[batch, tuple(range(count))] = _einsum(formula, shape)
    batches = {batch for batch, _ in found}
    if len(batches) == 1 and len(shape) - min(batches) == 2:
        return found[min(batches), (0,)]  # the input axis of a kernel is the first
    if len(found) != 1:
        how = "in several ways" if found else "in no way"
        raise ValueError(f"its product has the axes of the weight {how}")
    return next(iter(found.values()))


def _formula(batch: int, letters: str, inner: int, product: str) -> str:
    """Returns the product of two parts over their rank, for `einsum`."""
    stacked = "uvwxyz"[:batch]
    first, second = letters[:inner], letters[inner:]
    return f"{stacked}{first}r,{stacked}r{second}->{stacked}{product}"


def _einsum(formula: str, shape: Shape) -> _DeltaFn:
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        whole = jnp.einsum(formula, a, b, precision=jax.lax.Precision.HIGHEST)
        return jnp.reshape(whole, shape)

    return product
