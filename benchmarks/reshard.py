"""Restores a state on other meshes, and counts the bytes that a process reads.

`benchmarks.several` says how it is run. It saves a state on every mesh and restores it
on all others, and prints the bytes that it has read, and those that its devices need,
as JSON.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import flaxckpt
from benchmarks import several

PROCESSES = 4
MESHES = ((8, 1), (4, 2), (2, 4), (1, 8))
"""Sizes along the axes `data` and `model`; restoring on another makes 12 changes."""

LAYOUTS = ("shard_axes", "default")
IO = Path("/proc/self/io")


def main() -> None:
    """Runs a process, as given on the command line."""
    job = several.join()
    for row in _measure(job.directory, quick=job.quick):
        print(json.dumps(row), flush=True)


def _measure(directory: Path, *, quick: bool) -> Iterator[dict[str, object]]:
    """Yields the layout, the change, and the bytes read and needed, of each restore."""
    layouts = {
        "shard_axes": flaxckpt.ArrayLayout(shard_axes=(-2, -1)),
        "default": flaxckpt.ArrayLayout(),
    }
    shapes = _shapes(quick=quick)
    values = {
        name: np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        for name, shape in shapes.items()
    }
    for layout, source in itertools.product(LAYOUTS, MESHES):
        state = {
            name: jax.make_array_from_callback(
                value.shape, _sharding(source, value.shape), value.__getitem__
            )
            for name, value in values.items()
        }
        path = directory / f"{layout}-{source[0]}x{source[1]}"
        flaxckpt.save(path, state, layout=layouts[layout])
        for target in MESHES:
            if target == source:
                continue
            wanted = {
                name: jax.ShapeDtypeStruct(
                    shape, np.float32, sharding=_sharding(target, shape)
                )
                for name, shape in shapes.items()
            }
            before = _bytes_read()
            restored = flaxckpt.load(path, wanted, memory_map=False)
            read = _bytes_read() - before
            needed = 0
            for name, array in restored.items():
                shards = {str(s.index): s for s in array.addressable_shards}
                for shard in shards.values():  # replicas are needed once
                    np.testing.assert_array_equal(shard.data, values[name][shard.index])
                    needed += shard.data.nbytes
            change = f"{source[0]}x{source[1]} to {target[0]}x{target[1]}"
            row = {"layout": layout, "change": change, "read": read, "needed": needed}
            yield row


def _shapes(*, quick: bool) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a small transformer with scanned layers: 270 MB."""
    n = 256 if quick else 1024
    return {
        "embedding": (16 * n, n),
        "up": (4, n, 4 * n),
        "down": (4, 4 * n, n),
        "bias": (4, 4 * n),
        "head": (n, 16 * n),
    }


def _sharding(mesh: tuple[int, int], shape: tuple[int, ...]) -> NamedSharding:
    is_bias = len(shape) == 2 and shape[0] < several.DEVICES
    axes = (None,) * (len(shape) - 2) + (None if is_bias else "data", "model")
    return NamedSharding(jax.make_mesh(mesh, ("data", "model")), PartitionSpec(*axes))


def _bytes_read() -> int:
    """Returns the bytes that this process has read, from files and the page cache."""
    lines = IO.read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


if __name__ == "__main__":
    main()
