"""Export of a model's parameters as a directory that Hugging Face's libraries open."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack

from flaxckpt import _storage, _util
from flaxckpt._checkpoint.save_handle import SaveResult
from flaxckpt._convert import convert, export_map, model_files, plan
from flaxckpt._convert.plan import ConvertOptions, SharedOptions
from flaxckpt._maps import named
from flaxckpt._transforms import export
from flaxckpt._types import PathLike
from flaxckpt.transforms import Transform


@_util.guessed_names.explain
@plan.takes_options
def export_huggingface(
    run: PathLike,
    directory: PathLike,
    *,
    map: str | Sequence[Transform] = "auto",
    target: str | None = None,
    prefix: str | None = None,
    transforms: Sequence[Transform] = (),
    dtype: Any = None,
    config: Any = None,
    tokenizer: PathLike | None = None,
    max_shard_bytes: int = plan.MAX_SHARD_BYTES,
    **options: Unpack[SharedOptions],
) -> SaveResult:
    """Writes the parameters of a checkpoint as a model of Hugging Face.

    `transformers` opens the directory with `from_pretrained`. The map that brought the
    model to Flax is inverted, so a model comes back under its names, in its shapes.
    Optimizer states, step counters and random keys are left out.

    Like `convert`, the export verifies the source while it reads, needs little memory,
    and makes `directory` appear only when it is complete and durable; the same call
    continues an interrupted export.

    ```python
    model = "Llama-3.2-1B"  # the directory of the published model
    export_huggingface("run", "tuned", config=model, tokenizer=model)
    ```

    The options without a description are those of `convert`.

    Args:
        run: A checkpoint in any supported format, or a run directory.
        directory: Path of the new model.
        map: `"auto"` finds the family by the `model_type` of the config, and the layout
            by the names of the leaves; the name of a family, such as `"llama"`, is for
            a config without `model_type`. Or the transforms from the published model to
            the leaves of the checkpoint, each with an inverse; `drop`, `keep` and
            `cast` are not undone.
        target: Layout of the checkpoint, such as `"linen"`, if names do not tell.
        prefix: Leaf path of the parameters, such as `"params"`, likewise.
        transforms: Changes to apply before the inverse of the map, such as `drop` for
            leaves that the published model lacks.
        dtype: Element type of all floating arrays; by default that of each leaf.
        config: For `config.json`: a dict, a path of the file or of a directory with
            it, or an object with `to_dict`. By default that of `tokenizer`. It gets the
            type of the arrays, and their `vocab_size` if the vocabulary grew.
        tokenizer: A directory, such as a downloaded model: the files of its tokenizer,
            its processors and `generation_config.json` are copied.
        max_shard_bytes: Upper bound on the arrays in one file; see `convert`.
        overwrite: Whether to replace an existing model. A directory with any other
            files is never replaced.
        max_concurrent_bytes: Bytes of arrays in memory at one time; see `convert`. An
            array that the map splits is in memory as a whole.

    Returns:
        The path of the directory, its size, and the duration.

    Raises:
        CheckpointNotFoundError, CheckpointFormatError, DamagedCheckpointError: As for
            `load`.
        OptionError: The map does not fit the leaves, has no inverse, or lacks leaves;
            or `config` or `tokenizer` is no such thing, or the arrays have other sizes
            than `config` states.
        CheckpointExistsError: `directory` exists, or another process writes to it.
        UnsupportedLeafError: safetensors lacks the types of some leaves.
        SaveFailedError: The bytes could not be written.
    """
    final = _storage.paths.resolve(directory)
    files = model_files.read(config, tokenizer)
    changes = export_map.find_changes(
        map,
        named.find_for_export,
        files.config,
        export.Export,
        run=run,
        step=options.get("step"),
        before=transforms,
        target=target,
        prefix=prefix,
        dtype=dtype,
    )
    family = named.family_of_export(map, files.config)
    files = dataclasses.replace(files, family=family)
    return convert.convert_to(
        run,
        final,
        ConvertOptions(
            **options,
            format="huggingface",
            transforms=changes,
            max_shard_bytes=max_shard_bytes,
            files=files,
        ),
    )
