"""Leaf paths as sets of concepts, and how alike two of them are."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from flaxckpt._types import LeafPath

Words: TypeAlias = tuple[str, ...]
Meaning: TypeAlias = frozenset[str]
"""The concepts of a path, without order."""

HOLE = "#"
"""The word for the number of a repeated module."""

# ---- the vocabulary -----------------------------------------------------------------

# Concepts -> the phrases for them in torch, Flax and other libraries, as words. A
# phrase under several entries has several meanings, and the most alike counts.
_PHRASES: Mapping[str, str] = {
    # attention
    "attn": "attention|attn|self attn|self attention|attention self|"
    "attention attention|multi head dot product attention|multi head attention|"
    "mha|self attn attn",
    "cross attn": "encoder attn|enc dec attention|crossattention|cross attention|"
    "crossattention self|encoder decoder attention|cross attn",
    "q": "query|q proj|query proj|q lin|wq|q einsum|to q|q",
    "k": "key|k proj|key proj|k lin|wk|k einsum|to k|k",
    "v": "value|v proj|value proj|v lin|wv|v einsum|to v|v",
    "qkv": "qkv|qkv proj|qkv einsum|c attn|in proj|query key value|wqkv|to qkv",
    "kv": "kv|kv proj|kv einsum|key value|to kv",
    "out": "o|out|output|o proj|out proj|output proj|c proj|out lin|wo|to out|"
    "attn vec einsum|output dense|proj out|out projection",
    "attn out": "attention output dense|attn vec einsum|attention dense|"
    "self attention dense|attn proj|attention proj",
    "q norm": "query norm|q norm|q layernorm",
    "k norm": "key norm|k norm|k layernorm",
    # feed-forward
    "mlp": "mlp|ffn|ff|ffw|feed forward|feedforward|dense relu dense|mlp block|"
    "feed forward layer",
    "mlp in": "intermediate dense|c fc|fc 1|wi|wi 1|up proj|up|lin 1|linear 1|w 3|w 1|"
    "dense h to 4 h|intermediate|fc in|ffn up|dense in",
    "mlp gate": "gate proj|wi 0|w 1|gate|ffn gate",
    "mlp out": "down proj|down|fc 2|lin 2|linear 2|w 2|dense 4 h to h|fc out|ffn down|"
    "output dense",
    "mlp gateup": "gate up proj|gate up|gating einsum|gate and up|wi",
    "router": "router|gate|moe gate|router gate",
    "expert": "experts|expert|block sparse moe experts|moe block",
    # norms
    "norm": "layer norm|layernorm|ln|norm|rms norm|rmsnorm|rms|batch norm|bn|batchnorm|"
    "normalization|group norm",
    "pre attn norm": "input layernorm|input layer norm|layernorm before|"
    "self attn layer norm|pre attention norm|pre self attention layer norm|"
    "pre attention layer norm|attention norm|attn norm|attn ln|ln attn|"
    "pre self attention norm|pre attn norm|attention layernorm",
    "pre mlp norm": "layernorm after|pre ffw norm|pre mlp layer norm|"
    "pre feedforward layernorm|ffn norm|post attention layernorm|mlp norm|mlp ln|"
    "final layer norm|post self attention layer norm|pre mlp norm|ffn layer norm|"
    "pre ffn norm|pre ffw layernorm",
    "post attn norm": "post attention norm|post attn norm|post attention layernorm|"
    "attention output layer norm|sa layer norm|post self attention norm",
    "post mlp norm": "post feedforward layernorm|post ffw norm|output layer norm|"
    "post mlp norm|post ffn norm",
    "pre cross norm": "encoder attn layer norm|pre cross attention layer norm",
    "final norm": "ln f|final layer norm|final norm|final layernorm|decoder norm|"
    "encoder norm|post layernorm|ln post|norm f|ln final|post layer norm",
    # embeddings and heads
    "embed": "embed|embedding|embeddings|embedder|embd",
    "embed token": "wte|embed tokens|word embeddings|token embedding|tok embeddings|"
    "token embed|input embedding|token embedder|shared|embedder input embedding|"
    "word embedding|token embeddings|tok embed|embed in|token embd",
    "embed pos": "wpe|position embeddings|position embedding|pos embed|pos embedding|"
    "embed positions|positional embedding|position embedder|posembed input|"
    "position embd",
    "embed type": "token type embeddings|token type embedding|type embeddings",
    "embed patch": "patch embeddings|patch embed|patch embedding|patch embeddings "
    "projection|patch embed proj|patch embeddings patch embeddings",
    "embed norm": "embed norm|embeddings layer norm|layernorm embedding|emb ln",
    "cls token": "cls token|cls|class embedding|class token",
    "head": "lm head|logits dense|logits|head|output projection|decoder head|output|"
    "classifier|score",
    # statistics, and the arrays of a layer
    "stat": "batch stats|running",
    "conv": "conv|convolution|conv proj",
    "encoder": "encoder|transformer encoder",
    "decoder": "decoder",
    "text": "text model|text|text encoder|text tower|language model",
    "vision": "vision model|visual|vision|vision encoder|vision tower|img|"
    "image encoder",
    "layer": "layers|layer|blocks|block|h|stages layers|encoderblock|resblocks|"
    "transformer block",
    "downsample": "downsample|shortcut|skip",
}  # fmt: skip

_WEIGHTS = ("weight", "kernel", "scale", "w", "gamma", "embedding", "g")
_BIASES = ("bias", "beta", "b")

KINDS = frozenset(("weight", "bias", "mean", "var"))
"""Concepts of the array in a layer; every meaning has one."""

_OTHER_KIND = 0.3
"""How alike two arrays of one layer are, as its weight and its bias."""

_WEAK = frozenset(
    (
        *("proj", "projection", "dense", "linear", "kernel", "weight", "einsum", "c"),
        *("module", "model", "params", "param", "self", "layer", "cls", "transformer"),
        *("core", "block", "nnx", "value", "net"),
    )
)
"""Words that say little about the place of a leaf."""

_FUSED: Mapping[str, Words] = {
    "qkv": ("q", "k", "v"),
    "kv": ("k", "v"),
    "gateup": ("gate", "in"),
}

FUSED = frozenset(_FUSED)
"""The concepts of fused leaves."""

PARTS = frozenset(_FUSED.values())
"""The concepts of the parts of fused leaves, in order."""

BUFFERS = re.compile(
    r"(.*/)?(inv_freq|position_ids|masked_bias|num_batches_tracked|token_type_ids)"
    r"|(.*/)?attn/bias|(.*/)?attention/bias"
)
"""Leaf paths of torch's buffers, which no JAX model has."""


