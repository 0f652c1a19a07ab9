"""`suggest` against conversions that the projects themselves made, and bad input."""

import cProfile

import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import flaxckpt
from flaxckpt import errors
from flaxckpt.transforms import remap
from tests.helpers import slow
from tests.maps.names_of import RECORDED, abstract, flatten, read, write_source
from tests.maps.record_names import checksum

E, HEADS, KV, D, MLP, VOCAB, LAYERS = 24, 6, 2, 8, 40, 131, 3


def suggest(stored, wanted, directory):
    """Returns a source with leaves of these shapes, and what is suggested for it."""
    source = write_source(directory / "source.npz", stored)
    return source, flaxckpt.suggest(source, abstract(wanted))


# Recorded name -> the reasons of ambiguities that its shapes do not decide.
AMBIGUOUS = {
    # 2 heads of key and value, and 2 arrays: either may come first.
    "tunix-gemma2": ["several forms fit the shapes"],
    "tunix-gemma3": ["several forms fit the shapes"],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RECORDED)
def test_finds_same_map_as_project_conversion(name, tmp_path):
    recorded = read(name)
    source = write_source(tmp_path / "source.npz", recorded.source)
    state = abstract(recorded.target)
    suggestion = flaxckpt.suggest(source, state)
    reasons = [ambiguity.reason for ambiguity in suggestion.ambiguous]
    assert reasons == AMBIGUOUS.get(name, [])
    assert suggestion.leaves.keys() == recorded.target.keys()
    assert not suggestion.left
    assert not suggestion.unused
    transforms = suggestion.accept().transforms
    loaded = flatten(flaxckpt.load(source, state, transforms=transforms))
    wrong = [
        path
        for path, wanted in recorded.checksums.items()
        if wanted is not None and checksum(loaded[path]) != wanted
    ]
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "tunix-llama3", "whisper"])
def test_inverse_restores_source(name, tmp_path):
    recorded = read(name)
    source, suggestion = suggest(recorded.source, recorded.target, tmp_path)
    there = flaxckpt.load(
        source, abstract(recorded.target), transforms=suggestion.transforms
    )
    flaxckpt.save(tmp_path / "there", there)
    back = flatten(
        flaxckpt.load(
            tmp_path / "there",
            abstract(recorded.source),
            transforms=flaxckpt.transforms.inverse(suggestion.transforms),
        )
    )
    original = flatten(flaxckpt.load(source, abstract(recorded.source)))
    assert all((back[path] == leaf).all() for path, leaf in original.items())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "resnet", "vit"])
def test_finds_map_from_flax_to_torch(name, tmp_path):
    recorded = read(name)
    source = write_source(tmp_path / "source.npz", recorded.source)
    there = flaxckpt.load(
        source,
        abstract(recorded.target),
        transforms=flaxckpt.suggest(source, abstract(recorded.target)).transforms,
    )
    flaxckpt.save(tmp_path / "there", there)
    wanted = abstract(recorded.source)
    suggestion = flaxckpt.suggest(tmp_path / "there", wanted)
    loaded = flaxckpt.load(tmp_path / "there", wanted, transforms=suggestion.transforms)
    original = flatten(flaxckpt.load(source, wanted))
    for path, leaf in flatten(loaded).items():
        np.testing.assert_array_equal(leaf, original[path])


# ---- layouts without a recorded conversion ------------------------------------------


def huggingface(*, head: bool = True) -> dict[str, tuple[int, ...]]:
    """The names of a Llama in transformers."""
    shapes = {"model/embed_tokens/weight": (VOCAB, E), "model/norm/weight": (E,)}
    if head:
        shapes["lm_head/weight"] = (VOCAB, E)
    for i in range(LAYERS):
        layer = f"model/layers/{i}"
        shapes |= {
            f"{layer}/self_attn/q_proj/weight": (HEADS * D, E),
            f"{layer}/self_attn/k_proj/weight": (KV * D, E),
            f"{layer}/self_attn/v_proj/weight": (KV * D, E),
            f"{layer}/self_attn/o_proj/weight": (E, HEADS * D),
            f"{layer}/mlp/gate_proj/weight": (MLP, E),
            f"{layer}/mlp/up_proj/weight": (MLP, E),
            f"{layer}/mlp/down_proj/weight": (E, MLP),
            f"{layer}/input_layernorm/weight": (E,),
            f"{layer}/post_attention_layernorm/weight": (E,),
        }
    return shapes


