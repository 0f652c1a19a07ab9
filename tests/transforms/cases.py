"""All transforms: what they do, and the mistakes in their calls and leaves.

The one table of a new transform. `test_cases.py` runs it, `test_precision.py` computes
it in other types, `test_undone.py` restores it with all optimizers (if one fails, the
function of the rows may have to be an `AxisMap`), and
`tests/repository/test_arguments.py` makes the mistakes in calls.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import einops
import jax.numpy as jnp
import numpy as np

from flaxckpt import transforms
from flaxckpt.transforms import (
    Row,
    Transform,
    assign,
    cast,
    copy,
    dequantize,
    drop,
    from_function,
    fuse,
    grow,
    keep,
    map_leaf,
    merge,
    merge_lora,
    offset,
    pad,
    permute,
    remap,
    rename,
    reshape,
    scale,
    split,
    stack,
    tie,
    transpose,
    unstack,
    untie,
    use_orbax_names,
)


class Case(NamedTuple):
    """A transform, and its effect on the leaves below `params`.

    Attributes:
        change: The transform.
        leaves: Their names, in order, and shapes; no two cases share names.
        effect: Maps their values, in order, to the new leaves.
        moments: The same for moments; `effect` if None.
        is_undone: True if the inverse gives back all bits.
        squares: The same for means of squared gradients; `moments` if None.
        keeps_all: False if moments without the parameter's shape or of unknown meaning
            are left out, so that the inverse cannot give them back.
    """

    change: Transform
    leaves: Mapping[str, tuple[int, ...]]
    effect: Callable[..., dict[str, Any]]
    moments: Callable[..., dict[str, Any]] | None = None
    is_undone: bool = True
    squares: Callable[..., dict[str, Any]] | None = None
    keeps_all: bool = True


CASES = {
    "rename": Case(
        rename("params/(ol)d", r"params/\1der"), {"old": (2, 3)}, lambda x: {"older": x}
    ),
    "rename, swapped": Case(
        rename({"params/s_(a)": r"params/s_b", "params/s_(b)": r"params/s_a"}),
        {"s_a": (2,), "s_b": (2,)},
        lambda a, b: {"s_a": b, "s_b": a},
        is_undone=False,  # the groups are not used
    ),
    "copy": Case(
        copy("params/c", "params/c_2"),
        {"c": (3,)},
        lambda x: {"c": x, "c_2": x},
        is_undone=False,
    ),
    "untie": Case(
        untie("params/u", "params/u_2"), {"u": (3, 2)}, lambda x: {"u": x, "u_2": x}
    ),
    "drop": Case(drop("params/d"), {"d": (3,)}, lambda x: {}, None, False),
    "map_leaf": Case(
        map_leaf("params/m", lambda x: x * 2, inverse=lambda x: x / 2),
        {"m": (3, 2)},
        lambda x: {"m": x * 2},
        lambda x: {"m": x},
    ),
    "map_leaf, resized": Case(
        map_leaf("params/mr", lambda x: x[1:]),
        {"mr": (3, 2)},
        lambda x: {"mr": x[1:]},
        is_undone=False,
    ),
    "transpose": Case(transpose("params/t"), {"t": (6, 6)}, lambda x: {"t": x.T}),
    "transpose, by axes": Case(
        transpose("params/axes", (2, 0, -2)),
        {"axes": (5, 2, 4)},
        lambda x: {"axes": x.transpose(2, 0, 1)},
    ),
    "reshape": Case(
        reshape("params/heads", "(n h d) e -> e n h d", n=2, h=3),
        {"heads": (24, 6)},
        lambda x: {"heads": einops.rearrange(x, "(n h d) e -> e n h d", n=2, h=3)},
        keeps_all=False,
    ),
    "reshape, with others": Case(
        reshape("params/others", "l ... -> ... l"),
        {"others": (3, 2, 4)},
        lambda x: {"others": np.moveaxis(x, 0, -1)},
        keeps_all=False,
    ),
    "reshape, to a shape": Case(
        reshape("params/shaped", (2, -1), from_shape=(3, 4)),
        {"shaped": (3, 4)},
        lambda x: {"shaped": x.reshape(2, 6)},
        keeps_all=False,
    ),
    "permute": Case(
        permute("params/p", [6, 0, 5, 1, 4, 2, 3]),
        {"p": (7, 2)},
        lambda x: {"p": x[[6, 0, 5, 1, 4, 2, 3]]},
    ),
    "permute, by axis": Case(
        permute("params/rows", [3, 2, 1, 0], axis=-1),
        {"rows": (2, 4)},
        lambda x: {"rows": x[:, ::-1]},
    ),
    "permute, of three axes": Case(
        permute("params/middle", [1, 2, 0], axis=1),
        {"middle": (4, 3, 2)},
        lambda x: {"middle": x[:, [1, 2, 0]]},
    ),
    "offset": Case(
        offset("params/added", -1.0),
        {"added": (6,)},
        lambda x: {"added": x - 1},
        lambda x: {"added": x},
    ),
    "scale": Case(
        scale("params/scaled", 4.0, nu="squares"),
        {"scaled": (6, 2)},
        lambda x: {"scaled": x * 4},
        lambda x: {"scaled": x / 4},
        squares=lambda x: {"scaled": x / 16},
        keeps_all=False,
    ),
    "stack": Case(
        stack(r"params/l_(\d)", "params/l"),
        {f"l_{i}": (5, 6) for i in range(4)},
        lambda *xs: {"l": np.stack(xs)},
    ),
    "stack, some": Case(
        stack(r"params/n_(?P<i>\d)", "params/n", axis=-1, start=1, stride=2, stop=5),
        {f"n_{i}": (3, 4) for i in range(5)},
        lambda *xs: (
            {"n": np.stack(xs[1::2], -1)} | {f"n_{i}": xs[i] for i in (0, 2, 4)}
        ),
    ),
    "unstack": Case(
        unstack("params/all", "params/all_{i}", axis=1),
        {"all": (4, 3, 5)},
        lambda x: {f"all_{i}": x[:, i] for i in range(3)},
    ),
    "unstack, some": Case(
        unstack("params/some", "params/some_{i}", start=2, stride=3, stop=9),
        {"some": (3, 4, 5)},
        lambda x: {f"some_{i}": x[n] for n, i in enumerate((2, 5, 8))},
    ),
    "split": Case(
        split("params/qkv", ["params/q", "params/k"], axis=0, sizes=[16, 8]),
        {"qkv": (24, 6)},
        lambda x: {"q": x[:16], "k": x[16:]},
    ),
    "fuse": Case(
        fuse(["params/f_a", "params/f_b"], "params/f"),
        {"f_a": (2, 3), "f_b": (2, 3)},
        lambda *xs: {"f": np.concatenate(xs, -1)},
    ),
    "fuse, unequal": Case(
        fuse(["params/f_1", "params/f_2"], "params/ff", axis=0, sizes=[2, 1]),
        {"f_1": (2, 3), "f_2": (1, 3)},
        lambda *xs: {"ff": np.concatenate(xs)},
    ),
    "remap": Case(
        remap(
            [
                ("params/x_{i}", "params/{c:v|w}", "i (c o) e -> c e i o"),
                Row("params/none", "params/nothing", optional=True),
            ],
            i=2,
        ),
        {"x_0": (4, 3), "x_1": (4, 3)},
        lambda *xs: {
            name: np.stack([x[2 * i : 2 * i + 2].T for x in xs], 1)
            for i, name in enumerate("vw")
        },
    ),
    "pad": Case(
        pad("params/padded", (3, None), value=1.0),
        {"padded": (2, 2)},
        lambda x: {"padded": np.concatenate([x, np.ones_like(x[:1])])},
        lambda x: {"padded": np.concatenate([x, np.zeros_like(x[:1])])},
        is_undone=False,
    ),
    "slice": Case(
        transforms.slice("params/cut", (1, None)),
        {"cut": (2, 3)},
        lambda x: {"cut": x[:1]},
        is_undone=False,
    ),
    "grow": Case(
        grow("params/grown", -1, 3, init="zeros"),
        {"grown": (2, 2)},
        lambda x: {"grown": np.pad(x, ((0, 0), (0, 1)))},
        is_undone=False,
    ),
    "merge_lora": Case(
        merge_lora(alpha=2.0, rank=1),
        {"w": (4, 3), "w_lora_a": (4, 1), "w_lora_b": (1, 3)},
        lambda w, a, b: {"w": w + 2 * a @ b},
        lambda w, a, b: {"w": w},
        is_undone=False,
    ),
}
"""Of float arrays, on any state of the package."""

OTHERS = [
    keep("a/.*"),
    tie("a", "b"),
    assign([("a", None)], strict=False),
    use_orbax_names(),
    rename({"a": "b", "c": "d"}),
    reshape("a", (2, -1)),
    grow("a", 0, 9, init="normal", seed=3),
    cast("a", "float32", lossy=True),  # evaluated at the write
    scale("a", 0.5),
    merge("/other", step=3, on_conflict="first"),
    merge_lora("/adapter", alpha=2.0, rank=4),
    dequantize("(.*)/w", scale=r"\1/s", dtype="bfloat16", block=64),
    dequantize(block=[64, 32]),
]
"""Further transforms, whose suites are their own, for their texts."""

UNNAMED = {"from_function", "inverse", "Row", "Transform"}
"""Names that no text creates."""


# ---- mistakes -----------------------------------------------------------------------

MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (lambda: assign("a"), "assign needs a list of pairs"),
    (lambda: assign(["ab", "cd"]), "assign needs a list of pairs"),
    (lambda: assign([("a", "b", "c")]), "assign needs a list of pairs"),
    (lambda: assign({"a": 3}), "replacement of 'a' must be a path"),
    (lambda: cast(".*", None), "cast needs an element type"),
    (lambda: cast(".*", "bf16"), "not a supported element type: write 'bfloat16'"),
    (lambda: cast(".*", "FP32"), "not a supported element type: write 'float32'"),
    (lambda: cast(".*", jnp.ones(3)), "got an array float32[3]"),
    (lambda: copy("a", 3), "wanted a pattern and its replacement"),
    (lambda: drop(["a", "b"]), "a pattern must be a regular expression as a str"),
    (lambda: from_function(3), "from_function needs"),
    (lambda: fuse("ab", "c"), "fuse needs a list of patterns, got 'ab'"),
    (lambda: fuse(["a", "b"], "x", axis="0"), "axis must be a whole"),
    (lambda: fuse(["a", "b"], "x", sizes=3), "sizes must be a list"),
    (lambda: fuse(None, "x"), "fuse needs a list of patterns, got None"),
    (lambda: grow("w", 0, "5"), "size must be a whole number"),
    (lambda: grow("w", "0", 5), "axis must be a whole number, got '0'"),
    (lambda: grow("w", 0, -5), "of at least 0, got -5"),
    (lambda: grow("w", 0, 5, seed="x"), "seed must be a whole number"),
    (lambda: keep(None), "a pattern must be a regular expression as a str"),
    (lambda: map_leaf("a", 3), "map_leaf needs a function of arrays, got 3"),
    (lambda: merge("one", step="1"), "a step is the number"),
    (lambda: offset("a", float("nan")), "value must be a number"),
    (lambda: offset("a", "1"), "value must be a number"),
    (lambda: pad("w", 5), "shape must be a list of whole numbers, got 5"),
    (lambda: pad("w", "55"), "shape must be a list of whole numbers"),
    (lambda: pad("w", (5, -1)), "shape must be a whole number of at"),
    (lambda: pad("w", (5, None), value="x"), "value must be a number"),
    (lambda: permute("a", [0, 2]), "order must be a permutation of 0 … 1, got [0, 2]"),
    (lambda: permute("a", [1, 1]), "order must be a permutation"),
    (lambda: rename([("a", "b")]), "or a dict, got a list"),
    (lambda: rename({"a": None}), "replacement of 'a' must be a path"),
    (lambda: reshape("a", "(h d) e -> e h d"), "pass h= or d="),
    (lambda: reshape("a", "(h d) e -> e h", h=2), "d is on one side only"),
    (lambda: reshape("a", "h d -> d h", g=2), "has no axis g"),
    (lambda: reshape("a", "h d -> d h", h=0), "h must be a whole number of at least 1"),
    (lambda: reshape("a", "h d"), "it needs one arrow"),
    (lambda: reshape("a", "h h -> h"), "h is twice on one side"),
    (lambda: reshape("a", "((h d) e) -> h d e"), "its parentheses do not match"),
    (lambda: reshape("a", "(h d -> h d"), "its parentheses do not match"),
    (lambda: reshape("a", "h) d -> h d"), "its parentheses do not match"),
    (lambda: reshape("a", "h_ 2 -> h_ 2"), "is not an axis"),
    (lambda: reshape("a", (-1, -1)), "only one size of a shape may be -1"),
    (lambda: reshape("a", (2, 2), h=2), "which has no h"),
    (lambda: reshape("a", "h d -> d h", from_shape=(2, 2)), "from_shape is for a new"),
    (lambda: scale("a", 0), "factor must not be 0"),
    (lambda: scale("a", float("inf")), "factor must be"),
    (lambda: transforms.slice("w", slice(0, 2)), "shape must be a list of whole"),
    (lambda: split("a", []), "split needs a list of parts, got []"),
    (lambda: split("a", ["b", "c"], axis="x"), "axis must be a whole"),
    (lambda: split("a", ["b", "c"], sizes="12"), "sizes must be a list"),
    (lambda: split("a", None), "split needs a list of parts, got None"),
    (lambda: stack("a", "b"), "needs a group for the number of a part"),
    (lambda: stack(["a"], "b"), "must be a regular expression as a str"),
    (lambda: stack("l_([0-9])", "b", axis="0"), "axis must be a whole"),
    (lambda: stack(r"(\d)", "b", start=-1), "start must be a whole number of at least"),
    (lambda: stack(r"(\d)", "b", stride=0), "stride must be a whole number of at"),
    (lambda: tie("a", None), "replacement of 'a' must be a path"),
    (lambda: transpose("a", "01"), "axes must be a list of whole"),
    (lambda: transpose("a", [0, 0]), "axes must be distinct"),
    (lambda: unstack("a", "b"), "unstack needs {i} in the path of a part"),
    (lambda: unstack("a", None), "replacement of 'a' must be a path"),
    (lambda: unstack("a", "b_{i}", start=3, stop=3), "stop must be a whole number"),
]
"""Calls, and what their errors say."""

MISFITS = [
    (rename("a", "b"), "must be a list of transforms"),
    ([3], "contains 3"),
    ([from_function(lambda tree: tree["nowhere"])], "KeyError"),
    ([from_function(lambda _: {"a": jnp.ones(2) + jnp.ones(3)})], "TypeError"),
    ([from_function(lambda _: {"a": object()})], "returned object at a"),
    ([map_leaf("w/.*", lambda x: x.nothing)], "no attribute nothing"),
    ([map_leaf("w/.*", lambda x: np.sort(x))], "use jax.numpy"),
    ([map_leaf("w/.*", lambda x: (x, x))], "must return one array"),
    ([lambda table: None], "must return a leaf table"),
    ([lambda table: {"b": table["a"]}], "must return a leaf table"),
    ([grow("w/.*", 3, 3)], "it has no axis 3"),
    ([grow("none", 0, 3)], "axis 0 is empty"),
    ([fuse(["w/a(.)", "w/b(.)"], r"w/\1", sizes=[1, 1])], "have the sizes [2, 2]"),
    ([split("w/(.*)", [r"l/\1", r"r/\1"], sizes=[1, 2])], "axis -1 has 2 rows"),
    ([stack(r"(a)", "b")], "matches other text in a: 'a'"),
    ([stack(r"w/(?P<i>\w)\w", "s")], "matches other text in 10 leaves"),
    ([stack(r"w/(.)(?P<i>[1-5])", r"s/\1")], "lacks part 0; found w/a1"),
    ([stack(r"w/[ab](?P<i>\d)", "s")], "w/a0 and w/b0 would both be part 0"),
    ([stack(r"t_(\d)", "t")], "have different types, float32, int32"),
    ([fuse(["a", "none"], "both")], "pass sizes=[2, 0]"),
    ([rename("a", r"\2")], "does not fit the pattern"),
    ([stack(r"(\d)/w", "w", start=5)], "the numbers are 0, 1"),
    ([stack(r"(\d)/w", "w", stop=4)], "lacks parts 2, 3"),
    ([reshape("w/.*", "(h d) -> h d", h=3)], "3"),
    ([reshape("w/.*", "a b -> b a")], "does not fit"),
    ([reshape("w/.*", (3, 3))], "reshape"),
    ([reshape("w/.*", (2, 1), from_shape=(3,))], "of from_shape"),
    ([permute("w/.*", [0, 1, 2])], "axis 0 has 2 entries, but the order has 3"),
    ([permute("w/.*", [0, 1], axis=2)], "it has no axis 2"),
    ([transpose("w/.*", (1, 0))], "w/a0, float32[2]"),
    ([pad("w/.*", (1,))], "it is already larger"),
    ([transforms.slice("w/.*", (4,))], "it is already smaller"),
    ([offset("flags", 1)], "it does not hold numbers"),
    ([scale("flags", 2)], "it does not hold numbers"),
    ([offset("counts", 0.5)], "integers need a whole number"),
    ([remap([("w/{c:a0|a1}", "w/b", "c a b -> c a b")])], "2"),
    ([tie("w/.*", "counts")], "is int32[3]"),
    ([tie("a", "none")], "but none is float32[0]"),
    ([tie("a", "a")], "tied to itself"),
    ([untie("a", "none")], "none: by a, none"),
    ([unstack("w/.*", "a_{i}", stop=3)], "axis 0 has 2 rows, but there are 3 numbers"),
    ([unstack("w/.*", "a_{i}", axis=1)], "it has no axis 1"),
    ([merge_lora(alpha=1, rank=3)], "lora/w"),
]
"""Transforms that do not fit `misfit_state`, and what their errors say.

Where they match all ten leaves in `w`, the error names them, or says how many it has.
"""


def misfit_state():
    return {
        "a": jnp.ones(2),
        "none": jnp.ones((0,)),
        "flags": jnp.ones(3, bool),
        "counts": jnp.ones(3, int),
        "t_0": jnp.ones(2),
        "t_1": jnp.ones(2, int),
        "0": {"w": jnp.ones(2)},
        "1": {"w": jnp.ones(2)},
        "w": {f"{c}{i}": jnp.ones(2) for c in "ab" for i in range(5)},
        "lora": {
            f"w{end}": jnp.ones(shape)
            for end, shape in (("", (4, 3)), ("_lora_a", (4, 2)), ("_lora_b", (2, 3)))
        },
    }


def name_of(change):
    """Returns the name of the function that made a transform."""
    return re.match(r"\w+", str(change))[0]