def fused_roles(meaning: Meaning) -> tuple[str, Words] | None:
    """Returns the concept of a fused leaf, and the concepts of its parts, in order."""
    return next((row for row in _FUSED.items() if row[0] in meaning), None)


def _table() -> dict[Words, tuple[Words, ...]]:
    meanings: dict[Words, list[Words]] = {}
    for concepts, phrases in _PHRASES.items():
        for phrase in phrases.split("|"):
            meanings.setdefault(tuple(phrase.split()), []).append(
                tuple(concepts.split())
            )
    return {phrase: tuple(found) for phrase, found in meanings.items()}


_MEANINGS = _table()
_LONGEST = max(map(len, _MEANINGS))
_MOST_MEANINGS = 8

# ---- paths to meanings --------------------------------------------------------------

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|#")


def words(text: str) -> Words:
    """Splits a name at `_`, at capitals and at digits: `ln_1` is `ln` and `1`."""
    return tuple(word.lower() for word in _WORD.findall(text))


def without_numbers(path: LeafPath) -> str:
    """Returns a path with `#` for each number."""
    return re.sub("[0-9]+", HOLE, path)


def meanings(parts: Sequence[str]) -> tuple[Meaning, ...]:
    """Returns the possible meanings of the components of a leaf path.

    They have `#` for numbers of repeated modules.
    """
    *above, name = parts
    last = words(name)
    if len(last) == 1 and last[0] in _WEIGHTS and above:
        kind, rest = "weight", [*above]
    elif last and last[-1] in _BIASES:
        kind, rest = "bias", [*above, *last[:-1]]
    elif len(last) > 1 and last[-1] in ("weight", "kernel"):
        kind, rest = "weight", [*above, *last[:-1]]
    elif last and last[-1] in ("mean", "var"):
        kind, rest = last[-1], [*above, *last[:-1]]
    else:
        kind, rest = "weight", [*above, *last]
    flat = [word for part in rest for word in words(part)]
    found: list[tuple[str, ...]] = [(kind,)]
    at = 0
    while at < len(flat):
        length, options = _longest_phrase(flat, at)
        found = [(*one, *option) for one in found for option in options]
        found = found[:_MOST_MEANINGS]
        at += length
    return tuple(dict.fromkeys(frozenset(one) - {HOLE} for one in found))