def maxtext(*layers: int) -> dict[str, tuple[int, ...]]:
    """The names of a Llama in MaxText, with layers stacked along axis 1."""
    n = layers or (LAYERS,)
    return {
        "params/token_embedder/embedding": (VOCAB, E),
        "params/decoder/decoder_norm/scale": (E,),
        "params/decoder/logits_dense/kernel": (E, VOCAB),
        "params/decoder/layers/self_attention/query/kernel": (E, *n, HEADS, D),
        "params/decoder/layers/self_attention/key/kernel": (E, *n, KV, D),
        "params/decoder/layers/self_attention/value/kernel": (E, *n, KV, D),
        "params/decoder/layers/self_attention/out/kernel": (HEADS, *n, D, E),
        "params/decoder/layers/mlp/wi_0/kernel": (E, *n, MLP),
        "params/decoder/layers/mlp/wi_1/kernel": (E, *n, MLP),
        "params/decoder/layers/mlp/wo/kernel": (MLP, *n, E),
        "params/decoder/layers/pre_self_attention_layer_norm/scale": (E, *n),
        "params/decoder/layers/post_self_attention_layer_norm/scale": (E, *n),
    }


def test_shows_no_transforms_if_none_are_needed(tmp_path):
    source = write_source(tmp_path / "source.npz", {"a/w": (3, 4), "a/b": (4,)})
    state = {"a": {"w": np.ones((3, 4)), "b": np.ones(4)}}
    suggestion = flaxckpt.suggest(source, state)
    assert suggestion.code == "transforms = []"
    assert "\n\nno leaf with a source needs a transform\n" in str(suggestion)
    assert "transforms =" not in str(suggestion)
    loaded = flaxckpt.load(source, state, transforms=suggestion.transforms)
    assert loaded["a"]["w"].shape == (3, 4)


def test_stacks_layers_along_any_axis(tmp_path):
    source = write_source(tmp_path / "source.npz", huggingface())
    stored = flatten(flaxckpt.load(source, abstract(huggingface())))
    suggestion = flaxckpt.suggest(source, abstract(maxtext()))
    assert suggestion.leaves.keys() == maxtext().keys()
    loaded = flatten(
        flaxckpt.load(
            source, abstract(maxtext()), transforms=suggestion.accept().transforms
        )
    )
    layers = [f"model/layers/{i}" for i in range(LAYERS)]
    queries = [stored[f"{i}/self_attn/q_proj/weight"] for i in layers]
    np.testing.assert_array_equal(
        loaded["params/decoder/layers/self_attention/query/kernel"],
        np.stack([q.reshape(HEADS, D, E).transpose(2, 0, 1) for q in queries], 1),
    )
    outs = [stored[f"{i}/self_attn/o_proj/weight"] for i in layers]
    np.testing.assert_array_equal(
        loaded["params/decoder/layers/self_attention/out/kernel"],
        np.stack([out.reshape(E, HEADS, D).transpose(1, 2, 0) for out in outs], 1),
    )
    for name, wanted in (("mlp/wi_0", "gate_proj"), ("mlp/wi_1", "up_proj")):
        np.testing.assert_array_equal(
            loaded[f"params/decoder/layers/{name}/kernel"],
            np.stack([stored[f"{i}/mlp/{wanted}/weight"].T for i in layers], 1),
        )
    for name, wanted in (("pre_self", "input"), ("post_self", "post_attention")):
        np.testing.assert_array_equal(
            loaded[f"params/decoder/layers/{name}_attention_layer_norm/scale"],
            np.stack([stored[f"{i}/{wanted}_layernorm/weight"] for i in layers], 1),
        )


def test_unstacks_stacked_layers(tmp_path):
    source, suggestion = suggest(maxtext(), huggingface(), tmp_path)
    assert suggestion.leaves.keys() == huggingface().keys()
    assert "mlp/up_proj/weight" in suggestion.code
    loaded = flaxckpt.load(
        source, abstract(huggingface()), transforms=suggestion.accept().transforms
    )
    stored = flatten(flaxckpt.load(source, abstract(maxtext())))
    np.testing.assert_array_equal(
        loaded["model"]["layers"]["1"]["mlp"]["down_proj"]["weight"],
        stored["params/decoder/layers/mlp/wo/kernel"][:, 1].T,
    )


def test_finds_first_layers_of_larger_model(tmp_path):
    source = write_source(tmp_path / "source.npz", huggingface())
    smaller = {p: s for p, s in huggingface().items() if "/2/" not in p}
    smaller = {f"params/{path}": shape for path, shape in smaller.items()}
    suggestion = flaxckpt.suggest(source, abstract(smaller))
    assert len(suggestion.unused) == 9
    loaded = flaxckpt.load(
        source, abstract(smaller), transforms=suggestion.transforms, unused="ignore"
    )
    assert list(loaded["params"]["model"]["layers"]) == ["0", "1"]


def test_finds_layers_with_shifted_numbers(tmp_path):
    source = write_source(tmp_path / "source.npz", huggingface())
    later = {
        path.replace(f"layers/{i}/", f"block_{i + 1}/"): shape
        for path, shape in huggingface().items()
        for i in range(LAYERS)
        if f"layers/{i}/" in path
    }
    suggestion = flaxckpt.suggest(source, abstract(later))
    assert not suggestion.left
    match = suggestion.leaves["model/block_3/mlp/down_proj/weight"]
    assert match.sources == ("model/layers/2/mlp/down_proj/weight",)
    assert "model/block_{i+1}/mlp" in suggestion.code
    flaxckpt.load(
        source, abstract(later), transforms=suggestion.transforms, unused="ignore"
    )


