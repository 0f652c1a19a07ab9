"""Writes the golden checkpoints of an old Orbax, `tests/golden/old-orbax-0.5.23/`.

Run in an environment of its own, in a folder that does not exist yet:

    pip install orbax-checkpoint==0.5.23 flax==0.8.5 jax==0.4.30 "numpy<2"
    XLA_FLAGS=--xla_force_host_platform_device_count=2 \\
        python tests/golden/make_orbax_old.py tests/golden/old-orbax-0.5.23

What is in the repository was written by Python 3.11.2 with

    orbax-checkpoint 0.5.23    jax 0.4.30    flax 0.8.5    optax 0.2.5

on two CPU devices. `nnx` is a state of NNX with that of its optimizer, whose leaves end
in `raw_value` in this version of Flax. `run` has metadata of the run, and an item of
JSON beside the tree. A folder is never written again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import numpy as np

METADATA: Final = {"model": "tiny", "n": 3}
METRICS: Final = {"eval": {"loss": 0.5, "recall": [0.25, 1.0]}}
SHAPES: Final = {"l": {"kernel": (4, 3), "bias": (3,)}, "b": {"scale": (3,)}}


def values(seed: int) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """Layer -> parameter -> value; the same seed gives the same bits."""
    rng = np.random.default_rng(seed)
    return {
        layer: {
            name: rng.integers(-64, 64, shape).astype(np.float32) / 8
            for name, shape in params.items()
        }
        for layer, params in SHAPES.items()
    }


def main(folder: Path) -> None:
    import jax
    import optax
    import orbax.checkpoint as ocp
    from flax import nnx

    folder.mkdir()

    class Layer(nnx.Module):
        def __init__(self, params: dict[str, Any]) -> None:
            for name, value in params.items():
                setattr(self, name, nnx.Param(jax.numpy.asarray(value)))

    class Model(nnx.Module):
        def __init__(self) -> None:
            for name, params in values(0).items():
                setattr(self, name, Layer(params))

    state = nnx.state(Model(), nnx.Param)
    tx = optax.adam(0.1)
    opt_state = tx.init(state)
    grads = jax.tree.map(jax.numpy.ones_like, state)
    _, opt_state = tx.update(grads, opt_state)
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(folder / "nnx", {"params": state, "opt_state": opt_state})
    checkpointer.close()

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    tree = {
        "kernel": jax.device_put(values(0)["l"]["kernel"], rows),
        "bias": jax.numpy.asarray(values(0)["l"]["bias"]),
    }
    options = ocp.CheckpointManagerOptions(best_fn=lambda m: m["eval"]["loss"])
    manager = ocp.CheckpointManager(
        folder / "run",
        options=options,
        item_names=("state", "config"),
        metadata=METADATA,
    )
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(tree), config=ocp.args.JsonSave({"lang": "en"})
    )
    manager.save(1, args=items, metrics=METRICS)
    manager.wait_until_finished()
    manager.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
