"""RoBERTa, XLM-RoBERTa and CamemBERT.

Sources:
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/roberta/modeling_roberta.py
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/roberta/modeling_flax_roberta.py
"""

from __future__ import annotations

from flaxckpt._maps.bert import OLD_NAMES, REFUSED, encoder, shapes
from flaxckpt._maps.family import Family
from flaxckpt._maps.modules import array, head, linear, norm

_TIED = "not tie_word_embeddings"

ROBERTA = Family(
    name="roberta",
    model_types=("roberta", "xlm-roberta", "camembert"),
    base="roberta",
    sizes={"i": "num_hidden_layers"},
    tables={
        "linen": (
            *encoder("roberta"),
            *head(
                (
                    *linear("lm_head.dense"),
                    *norm("lm_head.layer_norm"),
                    *array("lm_head.bias"),
                    *linear("lm_head.decoder", when=_TIED, bias=False),
                ),
                "ForMaskedLM|ForCausalLM",
            ),
            *head(linear("classifier"), "ForTokenClassification|ForMultipleChoice"),
            *head(linear("classifier.{d:dense|out_proj}"), "ForSequenceClassification"),
            *head(linear("qa_outputs"), "ForQuestionAnswering"),
        )
    },
    defaults={"tie_word_embeddings": True, "position_embedding_type": "absolute"},
    ignored=r"(roberta/)?embeddings/position_ids",
    copies={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    target_bases={"linen": "roberta"},
    old_names=OLD_NAMES,
    refused=REFUSED,
    shapes={
        **shapes("roberta"),
        "lm_head.bias": "vocab_size",
        "lm_head.decoder.weight": "vocab_size hidden_size",
    },
)
"""RoBERTa, XLM-RoBERTa and CamemBERT."""