def test_moments_follow_parameters(tmp_path):
    tx = optax.adamw(1e-3)
    params = {"model": {"up": {"weight": np.ones((3, 5), np.float32)}}}
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    grads = {"model": {"up": {"weight": np.arange(15, dtype=np.float32).reshape(3, 5)}}}
    flaxckpt.save(tmp_path / "a", state.apply_gradients(grads=grads))
    new = {"net": {"up": {"kernel": np.ones((5, 3), np.float32)}}}
    wanted = TrainState.create(apply_fn=None, params=new, tx=tx)
    suggestion = flaxckpt.suggest(tmp_path / "a", wanted)
    assert [*suggestion.leaves] == ["params/net/up/kernel"]
    loaded = flaxckpt.load(tmp_path / "a", wanted, transforms=suggestion.transforms)
    np.testing.assert_array_equal(
        loaded.opt_state[0].mu["net"]["up"]["kernel"],
        flaxckpt.load(tmp_path / "a", state).opt_state[0].mu["model"]["up"]["weight"].T,
    )


def test_fills_module_in_tuple_with_its_optimizer(tmp_path):
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
    source = tmp_path / "source.npz"
    np.savez(source, **{"params/up/kernel": kernel, "params/up/bias": kernel[0]})
    module = nnx.Dict(up=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    state = module, nnx.Optimizer(module, optax.adam(1e-3), wrt=nnx.Param)
    suggestion = flaxckpt.suggest(source, state)
    assert {*suggestion.leaves} == {"0/up/kernel", "0/up/bias"}
    loaded, _ = flaxckpt.load(
        source, state, transforms=suggestion.transforms, missing="init"
    )
    np.testing.assert_array_equal(loaded.up.kernel[...], kernel)
    np.testing.assert_array_equal(loaded.up.bias[...], kernel[0])


# ---- ambiguity ----------------------------------------------------------------------


def choices(suggestion: flaxckpt.Suggestion) -> list[tuple[str, ...]]:
    return [ambiguity.choices for ambiguity in suggestion.ambiguous]


def asked(suggestion: flaxckpt.Suggestion) -> list[flaxckpt.Ambiguity]:
    """Returns the ambiguities, without those of values that MaxText changes."""
    return [one for one in suggestion.ambiguous if "values may be" not in one.reason]


def test_square_kernel_without_evidence_is_ambiguous(tmp_path):
    _, suggestion = suggest(
        {"fc/weight": (4, 4), "fc/bias": (4,)},
        {"fc/kernel": (4, 4), "fc/bias": (4,)},
        tmp_path,
    )
    assert choices(suggestion) == [
        ('("fc/weight", "fc/kernel", "o e -> e o")', '("fc/weight", "fc/kernel")')
    ]
    with pytest.raises(errors.OptionError, match="1 choice is ambiguous") as caught:
        _ = suggestion.transforms
    assert "o e -> e o" in str(caught.value)
    assert "remap" in str(suggestion.accept().transforms[0])


def test_other_kernel_of_model_counts_as_evidence(tmp_path):
    shapes = {"up/weight": (4, 4), "down/weight": (3, 4)}
    source = write_source(tmp_path / "a.npz", shapes)
    for down, form in (((4, 3), "o e -> e o"), ((3, 4), None)):
        wanted = {"up/kernel": (4, 4), "down/kernel": down}
        match = flaxckpt.suggest(source, abstract(wanted)).leaves["up/kernel"]
        assert match.form == form
        assert "like 1 other" in match.reason


@pytest.mark.parametrize("table", [{}, {"positions/table": (7, 4)}])
def test_kernel_that_keeps_its_path_counts_as_evidence(table, tmp_path):
    stored = {"enc/a_0/kernel": (4, 4), "enc/a_1/kernel": (4, 4), "head/kernel": (4, 2)}
    wanted = {"enc/0/kernel": (4, 4), "enc/1/kernel": (4, 4), "head/kernel": (4, 2)}
    source = write_source(tmp_path / "a.npz", stored | table)
    suggestion = flaxckpt.suggest(source, abstract(wanted | table))
    assert not suggestion.ambiguous
    assert {match.form for match in suggestion.leaves.values()} == {None}
    torch = {"up/weight": (4, 4), "down/weight": (3, 4)}
    source = write_source(tmp_path / "b.npz", torch | table)
    wanted = {"up/kernel": (4, 4), "down/kernel": (4, 3)}
    found = flaxckpt.suggest(source, abstract(wanted | table))
    assert found.leaves["up/kernel"].form == "o e -> e o"


def test_conflicting_kernels_decide_nothing(tmp_path):
    shapes = {"up/weight": (4, 4), "a/weight": (3, 4), "b/weight": (5, 6)}
    source = write_source(tmp_path / "a.npz", shapes)
    wanted = {"up/kernel": (4, 4), "a/kernel": (4, 3), "b/kernel": (5, 6)}
    suggestion = flaxckpt.suggest(source, abstract(wanted))
    assert [one.leaves for one in suggestion.ambiguous] == [("up/kernel",)]


def test_equally_fitting_names_are_ambiguous(tmp_path):
    source = write_source(
        tmp_path / "a.npz", {"attn/first/weight": (4, 6), "attn/second/weight": (4, 6)}
    )
    wanted = {"attn/left/kernel": (6, 4), "attn/right/kernel": (6, 4)}
    suggestion = flaxckpt.suggest(source, abstract(wanted))
    assert {path for one in suggestion.ambiguous for path in one.leaves} == {*wanted}
    assert "fit other leaves as well" in suggestion.ambiguous[0].reason
    assert "attn/second/weight" in str(suggestion.ambiguous[0])


def test_two_candidates_for_one_leaf_are_ambiguous(tmp_path):
    shapes = {"a/query/weight": (4, 6), "b/query/weight": (4, 6)}
    _, suggestion = suggest(shapes, {"query/kernel": (6, 4)}, tmp_path)
    [ambiguity] = suggestion.ambiguous
    assert {*ambiguity.choices} == {
        '("a/query/weight", "query/kernel", "o e -> e o")',
        '("b/query/weight", "query/kernel", "o e -> e o")',
    }


def test_dissimilar_names_are_ambiguous(tmp_path):
    _, suggestion = suggest(
        {"alpha/weight": (4, 6)}, {"omega/kernel": (6, 4)}, tmp_path
    )
    assert suggestion.ambiguous[0].reason == (
        "the shapes fit, but the names are not alike"
    )
    assert suggestion.leaves["omega/kernel"].confidence < 0.5


NAMES_ONLY_IN_AN_ORDER = {
    "norms_by_name_and_by_number": (
        ["b/attn_ln", "b/cross_attn_ln", "b/mlp_ln"],
        ["b/norm_0", "b/norm_1", "b/norm_2"],
    ),
    "norms_by_number_and_by_name": (["b/ln_1", "b/ln_2"], ["b/attn_ln", "b/mlp_ln"]),
    "gaps": (["fc1", "fc3"], ["Dense_0", "Dense_1"]),
    "torch_sequential": (["0", "2", "4"], ["Dense_0", "Dense_1", "Dense_2"]),
    "query_key_value": (["q", "k", "v"], ["Dense_0", "Dense_1", "Dense_2"]),
    "encoder_decoder": (["encoder/fc", "decoder/fc"], ["Net_0/fc_0", "Net_1/fc_0"]),
    "not_alike": (["alpha", "beta", "gamma_ray"], ["psi", "chi", "omega"]),
    "layers_with_gaps": (
        [f"layers/{i}/fc" for i in (0, 2, 4, 6)],
        [f"layers/{i}/fc" for i in range(4)],
    ),
    "gaps_in_equal_names": (
        [f"net/{i}" for i in (0, 2, 4)],
        [f"net/{i}" for i in range(3)],
    ),
    "many_gaps_in_equal_names": (
        [f"net/{i}" for i in (0, 2, 4, 6)],
        [f"net/{i}" for i in range(4)],
    ),
    "many_names_and_numbers": (
        ["up", "down", "left", "right"],
        [f"omega_{i}" for i in range(4)],
    ),
    "equal_names_that_begin_later": (
        [f"layer_{i}/fc" for i in range(4)],
        [f"layer_{i}/fc" for i in range(2, 6)],
    ),
    "layers_that_begin_elsewhere": (
        [f"layers/{i}/fc" for i in range(1, 6)],
        [f"layers/{i}/fc" for i in range(4)],
    ),
}


@pytest.mark.parametrize("name", NAMES_ONLY_IN_AN_ORDER)
@pytest.mark.parametrize("shape", [(6,), (4, 6)])
def test_equal_shapes_distinguished_only_by_order_are_ambiguous(name, shape, tmp_path):
    ours, theirs = NAMES_ONLY_IN_AN_ORDER[name]
    source = write_source(tmp_path / "a.npz", {f"{one}/weight": shape for one in ours})
    wanted = {f"{one}/kernel": shape[::-1] for one in theirs}
    suggestion = flaxckpt.suggest(source, abstract(wanted))
    asked = {path for one in suggestion.ambiguous for path in one.leaves}
    assert asked == {*suggestion.leaves}
    assert all(one.confidence < 0.5 for one in suggestion.leaves.values())
    with pytest.raises(errors.OptionError, match="ambiguous"):
        _ = suggestion.transforms


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (["norm_1", "norm_2"], ["LayerNorm_0", "LayerNorm_1"]),
        (["norm_1", "norm_2"], ["LayerNorm_1", "LayerNorm_2"]),
        (["norm_1", "norm_2", "norm_3"], ["LayerNorm_1", "LayerNorm_2"]),
        (["attn_ln", "mlp_ln"], ["attention_norm", "ffn_norm"]),
    ],
)
def test_similar_names_and_numbers_decide(ours, theirs, tmp_path):
    source = write_source(tmp_path / "a.npz", {f"b/{p}/weight": (6,) for p in ours})
    wanted = abstract({f"b/{path}/scale": (6,) for path in theirs})
    suggestion = flaxckpt.suggest(source, wanted)
    assert not suggestion.ambiguous
    assert [suggestion.leaves[f"b/{path}/scale"].sources for path in theirs] == [
        (f"b/{path}/weight",) for path in ours[: len(theirs)]
    ]


