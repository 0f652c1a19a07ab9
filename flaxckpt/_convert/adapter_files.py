"""The file beside the arrays of an adapter of PEFT: its configuration."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from flaxckpt import errors
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._transforms import lora

NAME = "adapter_config.json"

_WRITTEN = frozenset(
    (
        *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern"),
        *("target_modules", "base_model_name_or_path", "use_rslora"),
    )
)
"""Entries that follow from the adapters and the other arguments."""

_OF_OTHERS = frozenset(
    ("modules_to_save", "exclude_modules", "layers_to_transform", "layers_pattern")
)
"""Entries of further weights, or of fewer modules."""

_FIRST = re.compile("base_model/model/(.+)/lora_A/weight")


@dataclasses.dataclass(frozen=True)
class AdapterFiles:
    """The files beside the arrays of an adapter; an `alpha` of None is the factor 1."""

    alpha: float | None
    base_model: str | None
    settings: Mapping[str, Any]
    names: Sequence[str] = (NAME,)
    arrays_name: str = "adapter_model"

    def make(self, infos: Sequence[LeafInfo]) -> dict[str, bytes]:
        """Returns name -> content of the configuration; leaves have names of PEFT."""
        ranks = {
            match[1].replace("/", "."): info.shape[0]
            for info in infos
            if (match := _FIRST.fullmatch(info.path))
        }
        [(rank, _)] = collections.Counter(ranks.values()).most_common(1)
        others = {
            f"^{re.escape(module)}": own for module, own in ranks.items() if own != rank
        }
        config = {
            "peft_type": "LORA",
            "base_model_name_or_path": self.base_model,
            "bias": "none",
            "inference_mode": True,
            "init_lora_weights": True,
            **self.settings,
            "r": rank,
            "lora_alpha": _plain(rank if self.alpha is None else self.alpha),
            "rank_pattern": others,
            "alpha_pattern": others if self.alpha is None else {},
            "target_modules": sorted(ranks),
            "use_rslora": False,
        }
        return {NAME: f"{json.dumps(config, indent=2)}\n".encode()}


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number


def check_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns further entries; raises OptionError if PEFT would compute otherwise."""
    if not isinstance(settings, Mapping):
        raise errors.OptionError(f"settings must be a dict, got {settings!r:.80}")
    written = [name for name in settings if name in _WRITTEN]
    others = [
        f"{name}={value!r:.80}"
        for name, value in settings.items()
        if (value and name in {*lora.UNSUPPORTED, *_OF_OTHERS})
        or (name == "bias" and value != "none")
        or (name == "init_lora_weights" and value not in lora.KEEPS_BASE)
    ]
    if written or others:
        rows = [f"{name}: follows from the adapters" for name in written]
        rows += [f"{entry}: PEFT would compute another update" for entry in others]
        raise errors.OptionError(
            f"settings has {len(rows)} entries that adapter_config.json cannot have:\n"
            + errors.rows(rows)
            + "\nLeave them out."
        )
    try:
        json.dumps(settings := dict(settings))
    except (TypeError, ValueError) as error:
        raise errors.OptionError(
            f"settings cannot be written as JSON: {errors.one_line(error)}"
        ) from None
    return settings
