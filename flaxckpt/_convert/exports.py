"""Exports of models as directories that the libraries of Hugging Face open."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from flaxckpt import _storage, _util, errors
from flaxckpt._checkpoint.save_handle import SaveResult
from flaxckpt._convert import adapter_files, convert, model_files, plan
from flaxckpt._convert.adapter_files import AdapterFiles
from flaxckpt._convert.plan import ConvertOptions, SharedOptions
from flaxckpt._formats import locate
from flaxckpt._maps import model_config, named, peft
from flaxckpt._transforms import base as _transforms
from flaxckpt._transforms import export
from flaxckpt._types import LeafPath, PathLike
from flaxckpt.transforms import Transform, cast


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
    changes = _find_changes(
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


@_util.guessed_names.explain
@plan.takes_options
def export_peft(
    run: PathLike,
    directory: PathLike,
    *,
    alpha: float | None = None,
    map: str | Sequence[Transform] = "auto",
    target: str | None = None,
    prefix: str | None = None,
    transforms: Sequence[Transform] = (),
    dtype: Any = None,
    config: Any = None,
    base_model: str | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Unpack[SharedOptions],
) -> SaveResult:
    """Writes the LoRA adapters of a checkpoint as an adapter of PEFT.

    `peft.PeftModel.from_pretrained(model, directory)` opens it, as do programs that
    serve adapters. Adapters are found by the names of NNX (`lora_a`, `lora_b`) and of
    Qwix and Tunix (`w_lora_a`, `w_lora_b`); the map of their kernels tells the modules.
    The kernels themselves may be missing. All other leaves are left out.

    ```python
    export_peft("run", "adapter", alpha=16.0, config="Llama-3.2-1B")
    ```

    The options without a description are those of `convert`.

    Args:
        run: A checkpoint in any supported format, or a run directory.
        directory: Path of the new adapter: `adapter_model.safetensors` and
            `adapter_config.json`.
        alpha: The numerator of the factor `alpha / rank` of the updates. By default the
            factor is 1, which is that of `flax.nnx.LoRA`; Qwix needs it.
        map: The map from the published model to the parameters, as for
            `export_huggingface`; a list must have a single `remap`.
        target: Layout of the checkpoint, if names do not tell.
        prefix: Leaf path of the parameters, likewise.
        transforms: Changes to apply before, such as `rename` for adapters with other
            names.
        dtype: Element type of the adapter; by default that of each leaf.
        config: The configuration of the model: a dict, a path of `config.json` or of
            its directory, or an object with `to_dict`. Not needed if `map` is a list.
        base_model: Name or path of the model, for `adapter_config.json`.
        settings: Further entries of `adapter_config.json`, such as `task_type`.
        overwrite: Whether to replace an existing adapter. A directory with any other
            files is never replaced.

    Returns:
        The path of the directory, its size, and the duration.

    Raises:
        CheckpointNotFoundError, CheckpointFormatError, DamagedCheckpointError: As for
            `load`.
        OptionError: There are no adapters; the map lacks their kernels; PEFT has no
            such adapters, as for stacked layers or experts; the factor is unknown; or
            `settings` ask for other updates, such as DoRA.
        CheckpointExistsError: `directory` exists, or another process writes to it.
        SaveFailedError: The bytes could not be written.
    """
    final = _storage.paths.resolve(directory)
    if alpha is not None:
        _util.arguments.check_number("alpha", alpha)
        if not math.isfinite(alpha):
            raise errors.OptionError(f"alpha must be finite, got {alpha}")
    checked = adapter_files.check_settings({} if settings is None else settings)
    is_needed = isinstance(map, str) and config is not None
    changes = _find_changes(
        map,
        peft.find_map,
        model_config.read_config(config) if is_needed else None,
        functools.partial(peft.ToPeft, needs_alpha=alpha is None),
        run=run,
        step=options.get("step"),
        before=transforms,
        target=target,
        prefix=prefix,
        dtype=dtype,
    )
    return convert.convert_to(
        run,
        final,
        ConvertOptions(
            **options,
            format="huggingface",
            transforms=changes,
            max_shard_bytes=sys.maxsize,  # PEFT opens a single file
            files=AdapterFiles(alpha, base_model, checked),
        ),
    )


def _find_changes(
    map: str | Sequence[Transform],
    find: Callable[..., Sequence[Transform]],
    config: Mapping[str, Any] | None,
    invert: Callable[[tuple[Transform, ...]], Transform],
    *,
    run: PathLike,
    step: int | None,
    before: Sequence[Transform],
    target: str | None,
    prefix: LeafPath | None,
    dtype: Any,
) -> list[Transform]:
    """Returns the transforms from the leaves of a checkpoint to a published model.

    `map` is the name of a family, which `find` looks up, or `auto`, or the transforms
    from the model; the changes `before` its inverse are applied first. Raises
    OptionError if the name is unknown or no map fits, or if `target` or `prefix` was
    passed with transforms.
    """
    before = _transforms.check(before)
    if isinstance(map, str):
        named.check_name("map", map)
        table = _transforms.apply(before, locate.open_checkpoint(run, step).table)
        map = find(map, config, table, target=target, prefix=prefix)
    elif target is not None or prefix is not None:
        raise errors.OptionError("target and prefix need the name of a map, not a list")
    casts = () if dtype is None else (cast(".*", dtype),)
    return [*before, invert(_transforms.check(map, "map")), *casts]