def layers(name, numbers, leaves):
    """Returns shapes of repeated modules: `name` with `{}` for each of the numbers."""
    return {
        f"{name.format(i)}/{path}": shape
        for i in numbers
        for path, shape in leaves.items()
    }


LAYER = {
    "attn/kernel": (8, 4),
    "attn/bias": (4,),
    "mlp/kernel": (4, 16),
    "ln/scale": (8,),
}


@pytest.mark.parametrize("shape", [(8, 4), (8, 8)])
def test_matches_layers_counted_from_0_and_from_1(shape, tmp_path):
    leaves = {"attn/kernel": shape, "mlp/kernel": (4, 16)}
    stored = layers("layer_{}", (1, 2, 3), leaves)
    source = write_source(tmp_path / "a.npz", stored)
    wanted = layers("layer_{}", (0, 1, 2), leaves)
    suggestion = flaxckpt.suggest(source, abstract(wanted))
    assert not suggestion.ambiguous
    loaded = flatten(
        flaxckpt.load(source, abstract(wanted), transforms=suggestion.transforms)
    )
    before = flatten(flaxckpt.load(source, abstract(stored)))
    for path, leaf in loaded.items():
        old = path.replace(path[6], str(int(path[6]) + 1), 1)
        np.testing.assert_array_equal(leaf, before[old])


