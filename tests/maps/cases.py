"""The record of a family with one target layout, which the suite checks."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """A tiny random model of a family, and the same model in a target layout.

    Attributes:
        id: Name of the case, `llama-tunix-tied`.
        family: Name of the family in `flaxckpt.maps`.
        target: The target layout.
        published: Makes the model of transformers, in torch, with random weights.
        reference: Runs it: maps the model to its outputs as a numpy array.
        state: Makes the state to fill, from the configuration of transformers: params
            of linen, or an NNX model.
        run: Runs the filled state: maps it and the configuration to the outputs; None
            for a layout whose program cannot be installed.
        expected: Maps the torch model to the wanted leaves, by leaf path, where there
            is no program to run.
        options: Further arguments of the map.
        is_exact: False if values change by rounding on the way (scaled queries).
    """

    id: str
    family: str
    target: str
    published: Callable[[], Any]
    reference: Callable[[Any], Any]
    state: Callable[[Any], Any]
    run: Callable[[Any, Any], Any] | None = None
    expected: Callable[[Any], dict[str, Any]] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_exact: bool = True
