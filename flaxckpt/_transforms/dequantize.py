"""Multiplies quantized weights by the scales beside them: `dequantize`.

Sources: `weight_dequant` of https://github.com/deepseek-ai/DeepSeek-V3 (blocks of
`weight_scale_inv`), and the schemes of compressed-tensors,
https://github.com/vllm-project/compressed-tensors (`weight_scale`, `input_scale`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxckpt import _state, _util, errors
from flaxckpt._state.leaf import Leaf, LeafTable
from flaxckpt._transforms import base, patterns
from flaxckpt._transforms.base import TableTransform, Transform
from flaxckpt._transforms.rows import LeafRow, ValueMap, apply_rows
from flaxckpt._types import LeafPath, Shape

_SCALES = ("_scale_inv", "_scale")
"""Ends of the names of scales, after the name of the weight. Both are factors."""

_OF_ACTIVATIONS = ("input_scale", "output_scale")
"""Scales of inputs and outputs beside a weight, which weights do not need."""

_OTHER_SCHEMES = (
    *(("", end) for end in ("_zero_point", "_g_idx", "_global_scale", "_scale_2")),
    *(("", end) for end in (".absmax", "/absmax")),
    *(("_packed", "_scale"), ("_blocks", "_scales")),
    *(("qweight", "scales"), ("weight", "SCB")),
)
"""Ends of the names of a weight and of a leaf beside it, of schemes with more than a
factor: compressed-tensors, NVFP4, bitsandbytes, MXFP4, GPTQ and AWQ."""

_BLOCK = 128
"""The usual size of blocks, as in DeepSeek's models."""

_TILE = 16
"""Blocks of programs for accelerators have a multiple of this size."""


class _Pair(NamedTuple):
    """The path of a weight's scales, and the size of the blocks of each axis."""

    scale: LeafPath
    blocks: Shape