def test_leaf_of_one_layer_follows_numbering_of_others(tmp_path):
    shapes = layers("layer_{}", (1, 2, 3), LAYER)
    wanted = {**layers("layer_{}", (0, 1, 2), LAYER), "layer_1/table/weight": (7,)}
    for number, asked in ((2, []), (1, [("layer_1/table/weight",)])):
        table = {f"layer_{number}/table/weight": (7,)}
        source = write_source(tmp_path / f"{number}.npz", {**shapes, **table})
        suggestion = flaxckpt.suggest(source, abstract(wanted))
        assert suggestion.leaves["layer_1/table/weight"].sources == (*table,)
        assert [one.leaves for one in suggestion.ambiguous] == asked


def test_suggest_respects_known_rows_with_other_numbers(tmp_path):
    ours, theirs = layers("net/{}", (0, 2, 4), {"kernel": (8, 4)}), "net/{}/kernel"
    source = write_source(tmp_path / "a.npz", ours)
    wanted = dict.fromkeys(map(theirs.format, range(3)), (8, 4))
    known = remap([("net/2/kernel", "net/1/kernel")])
    suggestion = flaxckpt.suggest(source, abstract(wanted), transforms=[known])
    assert {path for one in suggestion.ambiguous for path in one.leaves} == {
        "net/0/kernel",
        "net/2/kernel",
    }
    assert suggestion.leaves["net/1/kernel"].confidence == 1
    rows = [(f"net/{2 * i}/kernel", f"net/{i}/kernel") for i in range(3)]
    again = flaxckpt.suggest(source, abstract(wanted), transforms=[remap(rows)])
    assert not again.ambiguous


@pytest.mark.parametrize("name", ["xyz_{}", "blk_{}", "Stack_{}"])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("is_back", [False, True])
def test_finds_layers_under_any_name(name, count, is_back, tmp_path):
    sides = [name, "layers_{}"][:: -1 if is_back else 1]
    ours, theirs = (layers(side, range(count), LAYER) for side in sides)
    _, suggestion = suggest(ours, theirs, tmp_path)
    assert not suggestion.ambiguous
    assert [match.sources for match in suggestion.leaves.values()] == [
        (path,) for path in ours
    ]


def test_does_not_split_kernels_into_layers(tmp_path):
    leaves = {"attn/kernel": (8, 8), "mlp/kernel": (8, 16)}
    source = write_source(tmp_path / "a.npz", layers("blk_{}", range(2), leaves))
    wanted = layers("layers_{}", range(2), leaves)
    suggestion = flaxckpt.suggest(source, abstract(wanted))
    assert not suggestion.ambiguous
    assert {match.form for match in suggestion.leaves.values()} == {None}
    stacked = {f"layers/{path}": (2, *shape) for path, shape in leaves.items()}
    match = flaxckpt.suggest(source, abstract(stacked)).leaves["layers/mlp/kernel"]
    assert match.sources == ("blk_0/mlp/kernel", "blk_1/mlp/kernel")


