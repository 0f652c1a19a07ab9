"""BERT, and models of its architecture, such as MiniLM.

Sources:
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/bert/modeling_bert.py
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/bert/modeling_flax_bert.py
    https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/modeling_utils.py
"""

from __future__ import annotations

from flaxckpt._maps.family import Family, Tensor
from flaxckpt._maps.modules import array, embedding, head, linear, norm

REFUSED = {
    "add_cross_attention": "no row has the tensors of cross attention",
    "not position_embedding_type=absolute": "Flax classes have absolute positions",
}
OLD_NAMES = {"LayerNorm/gamma": "LayerNorm/weight", "LayerNorm/beta": "LayerNorm/bias"}


def encoder(base: str) -> tuple[Tensor, ...]:
    """Returns the rows of the base model of BERT and RoBERTa, whose name is `base`."""
    layer = f"{base}.encoder.layer.{{i}}"
    return (
        *embedding(f"{base}.embeddings.{{w:word|position|token_type}}_embeddings"),
        *norm(f"{base}.embeddings.LayerNorm"),
        *linear(f"{layer}.attention.self.{{p:query|key|value}}"),
        *linear(f"{layer}.{{d:attention.output|intermediate|output}}.dense"),
        *norm(f"{layer}.{{n:attention.output|output}}.LayerNorm"),
        *head(
            linear(f"{base}.pooler.dense"),
            "BertForSequenceClassification|BertForMultipleChoice"
            "|BertForNextSentencePrediction|BertForPreTraining",
        ),
    )


def shapes(base: str) -> dict[str, str]:
    words, layer = f"{base}.embeddings", f"{base}.encoder.layer.{{i}}"
    square = "hidden_size hidden_size"
    return {
        f"{words}.word_embeddings.weight": "vocab_size hidden_size",
        f"{words}.position_embeddings.weight": "max_position_embeddings hidden_size",
        f"{layer}.attention.self.{{p:query|key|value}}.weight": square,
        f"{layer}.attention.output.dense.weight": square,
        f"{layer}.intermediate.dense.weight": "intermediate_size hidden_size",
        f"{layer}.output.dense.weight": "hidden_size intermediate_size",
    }


_TRANSFORM = "cls.predictions.transform"

BERT = Family(
    name="bert",
    model_types=("bert",),
    base="bert",
    sizes={"i": "num_hidden_layers"},
    tables={
        "linen": (
            *encoder("bert"),
            *head(
                (
                    *linear(f"{_TRANSFORM}.dense"),
                    *norm(f"{_TRANSFORM}.LayerNorm"),
                    *array("cls.predictions.bias"),
                    *linear(
                        "cls.predictions.decoder",
                        when="not tie_word_embeddings",
                        bias=False,
                    ),
                ),
                "ForMaskedLM|ForPreTraining|BertLMHeadModel",
            ),
            *head(
                linear("cls.seq_relationship"),
                "ForNextSentencePrediction|ForPreTraining",
            ),
            *head(linear("classifier"), "Classification|ForMultipleChoice"),
            *head(linear("qa_outputs"), "ForQuestionAnswering"),
        )
    },
    defaults={"tie_word_embeddings": True, "position_embedding_type": "absolute"},
    ignored=r"(bert/)?embeddings/position_ids",
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    target_bases={"linen": "bert"},
    old_names=OLD_NAMES,
    refused=REFUSED,
    shapes={
        **shapes("bert"),
        "cls.predictions.bias": "vocab_size",
        "cls.predictions.decoder.weight": "vocab_size hidden_size",
    },
)
"""BERT, and models of its architecture, such as MiniLM."""
