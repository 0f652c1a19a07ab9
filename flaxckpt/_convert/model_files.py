"""Files beside the arrays of a model of Hugging Face: its config and its tokenizer."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxckpt import _state, _storage, errors
from flaxckpt._formats import hub_cache
from flaxckpt._maps import model_config
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import PathLike
from flaxckpt.maps import Family

_log = logging.getLogger(__name__)

_COPIED = frozenset(
    (
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "generation_config.json",
        "merges.txt",
        "normalizer.json",
        "preprocessor_config.json",
        "processor_config.json",
        "sentencepiece.bpe.model",
        "special_tokens_map.json",
        "spiece.model",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "video_preprocessor_config.json",
        "vocab.json",
        "vocab.txt",
    )
)
"""Files beside the arrays that belong to the tokenizer or to the use of a model."""

_MAX_FILE_BYTES = 256 * 2**20


_DTYPE_KEYS = ("dtype", "torch_dtype")
"""Names of the element type in `config.json`: since transformers 4.56, and before."""


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """The files beside the arrays; those of the `family`, if known, have its sizes."""

    config: Mapping[str, Any] | None = None
    others: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    arrays_name: str = "model"
    family: Family | None = None

    @property
    def names(self) -> list[str]:
        return [*self.others, *([] if self.config is None else [model_config.NAME])]

    def make(self, infos: Sequence[LeafInfo]) -> dict[str, bytes]:
        """Returns all files; raises OptionError if sizes of arrays contradict them."""
        if self.config is None:
            return dict(self.others)
        config, dtype = self.config, _widest_dtype(infos)
        if self.family is not None:
            shapes = {info.path: info.shape for info in infos}
            config = self.family.fit_vocabulary(config, shapes)
        config = _with_dtype(config, dtype)
        if dtype is not None and not any(key in config for key in _DTYPE_KEYS):
            config["dtype"] = dtype
        text = json.dumps(config, indent=2, ensure_ascii=False)
        return {model_config.NAME: f"{text}\n".encode(), **self.others}


def _widest_dtype(infos: Sequence[LeafInfo]) -> str | None:
    """Returns the widest floating type of the leaves."""
    floats = [
        i.dtype for i in infos if i.dtype and _state.dtypes.kind(i.dtype) == "float"
    ]
    return max(floats, key=_state.dtypes.item_bits, default=None)


def _with_dtype(config: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config with the element type of the arrays, if it has one.

    Otherwise transformers would cast the arrays to the type of the original model.
    """
    changed: dict[str, Any] = {}
    for name, value in config.items():
        changed[name] = value
        if name in _DTYPE_KEYS and isinstance(value, str) and dtype is not None:
            changed[name] = dtype
        elif name.endswith("_config") and isinstance(value, Mapping):
            changed[name] = _with_dtype(value, dtype)
    return changed


# ---- reading -------------------------------------------------------------------------


def read(config: Any, tokenizer: PathLike | None) -> ModelFiles:
    """Returns the files beside the arrays; see `export_huggingface`."""
    files: dict[str, bytes] = {}
    if tokenizer is not None:
        home = _find_directory(tokenizer)
        for name in sorted(_COPIED):
            if (home / name).exists():
                files[name] = _read_file(home / name)
        if config is None and (home / model_config.NAME).exists():
            config = home
        if not files and config is not home:
            raise errors.OptionError(
                f"tokenizer={str(tokenizer)!r} has no files to copy: wanted"
                " tokenizer.json, tokenizer.model, vocab.txt or others"
            )
    if config is None:
        _log.warning("without config=, transformers cannot open the exported model")
        return ModelFiles(None, files)
    data = model_config.read_config(config)
    if (entry := model_config.describe_quantization(data)) is not None:
        raise errors.OptionError(
            f"config has a {entry}, but the exported arrays are not"
            " quantized: remove this entry, and pass the config as a dict"
        )
    try:
        json.dumps(data)
    except (TypeError, ValueError) as error:
        raise errors.OptionError(
            f"config cannot be written as JSON: {errors.one_line(error)}"
        ) from None
    return ModelFiles(data, files)


def _find_directory(path: PathLike) -> Path:
    home = _storage.paths.resolve(path)
    if not home.is_dir():
        raise errors.OptionError(f"tokenizer={str(path)!r} is not a directory")
    return hub_cache.find_snapshot(home) or home


def _read_file(file: Path) -> bytes:
    """Returns the content of a file of another model, but not of a link out of it."""
    try:
        hub_cache.check_link(file)
        return _storage.of(file).read(file, max_bytes=_MAX_FILE_BYTES)
    except errors.CheckpointError:
        raise
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise errors.OptionError(
            f"tokenizer: {file} cannot be read: {errors.one_line(reason)}"
        ) from None