def test_reports_each_of_many_dissimilar_names(tmp_path):
    names = [f"{a}{b}" for a in "xyzw" for b in "fghij"]
    source = write_source(tmp_path / "a.npz", {f"{n}/weight": (6,) for n in names})
    wanted = {f"{n[::-1]}/kernel": (6,) for n in names}
    suggestion = flaxckpt.suggest(source, abstract(wanted))
    assert {path for one in suggestion.ambiguous for path in one.leaves} == {*wanted}


def test_known_rows_resolve_ambiguity(tmp_path):
    gpt2 = read("gpt2").source
    parts = {p: s for p, s in read("gpt2").target.items() if "c_attn" not in p}
    for i in range(3):
        for name in ("query", "key", "value"):
            layer = f"transformer/h/{i}/attn/{name}"
            parts |= {f"{layer}/kernel": (24, 6, 4), f"{layer}/bias": (6, 4)}
    source, suggestion = suggest(gpt2, parts, tmp_path)
    assert len(suggestion.ambiguous) == 2
    assert all(len(one) == 2 for one in choices(suggestion))
    layer = "transformer/h/{i}/attn"
    known = remap(
        [
            (
                f"{layer}/c_attn/{name}",
                f"{layer}/{{c:query|key|value}}/{new}",
                f"{axes} (c h d) -> c {axes} h d",
            )
            for name, new, axes in (("weight", "kernel", "e"), ("bias", "bias", ""))
        ],
        h=6,
    )
    again = flaxckpt.suggest(source, abstract(parts), transforms=[known])
    assert not again.ambiguous
    loaded = [
        flatten(flaxckpt.load(source, abstract(parts), transforms=transforms))
        for transforms in (suggestion.accept().transforms, again.transforms)
    ]
    for path in parts:
        np.testing.assert_array_equal(loaded[0][path], loaded[1][path])


def test_splits_fused_array_into_unequal_parts_first(tmp_path):
    shapes = huggingface()
    for i in range(LAYERS):
        attention = f"model/layers/{i}/self_attn"
        for name in "qkv":
            del shapes[f"{attention}/{name}_proj/weight"]
        shapes[f"{attention}/qkv_proj/weight"] = ((HEADS + 2 * KV) * D, E)
    source, suggestion = suggest(shapes, maxtext(), tmp_path)
    assert not suggestion.left
    assert not suggestion.unused
    [ambiguity] = asked(suggestion)
    assert "blocks of it, in this order" in ambiguity.reason
    assert "sizes=(48, 16, 16)" in ambiguity.choices[0]
    layer = "params/decoder/layers/self_attention"
    assert {*ambiguity.leaves} == {
        f"{layer}/{name}/kernel" for name in ("query", "key", "value")
    }
    key = suggestion.leaves[f"{layer}/key/kernel"]
    assert key.sources[1] == "model/layers/1/self_attn/qkv_proj/weight"
    assert "from flaxckpt.transforms import remap, split" in suggestion.code
    loaded = flaxckpt.load(
        source, abstract(maxtext()), transforms=suggestion.accept().transforms
    )
    stored = flatten(flaxckpt.load(source, abstract(shapes)))
    fused = stored["model/layers/1/self_attn/qkv_proj/weight"]
    found = flatten(loaded)[f"{layer}/key/kernel"]
    rows = fused[HEADS * D : (HEADS + KV) * D].reshape(KV, D, E)
    np.testing.assert_array_equal(found[:, 1], rows.transpose(2, 0, 1))


def changes_of(suggestion: flaxckpt.Suggestion) -> dict[str, str]:
    """Returns the leaves whose values may be changed, with the reason."""
    return {
        path: one.reason
        for one in suggestion.ambiguous
        for path in one.leaves
        if "values may be" in one.reason
    }


@pytest.mark.parametrize("is_scanned", [False, True])
def test_asks_about_values_changed_by_maxtext(tmp_path, is_scanned):
    wanted = maxtext()
    names = ["params/decoder/layers/self_attention/{}/kernel"]
    if not is_scanned:
        names = [f"params/decoder/layers_{i}/self_attention/{{}}/kernel" for i in "012"]
        wanted = {
            path.replace("/layers/", f"/layers_{i}/"): (*shape[:1], *shape[2:])
            if "/layers/" in path
            else shape
            for path, shape in maxtext().items()
            for i in range(LAYERS)
        }
    _, suggestion = suggest(huggingface(), wanted, tmp_path)
    changes = changes_of(suggestion)
    assert {*changes} == {name.format(q) for name in names for q in ("query", "key")}
    query, key = names[0].format("query"), names[0].format("key")
    assert "multiplied by head_dim ** -0.5 in maxtext" in changes[query]
    assert "llama, mistral" in changes[query]
    assert "multiplied" not in changes[key]
    assert "two p) e ->" in changes[key]
    assert "rope_scaling.rope_type=llama3" in changes[key]
    assert "multiplied by head_dim" in suggestion.leaves[query].reason
    with pytest.raises(errors.OptionError, match="multiplied by head_dim"):
        _ = suggestion.transforms
    # The way back has the same changes; from one layout of MaxText to another, none.
    stored = write_source(tmp_path / "b.npz", wanted)
    back = flaxckpt.suggest(stored, abstract(huggingface()))
    assert {*changes_of(back)} == {
        f"model/layers/{i}/self_attn/{c}_proj/weight" for i in range(3) for c in "qk"
    }
    bare = {path.removeprefix("params/"): shape for path, shape in wanted.items()}
    assert not flaxckpt.suggest(stored, abstract(bare)).ambiguous


