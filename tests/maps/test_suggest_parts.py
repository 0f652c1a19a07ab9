"""The parts of `suggest`: patterns of paths, forms, evidence, and the assignment."""

import itertools
import random

import einops
import jax
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flaxckpt._state import flax_state
from flaxckpt._suggest import forms, match, names, patterns, rows
from flaxckpt._suggest.forms import Axes, Evidence, Observation, candidates, decide
from flaxckpt._suggest.suggestion import suggest_for_tables
from tests.maps.names_of import RECORDED, abstract, read

SIZES = st.integers(1, 5)
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]  # shrinking takes minutes


# ---- patterns -----------------------------------------------------------------------


def found_in(*paths: str) -> set[str]:
    return {str(one) for one in patterns.find_patterns(dict.fromkeys(paths, (2, 3)))}


def test_finds_layer_numbers():
    layers = [f"h/{i}/{name}/w" for i in range(2) for name in ("attn", "mlp")]
    assert found_in(*layers, "wte/w") == {"h/{}/attn/w", "h/{}/mlp/w", "wte/w"}


def test_ignores_numbers_in_layer_names():
    assert found_in("ln_1/w", "ln_2/w") == {"ln_1/w", "ln_2/w"}
    assert found_in("fc1/w", "fc2/w") == {"fc1/w", "fc2/w"}
    assert found_in("mlp/0/w", "mlp/2/w") == {"mlp/0/w", "mlp/2/w"}


def test_ignores_numbers_of_different_modules():
    t5 = [
        f"block/{i}/layer/{n}/{name}/w"
        for i in range(3)
        for n, name in ((0, "q"), (0, "k"), (1, "wi"), (1, "wo"))
    ]
    assert found_in(*t5) == {
        "block/{}/layer/0/q/w",
        "block/{}/layer/0/k/w",
        "block/{}/layer/1/wi/w",
        "block/{}/layer/1/wo/w",
    }


def test_finds_two_numbers_for_experts_in_layers():
    experts = [
        f"layers/{i}/experts/{j}/{name}/w"
        for i in range(3)
        for j in range(4)
        for name in ("w1", "w2")
    ]
    assert found_in(*experts) == {
        "layers/{}/experts/{}/w1/w",
        "layers/{}/experts/{}/w2/w",
    }


@given(st.dictionaries(st.from_regex(r"[a-z0-9_/.]{1,12}", fullmatch=True), SIZES))
def test_patterns_contain_each_leaf_once(shapes):
    found = patterns.find_patterns({path: (n,) for path, n in shapes.items()})
    members = [path for one in found for path in one.members.values()]
    assert sorted(members) == sorted(shapes)
    for one in found:
        for key, path in one.members.items():
            texts = {at: str(value) for at, value in enumerate(key)}
            assert rows._filled(one, texts) == path


@pytest.mark.parametrize(
    ("torch", "flax"),
    [
        ("h/#/attn/c_proj/weight", "layers_#/attention/out/kernel"),
        ("model/layers/#/mlp/gate_proj/weight", "decoder/layers/mlp/wi_0/kernel"),
        ("transformer/wte/weight", "params/token_embedder/embedding"),
        ("blk/#/attn_norm/weight", "layers/#/pre_attention_norm/scale"),
        ("bn/running_mean", "batch_stats/BatchNorm/mean"),
        ("encoder/layer/#/intermediate/dense/bias", "layers_#/mlp/fc1/bias"),
    ],
)
def test_synonyms_are_similar(torch, flax):
    mine, theirs = (names.meanings(path.split("/")) for path in (torch, flax))
    others = names.meanings(["layers", "#", "mlp", "wo", "bias"])
    similarity = names.Similarity([mine, others], [theirs, others])
    assert similarity(mine, theirs) > 0.6
    assert similarity(mine, theirs) == similarity(theirs, mine)
    assert similarity(mine, mine) == pytest.approx(1)


# ---- forms --------------------------------------------------------------------------


def apply(form: forms.Candidate, array: np.ndarray) -> np.ndarray:
    """Rearranges an array by a form of single leaves, with einops."""
    named = rows.RowNames()
    text = named._form(form, [], [])
    known = {name: size for name, size in named.sizes.items() if name in text}
    return einops.rearrange(array, text, **known)


USUAL = [
    "o i -> i o",
    "(h d) e -> e h d",
    "e (h d) -> h d e",
    "(h d) e -> h e d",
    "(h d) -> h d",
    "o i -> o i",
    "e -> 1 1 e",
    "o c y x -> y x c o",
    "o c x -> x c o",
]


@given(st.sampled_from(USUAL), st.booleans(), st.data())
def test_candidates_include_usual_forms(form, is_inverse, data):
    left, right = form.split(" -> ")
    letters = [c for c in left if c.isalpha()]
    sizes = {letter: data.draw(SIZES) for letter in letters}
    if is_inverse:
        left, right = right, left
    flat = np.arange(np.prod([*sizes.values()]))
    source = einops.rearrange(flat, f"({' '.join(letters)}) -> {left}", **sizes)
    wanted = einops.rearrange(source, f"{left} -> {right}", **sizes)
    found = candidates(Axes((), source.shape), Axes((), wanted.shape))
    results = [apply(one, source) for one in found]
    assert all(result.shape == wanted.shape for result in results)
    assert any((result == wanted).all() for result in results)


