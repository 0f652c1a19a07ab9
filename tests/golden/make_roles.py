"""Writes checkpoints with the optimizer roles of flaxckpt 0.1.0, some of them wrong.

It took the parameters' own classes for states of transforms, and several optimizers in
a tuple for one. Run from the root of that release:

    python -m tests.golden.make_roles

What is in the repository was written on one CPU device, with

    jax 0.10.2    flax 0.12.8    optax 0.2.8    tensorstore 0.1.86

The folder is never written again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import flax
import jax.numpy as jnp
import optax

import flaxckpt


class Fields(NamedTuple):
    """Parameters in a named tuple."""

    w: Any
    b: Any


@flax.struct.dataclass
class Struct:
    """Parameters in a dataclass of Flax."""

    w: Any
    b: Any


FOLDER: Final = Path(__file__).parent / "roles-0.1.0"
CLASSES: Final = {"named-tuple": Fields, "dataclass": Struct}


def params(cls: type, first: float = 0.0) -> Any:
    """Parameters, or moments of them."""
    return cls(
        w=jnp.full((2, 3), first, "float32"), b=jnp.full(3, first + 1, "float32")
    )


def adam(cls: type, first: int) -> optax.OptState:
    """The state of Adam with other numbers in each leaf, from `first` on."""
    mu, nu = params(cls, first + 1), params(cls, first + 3)
    return (
        optax.ScaleByAdamState(jnp.asarray(first, "int32"), mu, nu),
        optax.EmptyState(),
    )


def lion(cls: type, first: int) -> optax.OptState:
    """The state of Lion, likewise."""
    return optax.ScaleByLionState(jnp.asarray(first, "int32"), params(cls, first + 1))


def state(cls: type) -> dict[str, Any]:
    """A network and its optimizer, and two with one optimizer each in a tuple."""
    return {
        "one": {"params": params(cls), "opt_state": adam(cls, 10)},
        "other": {"params": params(cls), "opt_state": lion(cls, 20)},
        "two": {
            "params": {"g": params(cls), "d": params(cls)},
            "opts": (adam(cls, 30), (optax.EmptyState(), optax.EmptyState())),
        },
    }


def main() -> None:
    """Writes a checkpoint for each class of parameters."""
    for name, cls in CLASSES.items():
        flaxckpt.save(FOLDER / name, state(cls))


if __name__ == "__main__":
    main()