def test_does_not_ask_about_values_kept_by_other_layouts(tmp_path):
    source = write_source(tmp_path / "a.npz", huggingface())
    wanted = {f"{path}_norm_free": shape for path, shape in maxtext().items()}
    assert not changes_of(flaxckpt.suggest(source, abstract(wanted)))


def test_asks_about_tied_head(tmp_path):
    source, suggestion = suggest(huggingface(head=False), maxtext(), tmp_path)
    [ambiguity] = asked(suggestion)
    assert ambiguity.leaves == ("params/decoder/logits_dense/kernel",)
    assert "is the embedding its head" in ambiguity.reason
    loaded = flaxckpt.load(
        source, abstract(maxtext()), transforms=suggestion.accept().transforms
    )
    np.testing.assert_array_equal(
        loaded["params"]["decoder"]["logits_dense"]["kernel"],
        loaded["params"]["token_embedder"]["embedding"].T,
    )


@pytest.mark.parametrize("vocabulary", [256, 100])
def test_asks_about_other_vocabulary_size(tmp_path, vocabulary):
    stored = {**huggingface(), "lm_head/bias": (VOCAB,)}
    wanted = {
        "embedder/input_embedding": (vocabulary, E),
        "final_norm/scale": (E,),
        "head/kernel": (E, vocabulary),
        "head/bias": (vocabulary,),
    }
    source, suggestion = suggest(stored, wanted, tmp_path)
    assert {path for one in suggestion.ambiguous for path in one.leaves} == {
        path for path in wanted if "norm" not in path
    }
    with pytest.raises(errors.OptionError, match=f"from 131 to {vocabulary} rows"):
        _ = suggestion.transforms
    names: dict[str, list] = {}
    exec(suggestion.code, names)
    for transforms in (suggestion.accept().transforms, names["transforms"]):
        loaded = flatten(
            flaxckpt.load(
                source, abstract(wanted), transforms=transforms, unused="ignore"
            )
        )
        before = flatten(flaxckpt.load(source, abstract(stored)))
        rows = min(VOCAB, vocabulary)
        for path, old in (
            (loaded["embedder/input_embedding"], "model/embed_tokens/weight"),
            (loaded["head/kernel"].T, "lm_head/weight"),
            (loaded["head/bias"], "lm_head/bias"),
        ):
            np.testing.assert_array_equal(path[:rows], before[old][:rows])
            assert not path[rows:].any()


@pytest.mark.parametrize(
    "target",
    [
        {f"layers/layers_{r}/up/kernel": (E, 2, MLP) for r in range(3)},
        {
            f"blocks_{b}/layers_{r}/up/kernel": (E, MLP)
            for b in range(2)
            for r in range(3)
        },
    ],
)
def test_reports_unmatched_layers_in_blocks_with_reason(tmp_path, target):
    shapes = {f"model/layers/{i}/up/weight": (MLP, E) for i in range(6)}
    shapes["model/embed/weight"] = (VOCAB, E)
    source = write_source(tmp_path / "a.npz", shapes)
    wanted = {**target, "embed/embedding": (VOCAB, E)}
    suggestion = flaxckpt.suggest(source, abstract(wanted))
    assert {*suggestion.left} == {*target}
    for reason in suggestion.left.values():
        assert "its 6 layers may be numbered in blocks" in reason
        assert "{(b r)}" in reason
    # The row that the reason asks for.
    first = next(iter(target)).replace("_0", "_{r}", 2)
    form = "b o e -> e b o"
    if "blocks" in first:
        first, form = "blocks_{b}/layers_{r}/up/kernel", "o e -> e o"
    known = remap([("model/layers/{(b r)}/up/weight", first, form)], r=3)
    again = flaxckpt.suggest(source, abstract(wanted), transforms=[known])
    assert not again.left


def test_other_width_is_not_other_vocabulary(tmp_path):
    source = write_source(tmp_path / "a.npz", huggingface())
    wanted = {"embedder/input_embedding": (256, E + 1), "final_norm/scale": (E,)}
    suggestion = flaxckpt.suggest(source, abstract(wanted))
    assert [*suggestion.left] == ["embedder/input_embedding"]
    assert not suggestion.given


# ---- bad input ----------------------------------------------------------------------


