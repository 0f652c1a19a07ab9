"""Fine-tunes a transformer from a safetensors file, and trains another from scratch.

    python -m examples.finetune --config=configs/finetune.py --workdir=runs/finetune

Pre-trains on one half of the Python reference manual, in lower case, and exports the
parameters as one `.safetensors` file, in place of a published model. Then another model
is trained on the other half, with capitals: its trunk has another name, its alphabet is
larger, and its head is new. So the restore renames the trunk, grows the embedding by
the mean of its rows, and drops the head of the file. The same model trained from
scratch for the same number of steps has a higher loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
from absl import app, flags
from ml_collections import ConfigDict, config_flags

import flaxckpt
from examples.char_lm import (
    Corpus,
    TrainState,
    Trunk,
    create_train_state,
    create_trunk,
    distinct_topics,
    evaluate,
    train_batches,
    train_step,
)
from flaxckpt.configs import CheckpointConfig
from flaxckpt.transforms import Transform, drop, grow, keep, rename


def main(config: ConfigDict) -> dict[str, float]:
    """Pre-trains, exports, fine-tunes, and trains from scratch.

    Returns:
        Validation losses, in nats per character: `pretrained`, `finetuned`, `scratch`.
    """
    topics = distinct_topics()
    general = [text.lower() for text in topics[::2]]
    special = topics[1::2]
    alphabet = alphabet_of(general)
    extended = alphabet + alphabet_of(special, without=alphabet)
    workdir = Path(config.workdir)

    longer = config.copy_and_resolve_references()
    longer.total_steps = config.pretrain_steps
    base, pretrained = train(
        create_train_state(longer, len(alphabet)),
        corpus_of(general, alphabet, longer),
        longer,
        workdir / "pretrained",
    )
    print(f"pre-trained for {int(base.step)} steps: loss {pretrained:.3f}")
    source = export(workdir / "pretrained", workdir / "model.safetensors")

    corpus = corpus_of(special, extended, config)
    changes = fine_tuning_changes(len(extended))
    state = create_special_state(config, len(extended))
    params = {"params": state.params}
    print(flaxckpt.plan(source, params, transforms=changes, missing="init"))
    _, finetuned = train(
        state, corpus, config, workdir / "finetuned", source=source, changes=changes
    )
    state = create_special_state(config, len(extended))
    _, scratch = train(state, corpus, config, workdir / "scratch")
    print(
        f"after {config.total_steps} steps on the other half: loss {finetuned:.3f}"
        f" fine-tuned, {scratch:.3f} from scratch"
    )
    [origin] = flaxckpt.metadata(workdir / "finetuned").lineage
    print(f"fine-tuned from {origin.path}, {origin.digest}")
    return {"pretrained": pretrained, "finetuned": finetuned, "scratch": scratch}


def export(run: Path, file: Path) -> Path:
    """Writes the parameters of a run's newest step, without the prefix `params/`."""
    flaxckpt.convert(
        run,
        file,
        format="safetensors",
        transforms=[keep("params/.*"), rename("params/(.*)", r"\1")],
        overwrite=True,
    )
    return file


def fine_tuning_changes(alphabet_size: int) -> Sequence[Transform]:
    """Returns the transforms from the exported parameters to those of `Special`."""
    return [
        drop("head/.*"),
        rename("trunk/(.*)", r"params/reader/\1"),
        grow("params/reader/embed/embedding", axis=0, size=alphabet_size),
    ]


class Special(nn.Module):
    """A trunk with another name, and a new head."""

    reader: Trunk
    alphabet_size: int

    @nn.compact
    def __call__(self, chars: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Maps characters `[batch, length]` to logits `[batch, length, alphabet]`."""
        x = self.reader(chars, deterministic=deterministic)
        logits: jax.Array = nn.Dense(self.alphabet_size, name="writer")(x)
        return logits


def create_special_state(config: ConfigDict, alphabet_size: int) -> TrainState:
    """Creates an initial state of `Special`."""
    model = Special(create_trunk(config, alphabet_size), alphabet_size)
    return create_train_state(config, alphabet_size, model)


def train(
    state: TrainState,
    corpus: Corpus,
    config: ConfigDict,
    directory: Path,
    *,
    source: Path | None = None,
    changes: Sequence[Transform] = (),
) -> tuple[TrainState, float]:
    """Trains, from the newest checkpoint in `directory` if there is one.

    Args:
        state: The initial state; leaves of `source` replace its leaves.
        corpus: The text.
        config: The settings.
        directory: The run directory.
        source: A checkpoint to start from, in any format.
        changes: Transforms of the source.

    Returns:
        The final state, and its loss on validation windows.
    """
    batches: Iterator[np.ndarray] = train_batches(corpus, config)
    checkpointing = CheckpointConfig.from_mapping(config.checkpoint)
    with (
        checkpointing.checkpointer(directory) as ckpt,
        checkpointing.callback(ckpt, dataset=batches) as on_step,
    ):
        state, start = on_step.restore_or_init(
            state, source=source, source_transforms=changes, missing="init"
        )
        for step in range(start + 1, config.total_steps + 1):
            state, _ = train_step(state, next(batches))
            on_step(step, state)
    return state, evaluate(state, corpus, config)["eval/loss"]


def alphabet_of(texts: Sequence[str], without: str = "") -> str:
    """Returns the characters of texts, sorted, without those in `without`."""
    return "".join(sorted(set("".join(texts)) - set(without)))


def corpus_of(texts: Sequence[str], alphabet: str, config: ConfigDict) -> Corpus:
    """Returns the windows of texts; one text in eight is for validation."""
    numbers = {char: i for i, char in enumerate(alphabet)}
    length = config.context + 1

    def windows(texts: Sequence[str]) -> np.ndarray:
        text = np.array([numbers[char] for char in "".join(texts)], np.int32)
        return np.lib.stride_tricks.sliding_window_view(text, length)

    train = [text for i, text in enumerate(texts) if i % 8 != 4]
    return Corpus(alphabet, windows(train), windows(texts[4::8])[::length])


if __name__ == "__main__":
    _CONFIG = config_flags.DEFINE_config_file("config", "configs/finetune.py")
    _WORKDIR = flags.DEFINE_string("workdir", None, "Replaces config.workdir.")

    def _run(argv: list[str]) -> None:
        del argv
        config = _CONFIG.value
        config.workdir = _WORKDIR.value or config.workdir
        main(config)

    app.run(_run)