def _longest_phrase(flat: Sequence[str], at: int) -> tuple[int, tuple[Words, ...]]:
    for length in range(min(_LONGEST, len(flat) - at), 0, -1):
        if options := _MEANINGS.get(tuple(flat[at : at + length])):
            return length, options
    word = flat[at]
    return 1, (() if word.isdigit() else (word,),)


def places(number: int, series: Sequence[int]) -> list[str]:
    """Returns the concepts of the number of a module, as of `2` in `ln_1` and `ln_2`.

    Numbers of two series are alike if both count the same modules from 0 or 1; or if
    they are equal, unless one counts other modules between, as torch's `Sequential`. In
    all other series, only an order would decide. `series` are the numbers of all
    modules with this name, in order.
    """
    first, count = series[0], len(series)
    if first in (0, 1) and series[-1] - first == count - 1:
        return [f"no. {number}", f"{number - first + 1} of {count}"]
    return [f"{number} of {', '.join(map(str, series))}"]


# ---- similarity ---------------------------------------------------------------------


class Similarity:
    """How alike leaf paths of two tables are, from 0 to 1.

    Rare concepts count more than frequent ones, as `model` and `layers`, and concepts
    that only one of the tables has count little.
    """

    def __init__(
        self,
        sources: Iterable[tuple[Meaning, ...]],
        targets: Iterable[tuple[Meaning, ...]],
    ) -> None:
        left = [frozenset().union(*options) for options in sources]
        right = [frozenset().union(*options) for options in targets]
        counts = Counter(word for one in (*left, *right) for word in one)
        both = frozenset().union(*left) & frozenset().union(*right)
        total = max(len(left) + len(right), 2)
        self._weight = {
            word: math.log(1 + total / count)
            / math.log(1 + total)
            * (0.3 if word in _WEAK else 1)
            * (1 if word in both else 0.3)
            for word, count in counts.items()
        }

    def __call__(
        self, source: tuple[Meaning, ...], target: tuple[Meaning, ...]
    ) -> float:
        """Returns the similarity of two paths, by their most alike meanings."""
        return max(self._of(a, b) for a in source for b in target)

    def _of(self, a: Meaning, b: Meaning) -> float:
        shared = math.fsum(self._weight[word] for word in (a & b) - KINDS)
        total = math.fsum(self._weight[word] for word in (a | b) - KINDS)
        ratio = shared / total if total else 1.0
        return ratio if a & KINDS == b & KINDS else _OTHER_KIND * ratio


def telling(concepts: Meaning) -> list[str]:
    """Returns the concepts that say something about the place of a leaf."""
    return sorted(concepts - _WEAK - KINDS)