def test_reports_nearest_leaf_for_other_head_count(tmp_path):
    source = write_source(tmp_path / "a.npz", huggingface())
    wanted = maxtext()
    path = "params/decoder/layers/self_attention/key/kernel"
    wanted[path] = (E, LAYERS, 5, D)
    suggestion = flaxckpt.suggest(source, abstract(wanted))
    assert [*suggestion.left] == [path]
    assert "self_attn/k_proj/weight, float32[16, 24]" in suggestion.left[path]
    assert "without a source: 1" in str(suggestion)


def test_error_for_unrelated_state_names_nearest_leaf(tmp_path):
    source = write_source(tmp_path / "a.npz", {"conv1/weight": (4, 3, 3)})
    wanted = {f"layer_{i}/kernel": (7, 5) for i in range(30)}
    with pytest.raises(errors.OptionError, match="no leaf of the source fits") as error:
        flaxckpt.suggest(source, abstract(wanted))
    assert str(error.value).count("\n") < 15
    assert "the nearest is conv1/weight, float32[4, 3, 3]" in str(error.value)


def test_asks_before_using_head_of_other_task_as_pooler(tmp_path):
    _, suggestion = suggest(read("bert").source, read("bert-pooler").target, tmp_path)
    assert not suggestion.left
    assert {one.leaves for one in suggestion.ambiguous} == {
        ("pooler/dense/kernel",),
        ("pooler/dense/bias",),
    }
    assert all("names are not alike" in one.reason for one in suggestion.ambiguous)
    assert all(path.startswith("cls/") for path in suggestion.unused)


def test_floats_do_not_fill_integers(tmp_path):
    source = write_source(tmp_path / "a.npz", {"table/weight": (4, 6)})
    with pytest.raises(errors.OptionError, match="no leaf"):
        flaxckpt.suggest(source, abstract({"table/embedding": (4, 6)}, np.int32))


def test_reports_names_unsupported_by_rows(tmp_path):
    source = write_source(
        tmp_path / "a.npz", {"up{0}/weight": (4, 6), "down/weight": (6, 4)}
    )
    wanted = {"up{0}/kernel": (6, 4), "down/kernel": (4, 6)}
    suggestion = flaxckpt.suggest(source, abstract(wanted))
    assert [*suggestion.leaves] == ["down/kernel"]
    assert "characters" in suggestion.left["up{0}/kernel"]


def test_equal_state_needs_no_transforms(tmp_path):
    _, suggestion = suggest(huggingface(), huggingface(), tmp_path)
    assert suggestion.transforms == []
    assert {match.confidence for match in suggestion.leaves.values()} == {1.0}


def test_suggested_code_matches_transforms(tmp_path):
    source = write_source(tmp_path / "a.npz", huggingface())
    suggestion = flaxckpt.suggest(source, abstract(maxtext())).accept()
    names: dict[str, object] = {}
    exec(suggestion.code, names)
    assert list(map(str, names["transforms"])) == list(  # type: ignore[call-overload]
        map(str, suggestion.transforms)
    )


@pytest.mark.parametrize(
    "kind",
    slow.all_but(
        ["renamed", "without a source", "fused", "layers"],
        ["without a source", "layers"],
    ),
)
def test_work_grows_linearly_with_leaves(kind, tmp_path):
    counts = []
    for size in (150, 300):
        source, target = _flat_model(kind, size)
        path = write_source(tmp_path / f"{size}.npz", source)
        profile = cProfile.Profile()
        suggestion = profile.runcall(flaxckpt.suggest, path, abstract(target))
        counts.append(sum(entry.callcount for entry in profile.getstats()))
        left = {"without a source": size, "layers": 1}.get(kind, 0)
        assert len(suggestion.left) == left
        assert len(suggestion.leaves) == len(target) - left
    assert counts[1] < 3 * counts[0]  # 4 times, if it were quadratic


def _flat_model(kind, size):
    """Returns the shapes of a source and a state whose names have no numbers."""
    words = [f"{a}{b}" for a in "bdfgklmnprstvz" for b in "aeiou"]
    names = [
        f"{words[i % 70]}_{words[i // 70]}s_{words[(3 * i + 7) % 70]}x"
        for i in range(size)
    ]
    source, target = {"model/x/weight": (2, 3)}, {"net/x/kernel": (3, 2)}
    if kind == "layers":
        leaves = {f"{name}/kernel": (8, 4 + i) for i, name in enumerate(names[:20])}
        numbers = range(size // 20)
        source |= layers("blk_{}", numbers, leaves)
        return source, {
            **target,
            **layers("layers_{}", numbers, leaves),
            "head/bias": (7, 9),
        }
    for name in names:
        if kind == "fused":
            source[f"model/{name}/qkv_proj/weight"] = (9, 2)
            target |= {f"net/{name}/{role}_proj/kernel": (2, 3) for role in "qkv"}
        else:
            is_left = kind == "without a source"
            source[f"model/{name}/weight"] = (4, 3)
            target[f"net/{name}/kernel"] = (5, 7) if is_left else (3, 4)
    return source, target
