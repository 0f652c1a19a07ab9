"""Maps refuse what they would lose: other heads, copies that differ, wrong sizes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict

import flaxckpt
from flaxckpt import errors, maps
from flaxckpt.transforms import drop, inverse, merge_lora, remap
from tests.helpers import published as hf
from tests.maps.leaves import flatten

safetensors = pytest.importorskip("safetensors.numpy", reason="needs safetensors")

HEAD, EMBEDDING = "lm_head/weight", "model/embed_tokens/weight"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
}
UNTIED = {**CONFIG, "tie_word_embeddings": False}


def published(layers=2):
    """Returns the tensors of a tied Llama, by leaf path."""
    tensors = hf.decoder_tensors(layers)
    return {name.replace(".", "/"): value for name, value in tensors.items()}


def write(directory, tensors, config=CONFIG):
    """Writes a model as published, and returns its directory."""
    return hf.write(directory, tensors, config)


def assert_equal(wanted, found):
    wanted, found = flatten(wanted), flatten(found)
    assert sorted(wanted) == sorted(found)
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(leaf, found[path], err_msg=path)


# ---- copies -------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", maps.llama.targets)
def test_omits_head_equal_to_tied_embedding(tmp_path, target):
    tensors = published()
    twice = write(tmp_path / "twice", {**tensors, HEAD: tensors[EMBEDDING]})
    changes = maps.llama(twice, target=target)
    found = flaxckpt.load(twice, transforms=changes)
    once = write(tmp_path / "once", tensors)
    assert_equal(flaxckpt.load(once, transforms=changes), found)
    flaxckpt.save(tmp_path / "own", found)
    back = flatten(flaxckpt.load(tmp_path / "own", transforms=inverse(changes)))
    assert sorted(back) == sorted(tensors)


@pytest.mark.parametrize("target", maps.llama.targets)
def test_rejects_head_different_from_tied_embedding(tmp_path, target):
    tensors = published()
    head = tensors[EMBEDDING].copy()
    head[3, 4] += 1e-6
    source = write(tmp_path / "source", {**tensors, HEAD: head})
    changes = maps.llama(source, target=target)
    with pytest.raises(errors.OptionError, match="1 of 66 elements") as caught:
        flaxckpt.load(source, transforms=changes)
    assert "tie_word_embeddings: False" in str(caught.value)
    assert HEAD in str(caught.value)
    assert EMBEDDING in str(caught.value)
    assert str(caught.value).count("\n") < 15
    left_out = flaxckpt.load(source, transforms=[drop(HEAD), *changes])
    once = write(tmp_path / "once", tensors)
    assert_equal(flaxckpt.load(once, transforms=changes), left_out)
    kept = maps.llama(UNTIED, target=target)
    leaves = flatten(flaxckpt.load(source, transforms=kept)).values()
    assert any(leaf.T.shape == (11, 6) and (head == leaf.T).all() for leaf in leaves)


@pytest.mark.parametrize("other", [np.zeros((12, 6), "f4"), np.zeros((11, 6), "f2")])
def test_plan_rejects_head_of_other_shape_or_dtype(tmp_path, other):
    source = write(tmp_path / "source", {**published(), HEAD: other})
    changes = maps.llama(source, target="tunix")
    with pytest.raises(errors.OptionError, match="tie_word_embeddings: False"):
        flaxckpt.plan(source, {"a": "float32[1]"}, transforms=changes)


COPIES = [(name, *pair) for name in maps.__all__ for pair in getattr(
    getattr(maps, name), "copies", {}
).items()]  # fmt: skip


@pytest.mark.parametrize(("family", "copy", "kept"), COPIES)
def test_kept_tensors_of_all_copies_have_rows(family, copy, kept):
    """The copy itself may have a row in untied models; the kept one always has."""
    patterns = getattr(maps, family).source_patterns
    assert any(p.fullmatch(kept.replace(".", "/")) for p in patterns)


@pytest.mark.parametrize("family", ["gpt2", "bert", "roberta", "t5", "whisper"])
def test_encoder_maps_compare_copies(family):
    [copies] = [
        change
        for change in getattr(maps, family)(CONFIGS[family], target="linen")
        if str(change).endswith(".copies()")
    ]
    assert [path.replace("/", ".") for path in copies.pairs] == [
        *getattr(maps, family).copies
    ]


CONFIGS = {
    "gpt2": {"n_layer": 1},
    "bert": {"num_hidden_layers": 1},
    "roberta": {"num_hidden_layers": 1},
    "t5": {"num_layers": 1},
    "whisper": {"encoder_layers": 1, "decoder_layers": 1},
}


def test_rejects_peft_trained_head_for_tied_models(tmp_path):
    """`modules_to_save=["lm_head"]` saves the head whole."""
    tensors = published()
    source = write(tmp_path / "source", tensors)
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    adapter = {
        f"{q}.lora_A.weight": np.ones((1, 6), "f4"),
        f"{q}.lora_B.weight": np.ones((8, 1), "f4"),
        "base_model.model.lm_head.weight": tensors[EMBEDDING] + 1,
    }
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1}
    (tmp_path / "adapter").mkdir()
    safetensors.save_file(adapter, tmp_path / "adapter/adapter_model.safetensors")
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(settings))
    merged = merge_lora(tmp_path / "adapter")
    changes = [merged, *maps.llama(source, target="linen")]
    with pytest.raises(errors.OptionError, match="tie_word_embeddings: False"):
        flaxckpt.load(source, transforms=changes)
    changes = [merged, *maps.llama(UNTIED, target="linen")]
    found = flaxckpt.load(source, transforms=changes)["lm_head"]["kernel"]
    np.testing.assert_array_equal(tensors[EMBEDDING] + 1, found.T)


# ---- other leaves -------------------------------------------------------------------


@pytest.mark.parametrize("target", maps.llama.targets)
@pytest.mark.parametrize(
    "extra", ["reward/weight", "v_head", "model/layers/0/x/weight"]
)
def test_rejects_leaves_without_row_anywhere(tmp_path, target, extra):
    tensors = {**published(), extra: np.ones((2, 6), "f4")}
    source = write(tmp_path / "source", tensors)
    changes = maps.llama(source, target=target)
    with pytest.raises(errors.OptionError, match=f"no row for 1 leaf:\n  {extra}"):
        flaxckpt.load(source, transforms=changes)
    flaxckpt.load(source, transforms=[drop(extra), *changes])


# ---- heads --------------------------------------------------------------------------

HEADS = {  # the end of a class -> the leaves of its head in a state, and published
    "ForCausalLM": (["lm_head/kernel"], ["lm_head/weight"]),
    "ForSequenceClassification": (["score/kernel"], ["score/weight"]),
    "ForTokenClassification": (
        ["score/bias", "score/kernel"],
        ["score/bias", "score/weight"],
    ),
    "Model": ([], []),
}


def save_with_heads(tmp_path, heads):
    """Saves the parameters of a Llama with the leaves of heads; returns the path."""
    source = write(tmp_path / "source", published(), UNTIED)
    changes = maps.llama(
        {**UNTIED, "architectures": ["LlamaModel"]}, target="linen", prefix="params"
    )
    state = flaxckpt.load(source, transforms=changes)
    for path in heads:
        module, name = path.split("/")
        leaf = np.ones((6, 3) if name == "kernel" else 3, "f4")
        if module == "lm_head":
            leaf = state["params"]["model"]["embed_tokens"]["embedding"].T
        state["params"].setdefault(module, {})[name] = leaf
    return flaxckpt.save(tmp_path / "state", state).path


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("there", HEADS)
@pytest.mark.parametrize("asked", HEADS)
def test_export_has_head_of_its_architecture(tmp_path, asked, there, is_tied):
    state = save_with_heads(tmp_path, HEADS[there][0])
    config = {
        **CONFIG,
        "tie_word_embeddings": is_tied,
        "architectures": [f"Llama{asked}"],
    }
    out = tmp_path / "out"
    if asked != there:
        with pytest.raises(errors.OptionError, match=r"lm_head|score"):
            flaxckpt.export_huggingface(state, out, config=config)
        return
    flaxckpt.export_huggingface(state, out, config=config)
    found = {path for path in flaxckpt.metadata(out).leaves if "model/" not in path}
    is_copy = is_tied and asked == "ForCausalLM"
    assert found == (set() if is_copy else {*HEADS[asked][1]})


@pytest.mark.parametrize("target", maps.llama.targets)
@pytest.mark.parametrize("head", ["QuestionAnswering", "MultipleChoice", "FooBar"])
def test_error_names_architecture_head_without_rows(tmp_path, target, head):
    tensors = {**published(), HEAD: published()[EMBEDDING]}
    source = write(tmp_path / "source", tensors, UNTIED)
    changes = maps.llama(UNTIED, target=target, prefix="params")
    flaxckpt.save(tmp_path / "state", flaxckpt.load(source, transforms=changes))
    config = {**UNTIED, "architectures": [f"LlamaFor{head}"]}
    with pytest.raises(errors.OptionError, match=f"has no head For{head}"):
        flaxckpt.export_huggingface(
            tmp_path / "state", tmp_path / "out", config=config, target=target
        )


def test_error_for_head_of_other_class_names_class(tmp_path):
    state = save_with_heads(tmp_path, HEADS["ForCausalLM"][0])
    config = {**UNTIED, "architectures": ["LlamaForSequenceClassification"]}
    with pytest.raises(errors.OptionError) as caught:
        flaxckpt.export_huggingface(state, tmp_path / "out", config=config)
    said = "lm_head/kernel: a LlamaForSequenceClassification has no such leaf\n"
    assert said in str(caught.value)
    assert "its architectures name the class" in str(caught.value)
    assert "tie_word_embeddings" not in str(caught.value)


STATES = {
    "dict": lambda params: {"params": params},
    "FrozenDict": lambda params: FrozenDict({"params": params}),
    "nnx": lambda params: {
        "params": nnx.State(jax.tree.map(lambda x: nnx.Param(jnp.asarray(x)), params))
    },
}


@pytest.mark.parametrize("kind", STATES)
def test_inverse_keeps_leaves_outside_parameters(tmp_path, kind):
    tensors = published()
    source = write(tmp_path / "source", tensors)
    changes = maps.llama(source, target="tunix", prefix="params")
    params = flaxckpt.load(source, transforms=changes)["params"]
    opt_state = optax.adamw(1e-3).init(params)
    state = {
        **STATES[kind](params),
        "opt_state": opt_state,
        "step": 3,
        "key": jax.random.key(0),
        "batch_stats": {"mean": np.ones(3)},
    }
    flaxckpt.save(tmp_path / "run", state)
    found = flaxckpt.load(tmp_path / "run", transforms=inverse(changes))
    back = flatten(found["model"])
    for path, leaf in tensors.items():
        name = path.removeprefix("model/")
        np.testing.assert_array_equal(leaf, back[name], err_msg=name)
    assert found["step"] == 3
    assert found["key"] == state["key"]
    np.testing.assert_array_equal(found["batch_stats"]["mean"], np.ones(3))
    assert found["opt_state"][0].count == 0
    assert flatten(found["opt_state"][0].mu).keys() == back.keys()


@pytest.mark.parametrize("target", ["linen", "tunix"])
@pytest.mark.parametrize("options", [{}, {"target": "linen", "prefix": "params"}])
def test_export_rejects_head_missing_in_tied_model(tmp_path, target, options):
    """Gemma has all its tied parameters in `model`, and the head beside it."""
    config = {**CONFIG, "model_type": "gemma"}
    source = write(tmp_path / "source", published(), config)
    changes = maps.gemma(source, target=target, prefix="params")
    state = flaxckpt.load(source, transforms=changes)
    state["params"]["lm_head"] = {"kernel": np.ones((6, 11), "f4")}
    flaxckpt.save(tmp_path / "run", {**state, "step": 1})
    with pytest.raises(errors.OptionError, match=r"(leaf|config):\n  params/lm_head/k"):
        flaxckpt.load(tmp_path / "run", transforms=inverse(changes))
    options = {**options, "target": target} if options else {}
    with pytest.raises(errors.OptionError, match="lm_head/kernel"):
        flaxckpt.export_huggingface(
            tmp_path / "run", tmp_path / "out", config=source, **options
        )
    flaxckpt.export_huggingface(
        tmp_path / "run",
        tmp_path / "out",
        config=source,
        transforms=[drop("params/lm_head/kernel")],
    )


def test_checks_custom_table_as_strictly(tmp_path):
    table = [("model/embed", "params/embed"), ("model/norm", "params/norm")]
    change = remap(table, rest="error")
    model = {"embed": np.ones(3), "norm": np.ones(2)}
    state = {"model": model, "step": 3, "head": np.ones(2)}
    flaxckpt.save(tmp_path / "c", state)
    with pytest.raises(errors.OptionError, match=r"1 leaf:\n  head: [^$]*rest=.keep"):
        flaxckpt.load(tmp_path / "c", transforms=[change])
    found = flaxckpt.load(tmp_path / "c", transforms=[drop("head"), change])
    assert found.keys() == {"params", "step"}
    flaxckpt.save(tmp_path / "own", {**found, "batch_stats": np.ones(2)})
    back = flaxckpt.load(tmp_path / "own", transforms=[change.inverse()])
    assert_equal({"model": model, "step": 3, "batch_stats": np.ones(2)}, back)


# ---- sizes --------------------------------------------------------------------------

BILLION = 10**9


def refusal(load):
    with pytest.raises(errors.OptionError, match="leaves are missing") as caught:
        load()
    message = str(caught.value)
    assert "more" in message
    assert message.count("\n") < 15
    return message


@pytest.mark.parametrize("target", maps.llama.targets)
def test_wrong_layer_count_fails_fast(tmp_path, target):
    source = write(tmp_path / "source", published())
    huge = {**CONFIG, "num_hidden_layers": BILLION}
    changes = maps.llama(huge, target=target)
    message = refusal(lambda: flaxckpt.load(source, transforms=changes))
    assert f"{9 * (BILLION - 2):,} leaves are missing" in message
    assert "\n  model/layers/2/" in message
    own = maps.llama(CONFIG, target=target)
    flaxckpt.save(tmp_path / "own", flaxckpt.load(source, transforms=own))
    with pytest.raises(errors.OptionError):
        flaxckpt.load(tmp_path / "own", transforms=inverse(changes))
    with pytest.raises(errors.OptionError):
        flaxckpt.export_huggingface(tmp_path / "own", tmp_path / "out", config=huge)


STACK = ("l/{i}/e/{j}", "l/{i}/e", "j a -> j a")


@pytest.mark.parametrize(
    ("row", "count"),
    [
        (("l/{i}/e/{j}", "l/{i}/e/{j}"), BILLION**2 - 6),
        (STACK, BILLION**2 - 6),
        ((*STACK, True), 2 * BILLION - 6),  # optional: layers may lack all of them
        (("l/{i}/e/{j}", "e", "j i a -> i j a"), BILLION**2 - 6),
        (("l/{i}/{c:e|f}/{j}", "l/{i}/{c:g|h}/{j}"), 2 * BILLION**2 - 6),
    ],
)
def test_error_counts_missing_leaves_of_huge_tables(tmp_path, row, count):
    leaves = {str(i): {"e": {str(j): np.ones(2) for j in range(3)}} for i in range(2)}
    flaxckpt.save(tmp_path / "c", {"l": leaves})
    change = remap([row], i=BILLION, j=BILLION)
    message = refusal(lambda: flaxckpt.load(tmp_path / "c", transforms=[change]))
    assert f"{count:,} leaves are missing" in message


def test_handles_huge_layer_number_in_checkpoint(tmp_path):
    state = {"l": {"0": np.ones(2), str(BILLION - 1): np.ones(2)}}
    flaxckpt.save(tmp_path / "c", state)
    message = refusal(
        lambda: flaxckpt.load(tmp_path / "c", transforms=[remap([("l/{i}", "x")])])
    )
    assert f"{BILLION - 2:,} leaves are missing:\n  l/1" in message


# ---- heads of untied models ----------------------------------------------------------


@pytest.mark.parametrize("target", maps.llama.targets)
def test_rejects_untied_model_without_head_both_ways(tmp_path, target):
    whole = write(tmp_path / "whole", {**published(), HEAD: np.ones((11, 6), "f4")})
    lacking = write(tmp_path / "lacking", published(), UNTIED)
    (whole / "config.json").write_text(json.dumps(UNTIED))
    changes = maps.llama(UNTIED, target=target, prefix="params")
    with pytest.raises(errors.OptionError, match="lm_head/weight"):
        flaxckpt.load(lacking, transforms=changes)
    state = flaxckpt.load(whole, transforms=changes)
    head = next(
        path for path in flatten(state) if "lm_head" in path or "logits" in path
    )
    flaxckpt.save(tmp_path / "run", state)
    with pytest.raises(errors.OptionError, match=r"lm_head|logits_dense"):
        flaxckpt.export_huggingface(
            tmp_path / "run", tmp_path / "out", config=UNTIED, transforms=[drop(head)]
        )
    assert not (tmp_path / "out").exists()


def test_base_model_has_no_head(tmp_path):
    base = {path.removeprefix("model/"): x for path, x in published().items()}
    source = write(tmp_path / "base", base, UNTIED)
    changes = maps.llama(UNTIED, target="linen", source_base="", target_base="")
    state = flaxckpt.load(source, transforms=changes)
    assert flatten(state).keys() >= {"embed_tokens/embedding", "norm/weight"}


# ---- keys of the configuration -------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("target", ["maxtext", "maxtext-scanned"])
def test_spellings_of_rotary_scaling_are_equivalent(tmp_path, target):
    source = write(tmp_path / "source", published())

    def load(**config):
        changes = maps.llama({**CONFIG, **config}, target=target)
        return flatten(flaxckpt.load(source, transforms=changes))

    plain = load(rope_scaling=None)
    scaled = load(rope_scaling={"rope_type": "llama3", "factor": 8.0})
    query = next(path for path in plain if path.endswith("query/kernel"))
    assert not np.array_equal(plain[query], scaled[query])
    theta = {"rope_theta": 5e5, "factor": 8.0}
    for config in (
        {"rope_scaling": {"type": "llama3"}},
        {"rope_parameters": {"rope_type": "llama3", **theta}},
        {"rope_parameters": {"rope_type": "llama3"}, "rope_scaling": None},
    ):
        assert_equal(scaled, load(**config))
    for config in (
        {"rope_parameters": {"rope_type": "default", **theta}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ):
        assert_equal(plain, load(**config))
    with pytest.raises(errors.OptionError, match="contradicts itself"):
        load(
            rope_parameters={"rope_type": "default"},
            rope_scaling={"rope_type": "llama3"},
        )
