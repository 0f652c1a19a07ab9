"""Rows of modules of torch: the modules of linen and NNX that stand for them.

The Flax classes of transformers 4 keep the names of its torch classes; only the names
of the arrays differ, and the axes of kernels.

Source:
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/modeling_flax_pytorch_utils.py
"""

from __future__ import annotations

from collections.abc import Sequence

from flaxckpt._maps.family import Tensor
from flaxckpt._types import LeafPath


def linear(
    name: str,
    target: LeafPath | None = None,
    *,
    when: str = "",
    bias: bool | str = True,
    optional: bool | str = False,
) -> tuple[Tensor, ...]:
    """Returns the rows of `Linear`, whose weight is the transposed kernel of `Dense`.

    `target` is by default the leaf path of the same `name`. `bias` is whether it has
    one, and `optional` whether checkpoints may lack the module, or the condition for
    it.
    """
    rows = _kernel_and_bias(name, target, "o e -> e o", bias=bias)
    return under(when, [row._replace(optional=optional, module=name) for row in rows])


def conv(name: str, target: LeafPath | None = None) -> tuple[Tensor, ...]:
    """Returns the rows of `Conv2d`; see `linear`."""
    return _kernel_and_bias(name, target, "o e y x -> y x e o")


def conv1d(name: str) -> tuple[Tensor, ...]:
    return _kernel_and_bias(name, None, "o e x -> x e o")


def to_heads(
    name: str, target: LeafPath, *, bias: bool | str = True
) -> tuple[Tensor, ...]:
    """Returns the rows of a projection to heads of `nnx.MultiHeadAttention`."""
    forms = "(h d) e -> e h d", "(h d) -> h d"
    return _kernel_and_bias(name, target, *forms, bias=bias)


def from_heads(name: str, target: LeafPath) -> tuple[Tensor, ...]:
    """Returns the rows of the projection from heads of `nnx.MultiHeadAttention`."""
    return _kernel_and_bias(name, target, "e (h d) -> h d e")


def norm(name: str, target: LeafPath | None = None) -> tuple[Tensor, ...]:
    """Returns the rows of `LayerNorm`; see `linear`."""
    target = target or name.replace(".", "/")
    return (
        Tensor(f"{name}.weight", f"{target}/scale"),
        Tensor(f"{name}.bias", f"{target}/bias"),
    )


def embedding(name: str) -> tuple[Tensor, ...]:
    return (Tensor(f"{name}.weight", f"{name.replace('.', '/')}/embedding"),)


def array(
    name: str, target: LeafPath | None = None, *, optional: bool | str = False
) -> tuple[Tensor, ...]:
    """Returns the row of an array that is the same in torch and Flax."""
    target = target or name.replace(".", "/")
    return (Tensor(name, target, optional=optional),)


def under(condition: str, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(
        t._replace(when=" and ".join(filter(None, (condition, t.when))))
        for t in tensors
    )


def head(tensors: Sequence[Tensor], classes: str = "") -> tuple[Tensor, ...]:
    """Returns the rows of a head, which the base model alone lacks.

    `classes` are parts of the names of classes, joined by `|`, if models with other
    `architectures` may lack the head too.
    """
    conditions = (f"not architectures=*{c}*" for c in classes.split("|"))
    optional = " and ".join(conditions) if classes else False
    module = tensors[0].source
    return tuple(
        t._replace(optional=optional, is_head=True, module=module) for t in tensors
    )


def _kernel_and_bias(
    name: str,
    target: LeafPath | None,
    form: str,
    bias_form: str | None = None,
    *,
    bias: bool | str = True,
) -> tuple[Tensor, ...]:
    target = target or name.replace(".", "/")
    kernel = Tensor(f"{name}.weight", f"{target}/kernel", form)
    if not bias:
        return (kernel,)
    when = bias if isinstance(bias, str) else ""
    return kernel, Tensor(f"{name}.bias", f"{target}/bias", bias_form, when)
