"""Export of LoRA adapters as a directory that PEFT opens."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from flaxckpt import _storage, _util, errors
from flaxckpt._checkpoint.save_handle import SaveResult
from flaxckpt._convert import adapter_files, convert, export_map, plan
from flaxckpt._convert.adapter_files import AdapterFiles
from flaxckpt._convert.plan import ConvertOptions, SharedOptions
from flaxckpt._maps import model_config, peft
from flaxckpt._types import PathLike
from flaxckpt.transforms import Transform


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
    changes = export_map.find_changes(
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