@dataclasses.dataclass(frozen=True)
class _Dequantize(TableTransform):
    pattern: re.Pattern[str]
    scale: str | None
    dtype: str
    block: int | tuple[int, ...] | None

    def __call__(self, table: LeafTable) -> LeafTable:
        pairs = self._find(table)
        fns: dict[Shape, ValueMap] = {}
        unneeded = {
            beside
            for path in pairs
            for name in _OF_ACTIVATIONS
            if (beside := f"{path.rpartition('/')[0]}/{name}".lstrip("/")) in table
        }

        rows = [LeafRow([path], []) for path in unneeded - pairs.keys()]
        for path, (scale, blocks) in pairs.items():
            fn = fns.setdefault(blocks, ValueMap(_multiply_by_blocks(blocks)))
            rows.append(LeafRow([path, scale], [(path, fn)]))
        new = apply_rows(table, rows, str(self), moves=False)
        for path in pairs:
            info = dataclasses.replace(new[path].info, dtype=self.dtype)
            new[path] = dataclasses.replace(new[path], info=info)
        return new

    def _find(self, table: LeafTable) -> dict[LeafPath, _Pair]:
        """Returns the quantized weights; raises an error with all that do not fit."""
        pairs: dict[LeafPath, _Pair] = {}
        faults: dict[LeafPath, str] = {}
        matches = base.matches(self.pattern, table)
        for path, match in matches.items():
            leaf = table[path]
            if leaf.info.kind != "array":
                continue
            names = self._scale_names(path, match)
            found = [name for name in names if name in table]
            other = _find_other_scheme(path, table)
            if other is not None:
                faults[path] = f"{leaf.info} has {other} beside it, of another scheme"
            elif not _is_narrow(leaf.info.dtype) or _is_scale(path, table):
                continue
            elif found:
                try:
                    blocks = self._blocks(leaf, table[found[0]])
                    pairs[path] = _Pair(found[0], blocks)
                except ValueError as error:
                    faults[path] = f"{leaf.info}: {error}"
            elif self.scale is not None or _state.dtypes.kind(
                leaf.info.dtype or ""
            ) == ("float"):
                faults[path] = f"no scale {' or '.join(names)}"
        for scale, _ in pairs.values():
            faults.pop(scale, None)  # scales may be 8-bit floats as well
        if faults or not pairs:
            found_others = (
                f"{len(faults)} that it cannot multiply:\n"
                + errors.rows(f"{path}: {why}" for path, why in faults.items())
                if faults
                else f"{len(matches)} other leaves, such as"
                f" {errors.first_few([f'{p}, {table[p].info}' for p in matches], 2)}"
            )
            raise errors.OptionError(
                f"{self} found {len(pairs)} weights with scales, and {found_others}\n"
                "Weights are 8-bit floats and integers with scales beside them:"
                " dequantize before other transforms rename them, pass scale= for other"
                " names and block= for other blocks, or a pattern of the weights. Other"
                " schemes: let the library that wrote the model dequantize it."
            )
        return pairs

    def _scale_names(self, path: LeafPath, match: re.Match[str]) -> list[LeafPath]:
        if self.scale is not None:
            return [patterns.expand(match, self.scale)]
        return [f"{path}{end}" for end in _SCALES]

    def _blocks(self, leaf: Leaf, scale: Leaf) -> Shape:
        """Returns the size of the blocks that share a scale, on each axis."""
        shape, scales = leaf.info.shape, scale.info.shape
        kind = _state.dtypes.kind(scale.info.dtype or "")
        fault = f"{scale.info.path} is {scale.info}, which does not fit"
        if kind != "float":
            raise ValueError(fault)
        if scales in ((), (1,)):
            scales = (1,) * len(shape)
        elif scales == shape[:1]:  # of each output, the first axis of weights in torch
            scales = (*scales, *(1,) * (len(shape) - 1))
        if len(scales) != len(shape):
            raise ValueError(fault)
        axes = [*zip(shape, scales, strict=True)]
        blocks = [size if count == 1 else 1 for size, count in axes]
        if cut := [i for i, (size, count) in enumerate(axes) if count not in (1, size)]:
            if any(_bounds(*axes[i]) is None for i in cut):
                raise ValueError(fault)
            given = self._given_blocks(len(axes))
            block = 0 if given else _find_block([axes[i] for i in cut])
            for i in cut:
                blocks[i] = given[i] if given else block
                if -(-axes[i][0] // blocks[i]) != axes[i][1]:
                    raise ValueError(fault)
        return tuple(blocks)

    def _given_blocks(self, axes: int) -> Shape:
        """Returns the sizes that the user gave for so many axes; empty if none."""
        if self.block is None or isinstance(self.block, int):
            return (self.block,) * axes if self.block else ()
        return (*(1,) * axes, *self.block)[-axes:]

    def __str__(self) -> str:
        return base.call(
            "dequantize",
            self.pattern.pattern,
            scale=self.scale,
            dtype=self.dtype,
            block=self.block,
        )

    def inverse(self) -> Transform:
        raise errors.OptionError(
            f"{self} cannot be inverted: the scales are gone, and other scales would"
            " round the weights again. Quantize an export with the tool that serves it"
        )


def dequantize(
    pattern: str = ".*",
    *,
    scale: str | None = None,
    dtype: Any = "float32",
    block: int | Sequence[int] | None = None,
) -> TableTransform:
    r"""Multiplies 8-bit weights by the scales beside them.

    ```python
    load("DeepSeek-V3/", state, transforms=[dequantize(), *to_flax])
    convert("Llama-FP8/", "bf16.safetensors", transforms=[dequantize(dtype="bfloat16")])
    ```

    Weights are the matching 8-bit floats, and the 8-bit integers with scales. Their
    scales have the name of the weight and `_scale_inv`, as DeepSeek's, or `_scale`, as
    in compressed-tensors, and are left out afterwards, as are `input_scale` and
    `output_scale`. A scale is of the whole weight, of a row (`[n, 1]` or `[n]`), or of
    a block. Products are computed in float32, and rounded once: to the type of the
    state, or to `dtype`. There is no inverse.

    Args:
        pattern: Regular expression on the whole leaf path.
        scale: The path of the scale of a match, which may refer to groups of the
            pattern: `dequantize("(.*)/w", scale=r"\1/w_factor")`.
        dtype: The type of the weights where no state says so.
        block: The size of blocks along axes with several scales, or the sizes along the
            last axes. By default, that of square blocks: 128, or another one, if the
            shapes leave only one.

    Raises:
        OptionError: `pattern`, `dtype` or `block` is not valid. When applied: nothing
            matches, a scale is missing or does not fit its weight, its blocks may have
            several sizes, or weights are of a scheme with zero points, packed integers
            or scales of scales.
    """
    name = _state.numpy_dtypes.name(dtype) if not isinstance(dtype, str) else dtype
    name = _state.dtypes.check(name)
    if _state.dtypes.kind(name) != "float":
        raise errors.OptionError(f"dtype must be a floating type, got {name!r}")
    if _util.arguments.is_list(block):
        block = _util.arguments.check_ints("block", block, least=1)
    elif block is not None:
        block = _util.arguments.check_int("block", block, least=1)
    return _Dequantize(patterns.compile_pattern(pattern), scale, name, block)


def _find_other_scheme(path: LeafPath, table: LeafTable) -> LeafPath | None:
    """Returns the leaf beside a weight that only other schemes have; None if none."""
    for end, other in _OTHER_SCHEMES:
        beside = f"{path.removesuffix(end)}{other}"
        if path.endswith(end) and beside in table:
            return beside
    return None


def _is_scale(path: LeafPath, table: LeafTable) -> bool:
    weights = [path.removesuffix(end) for end in _SCALES if path.endswith(end)]
    return any(f"{one}{end}" in table for one in weights for end in ("", "_packed"))


def _bounds(size: int, count: int) -> tuple[int, int] | None:
    """Returns the least and the largest size of `count` blocks; None if none fits."""
    if not 1 < count < size:
        return None
    least, most = -(-size // count), (size - 1) // (count - 1)
    return (least, most) if least <= most else None


def _find_block(axes: Sequence[tuple[int, int]]) -> int:
    """Returns the size of square blocks, from sizes and numbers of blocks of axes.

    Prefers powers of two, and sizes that divide an axis. Raises ValueError if the
    shapes do not say which.
    """
    bounds = [fitting for axis in axes if (fitting := _bounds(*axis))]
    least, most = max(low for low, _ in bounds), min(high for _, high in bounds)
    if least > most:
        sizes = " x ".join(str(low) for low, _ in bounds)
        raise ValueError(f"its blocks, such as {sizes}, are not square: pass block=")
    powers = (1 << bits for bits in range(most.bit_length()))
    likely = {size for size in powers if size >= least}
    if any(size == least * count for size, count in axes):
        likely.add(least)
    if _BLOCK in likely:
        likely = {size for size in likely if size % _TILE == 0}
    if not likely and least == most:
        return least
    if len(likely) != 1:
        sizes = " or ".join(map(str, sorted(likely))) or f"{least} to {most}"
        raise ValueError(f"its blocks may have the size {sizes}: pass block=")
    return likely.pop()


def _is_narrow(dtype: str | None) -> bool:
    kind = _state.dtypes.kind(dtype or "")
    is_number = kind == "float" or dtype == "int8"
    return dtype is not None and is_number and _state.dtypes.item_size(dtype) == 1


def _multiply_by_blocks(blocks: Shape) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the function from a weight and its scales to their product."""

    def multiply(weight: jax.Array, scale: jax.Array) -> jax.Array:
        factors = scale.astype(jnp.float32)
        factors = factors.reshape((*factors.shape, *(1,) * (len(blocks) - scale.ndim)))
        for axis, (block, size) in enumerate(zip(blocks, weight.shape, strict=True)):
            if factors.shape[axis] not in (1, size):
                repeated = jnp.repeat(factors, block, axis)
                factors = jax.lax.slice_in_dim(repeated, 0, size, axis=axis)
        return weight.astype(jnp.float32) * factors

    return multiply
