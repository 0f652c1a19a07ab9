"""transformers opens exported models, and computes equal logits."""

import jax
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import flaxckpt
from flaxckpt import maps
from flaxckpt.transforms import rename, split, transpose
from tests.helpers import hub_cache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")

SIZES = {"vocab_size": 131, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def llama(**options):
    return transformers.LlamaConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **SIZES,
        **options,
    )


MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(llama()),
    "llama, tied, with biases": lambda: transformers.LlamaForCausalLM(
        llama(tie_word_embeddings=True, attention_bias=True)
    ),
    "llama without a head": lambda: transformers.LlamaModel(llama()),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=24, n_layer=3, n_head=4, n_positions=64, **SIZES)
    ),
}

LLAMA = [
    rename("(.*)", r"params/\1"),
    rename(r"params/(.*)_proj/weight", r"params/\1_proj/kernel"),
    transpose("params/.*_proj/kernel"),
]
GPT2 = [
    rename("(.*)", r"params/\1"),
    rename(r"params/(.*)/(c_\w+)/weight", r"params/\1/\2/kernel"),
    split(
        r"params/(.*)/c_attn/(kernel|bias)",
        [rf"params/\1/{name}/\2" for name in "qkv"],
        axis=-1,
    ),
]
MAPS = {"llama": LLAMA, "gpt2": GPT2}


@pytest.fixture(params=MODELS)
def published(request, tmp_path):
    """A tiny model with random values, and its directory."""
    torch.manual_seed(0)
    model = MODELS[request.param]().eval()
    with torch.no_grad():
        for values in model.parameters():  # no values that a wrong map would keep
            values.copy_(torch.randn_like(values) / 4)
    model.save_pretrained(tmp_path / "published", max_shard_bytes=10_000)
    words = {f"<{i}>": i for i in range(131)}
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<0>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<0>"
    ).save_pretrained(tmp_path / "published")
    return (
        model,
        tmp_path / "published",
        MAPS[request.param.partition(",")[0].split()[0]],
    )


def logits(model):
    ids = torch.arange(2 * 17).reshape(2, 17) * 7 % 131
    with torch.no_grad():
        output = model(input_ids=ids)
    return getattr(output, "logits", output[0]).numpy()


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_training_state_exports_to_transformers(tmp_path, published, max_shard_bytes):
    model, source, names = published
    params = flaxckpt.load(source, transforms=names)["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))
    with flaxckpt.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(7, state)
    out = tmp_path / "out"
    flaxckpt.export_huggingface(
        tmp_path / "run",
        out,
        map=names,
        tokenizer=source,
        max_shard_bytes=max_shard_bytes,
    )
    back, report = type(model).from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    np.testing.assert_array_equal(logits(back.eval()), logits(model))
    automatic = transformers.AutoModel.from_pretrained(out).eval()
    np.testing.assert_array_equal(
        logits(automatic), logits(getattr(model, model.base_model_prefix, model))
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("<3> <77>")["input_ids"] == [3, 77]
    again = flaxckpt.load(out, transforms=names)["params"]
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_changed_parameters_change_the_exported_model(tmp_path, published):
    model, source, names = published
    params = flaxckpt.load(source, transforms=names)
    flaxckpt.save(tmp_path / "x", jax.tree.map(lambda x: x * 2, params))
    flaxckpt.export_huggingface(
        tmp_path / "x", tmp_path / "out", map=names, config=model.config
    )
    with torch.no_grad():
        for values in model.parameters():
            values.mul_(2)
    back = type(model).from_pretrained(tmp_path / "out").eval()
    np.testing.assert_array_equal(logits(back), logits(model))


@pytest.mark.parametrize(
    ("published", "target"),
    [
        ("llama", "tunix"),
        ("llama", "maxtext-scanned"),
        ("llama, tied, with biases", "linen"),
        ("llama without a head", "linen"),
    ],
    indirect=["published"],
)
def test_run_loaded_by_name_exports_by_name(tmp_path, published, target):
    model, source, _ = published
    is_base = model.base_model is model
    names = {"source_base": "", "target_base": ""} if is_base else {}
    changes = maps.detect(source).family(source, target=target, **names)
    params = flaxckpt.load(source, transforms=changes)
    empty = jax.tree.map(jax.numpy.zeros_like, params)
    state = TrainState.create(apply_fn=None, params=empty, tx=optax.adamw(1e-3))
    with (
        flaxckpt.Checkpointer(tmp_path / "run") as checkpointer,
        flaxckpt.CheckpointCallback(checkpointer, every_steps=1) as on_step,
    ):
        state, start = on_step.restore_or_init(state, source=source, source_map="auto")
        on_step(start + 1, state.replace(step=1))
    flaxckpt.export_huggingface(
        tmp_path / "run", tmp_path / "out", config=source, tokenizer=source
    )
    back, report = type(model).from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report.values()), report
    np.testing.assert_allclose(
        logits(back.eval()), logits(model), rtol=2e-6 if "maxtext" in target else 0
    )


@pytest.mark.parametrize("published", ["gpt2"], indirect=True)
def test_opened_model_has_exported_dtype(tmp_path, published):
    model, source, names = published
    flaxckpt.export_huggingface(
        convert(source, tmp_path / "x", names),
        tmp_path / "out",
        map=names,
        config=model.config,
        dtype="bfloat16",
    )
    back = type(model).from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert {values.dtype for values in back.parameters()} == {torch.bfloat16}
    wanted = model.to(torch.bfloat16)
    for name, values in back.state_dict().items():
        assert torch.equal(values, wanted.state_dict()[name]), name


def convert(source, target, names):
    flaxckpt.convert(source, target, transforms=names)
    return target


@pytest.mark.parametrize("published", ["gpt2"], indirect=True)
def test_hub_cache_layout_matches_huggingface_hub(tmp_path, published):
    model, source, names = published
    files = {path.name: path for path in source.iterdir()}
    cached = hub_cache.write_model(tmp_path / "hub", files)
    snapshot = huggingface_hub.snapshot_download(
        "org/name", cache_dir=tmp_path / "hub", local_files_only=True
    )
    assert flaxckpt.metadata(cached).path == snapshot
    flaxckpt.export_huggingface(
        convert(cached, tmp_path / "x", names),
        tmp_path / "out",
        map=names,
        tokenizer=cached,
    )
    back = type(model).from_pretrained(tmp_path / "out").eval()
    np.testing.assert_array_equal(logits(back), logits(model))