@given(st.lists(SIZES, max_size=4), st.lists(SIZES, max_size=4))
def test_all_candidates_have_wanted_shape(source, target):
    found = candidates(Axes((), tuple(source)), Axes((), tuple(target)))
    array = np.arange(np.prod(source)).reshape(source)
    for one in found:
        assert apply(one, array).shape == tuple(target)
    assert len({one.layout for one in found}) == len(found)


@given(st.integers(2, 4), SIZES, SIZES, st.integers(0, 2), st.booleans())
def test_stacks_layers_along_fitting_axis(n, a, b, axis, is_turned):
    shape = [b, a] if is_turned else [a, b]
    shape.insert(axis, n)
    found = candidates(Axes((n,), (a, b)), Axes((), tuple(shape)))
    arrays = np.arange(n * a * b).reshape(n, a, b)
    wanted = np.stack([x.T if is_turned else x for x in arrays], axis)
    results = []
    for one in found:
        named = rows.RowNames()
        text = named._form(one, ["i"], [])
        results.append(einops.rearrange(arrays, text, **named.sizes))
    assert any((result == wanted).all() for result in results)


def test_evidence_of_same_module_counts_first():
    square = candidates(Axes((), (4, 4)), Axes((), (4, 4)))
    turned, plain = (
        candidates(Axes((), (3, 4)), Axes((), shape))[0] for shape in ((4, 3), (3, 4))
    )
    kind = ("kernel", "weight", "kernel")
    far = [Observation(("model",), kind, turned) for _ in range(5)]
    near = [Observation(("model", "mlp"), kind, plain)]
    for seen, orientation in ((far, "transposed"), ([*far, *near], "as stored")):
        decision = decide(square, ("model", "mlp", "up"), kind, Evidence(seen))
        assert [one.orientation for one in decision.forms] == [orientation]
        assert orientation in decision.reason
    mixed = [Observation(("model",), kind, one) for one in (turned, plain)]
    assert len(decide(square, ("model",), kind, Evidence(mixed)).forms) == 2
    assert len(decide(square, ("model",), kind, Evidence([])).forms) == 2


# ---- the assignment -----------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_assignment_is_optimal(n, m, data):
    score = st.one_of(st.just(-np.inf), st.floats(0, 1, width=16))
    scores = np.array([[data.draw(score) for _ in range(m)] for _ in range(n)])
    pairs = [at for at in np.ndindex(n, m) if np.isfinite(scores[at])]
    chosen = match._assign({at: scores[at] for at in pairs})
    assert len({i for i, _ in chosen}) == len({j for _, j in chosen}) == len(chosen)
    assert all(np.isfinite(scores[at]) for at in chosen)

    def value(pairs):
        return sum(scores[at] ** 2 + 1e-3 for at in pairs if np.isfinite(scores[at]))

    # Each column gets a row, or one of m rows that do not exist.
    orders = itertools.permutations(range(n + m), m)
    best = max(
        value([(i, j) for j, i in enumerate(order) if i < n]) for order in orders
    )
    assert value(chosen) == pytest.approx(best)


# ---- whole models -------------------------------------------------------------------


def table(shapes):
    return flax_state.flatten(abstract(shapes)).table


@settings(max_examples=10, phases=PHASES)
@given(
    st.sampled_from(["gpt2", "bert", "t5", "whisper", "tunix-qwen3", "resnet"]),
    st.randoms(use_true_random=False),
    st.sampled_from(["", "module/", "params/model/", "backbone/net/"]),
)
def test_order_and_prefixes_do_not_matter(name, rng: random.Random, prefix):
    recorded = read(name)
    sources = {f"{prefix}{path}": shape for path, shape in recorded.source.items()}
    targets = [*recorded.target.items()]
    expected = suggest_for_tables(table(recorded.source), table(recorded.target))
    shuffled = [*sources.items()]
    rng.shuffle(shuffled)
    rng.shuffle(targets)
    found = suggest_for_tables(table(dict(shuffled)), table(dict(targets)))
    assert not found.ambiguous
    assert {
        path: tuple(source.removeprefix(prefix) for source in leaf.sources)
        for path, leaf in found.leaves.items()
    } == {path: leaf.sources for path, leaf in expected.leaves.items()}


@settings(max_examples=10, phases=PHASES)
@given(st.sampled_from(RECORDED), st.randoms(use_true_random=False))
def test_never_fills_missing_leaf_silently(name, rng: random.Random):
    recorded = read(name)
    whole = suggest_for_tables(table(recorded.source), table(recorded.target))
    lost = rng.choice([*recorded.source])
    rest = {path: shape for path, shape in recorded.source.items() if path != lost}
    found = suggest_for_tables(table(rest), table(recorded.target))
    asked = {path for ambiguity in found.ambiguous for path in ambiguity.leaves}
    for path, leaf in whole.leaves.items():
        if path not in asked and path in found.leaves:
            assert found.leaves[path].sources == leaf.sources


def test_dtypes_may_differ():
    kernel = jax.ShapeDtypeStruct((4, 3), "bfloat16")
    wanted = flax_state.flatten({"up": {"kernel": kernel}}).table
    assert suggest_for_tables(table({"up/weight": (3, 4)}), wanted).leaves["up/kernel"]
