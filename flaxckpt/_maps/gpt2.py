"""GPT-2.

Sources:
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/gpt2/modeling_gpt2.py
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/gpt2/modeling_flax_gpt2.py
"""

from __future__ import annotations

from flaxckpt._maps import decoder
from flaxckpt._maps.family import Family
from flaxckpt._maps.modules import embedding, head, linear, norm, under

_LAYER = "transformer.h.{i}"

GPT2 = Family(
    name="gpt2",
    model_types=("gpt2",),
    base="transformer",
    sizes={"i": "n_layer|num_hidden_layers"},
    tables={
        "linen": (
            *embedding("transformer.{w:wte|wpe}"),
            # Its kernels are (output, input) in Flax and (input, output) in torch.
            *linear(f"{_LAYER}.{{m:attn.c_attn|attn.c_proj|mlp.c_fc|mlp.c_proj}}"),
            *norm(f"{_LAYER}.{{n:ln_1|ln_2}}"),
            *norm("transformer.ln_f"),
            *head(linear("lm_head", when=decoder.UNTIED, bias=False)),
            *under(
                "architectures=*ForSequenceClassification*",
                head(linear("score", bias=False)),
            ),
            *under(
                "architectures=*ForTokenClassification*", head(linear("classifier"))
            ),
            *under("architectures=*ForQuestionAnswering*", head(linear("qa_outputs"))),
        )
    },
    defaults={"tie_word_embeddings": True},
    # The causal masks of old checkpoints.
    ignored=r"(transformer/)?h/\d+/attn/(masked_)?bias",
    copies={"lm_head.weight": "transformer.wte.weight"},
    target_bases={"linen": "transformer"},
    refused={"add_cross_attention": "no row has the tensors of cross attention"},
    shapes={
        "transformer.wte.weight": "vocab_size n_embd",
        "transformer.wpe.weight": "n_positions n_embd",
        f"{_LAYER}.attn.c_attn.weight": "n_embd 3*n_embd",
        f"{_LAYER}.attn.c_proj.weight": "n_embd n_embd",
        f"{_LAYER}.mlp.c_fc.weight": "n_embd n_inner|4*n_embd",
        f"{_LAYER}.mlp.c_proj.weight": "n_inner|4*n_embd n_embd",
        "lm_head.weight": "vocab_size n_embd",
    },
)
"""GPT-2."""
