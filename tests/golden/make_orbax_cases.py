"""Writes checkpoints of Orbax that lack files: `golden/compatibility-<version>.tar.xz`.

Orbax tests its readers with checkpoints of both its interfaces from which a file or a
field was removed. These are the same cases, made by this Orbax. Run from the root of
the repository, once for every new version of Orbax:

    python -m tests.golden.make_orbax_cases

The archive in the repository was written by Python 3.11.7 with

    orbax-checkpoint 0.12.8    jax 0.10.2    tensorstore 0.1.86

on one CPU device. An archive is never written again: a new version adds its own.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

CONFIG: Final = {"note": "tiny", "rates": [0.5, 0.25]}
CUSTOM: Final = {"by": "make_orbax_cases"}
FIELDS: Final = (
    "item_handlers",
    "metrics",
    "performance_metrics",
    "init_timestamp_nsecs",
    "commit_timestamp_nsecs",
    "custom_metadata",
)
"""Fields of `_CHECKPOINT_METADATA`."""


def state() -> dict[str, Any]:
    """The tree of all cases."""
    return {
        "kernel": np.arange(6, dtype=np.float32).reshape(2, 3) / 4,
        "layer": {"bias": np.arange(-2, 3, dtype=np.int32)},
    }


# ---- damages ------------------------------------------------------------------------


def _remove(*names: str, step: Path) -> None:
    for name in names:
        path = step / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _remove_field(field: str, *, step: Path) -> None:
    file = step / "_CHECKPOINT_METADATA"
    fields = json.loads(file.read_text())
    del fields[field]
    file.write_text(json.dumps(fields))


def _add_stray(*, step: Path) -> None:
    (step / "stray").mkdir()
    (step / "stray" / "_METADATA").write_text("no tree")


def _damages(item: str) -> Iterator[tuple[str, Callable[..., None]]]:
    """Yields the name of each case, and the function that damages a good checkpoint.

    Args:
        item: The beginning of the paths of the tree's files in the checkpoint.
    """
    tree, step = f"{item}_METADATA", "_CHECKPOINT_METADATA"
    for name, removed in {
        "whole": (),
        "no-step-metadata": (step,),
        "no-tree-metadata": (tree,),
        "no-metadata": (step, tree),
        "no-shardings": (f"{item}_sharding",),
        "no-array-metadata": (f"{item}array_metadatas",),
        "no-database": (f"{item}manifest.ocdbt",),
        "no-data": (f"{item}d",),
    }.items():
        yield name, functools.partial(_remove, *removed)
    for field in FIELDS:
        yield f"no-{field}", functools.partial(_remove_field, field)


def cases(kind: str) -> dict[str, Callable[..., None]]:
    """Returns the cases of a kind of checkpoint: name -> function that damages one."""
    found = dict(_damages("" if kind == "v0-flat" else "state/"))
    if kind == "v1-items":
        found["stray-item"] = _add_stray
        found["no-item"] = functools.partial(_remove, "state")
    return found


# ---- writing ------------------------------------------------------------------------


def _write_v0_flat(path: Path, tree: Any) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree, custom_metadata=CUSTOM)


def _write_v0_items(path: Path, tree: Any) -> None:
    import orbax.checkpoint as ocp

    args = ocp.args.Composite(
        state=ocp.args.PyTreeSave(tree), metadata=ocp.args.JsonSave(CONFIG)
    )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args, custom_metadata=CUSTOM)


def _write_v1_items(path: Path, tree: Any) -> None:
    from orbax.checkpoint import v1

    checkpointables = {"state": tree, "metadata": CONFIG}
    registry = v1.handlers.local_registry()
    registry.add(v1.handlers.JsonHandler, checkpointable_name="metadata")
    context = v1.Context()
    context.checkpointables.registry = registry
    with context:
        v1.save_checkpointables(path, checkpointables, custom_metadata=CUSTOM)


WRITERS: Final = {
    "v0-flat": _write_v0_flat,
    "v0-items": _write_v0_items,
    "v1-items": _write_v1_items,
}
"""Kind of checkpoint -> function that writes one."""

NAMES: Final = tuple(f"{kind}/{name}" for kind in WRITERS for name in cases(kind))


def main() -> None:
    """Writes the archive beside this script."""
    import jax
    import orbax.checkpoint as ocp

    archive = Path(__file__).parent / f"compatibility-{ocp.__version__}.tar.xz"
    if archive.exists():
        raise FileExistsError(archive)
    tree = jax.tree.map(jax.numpy.asarray, state())
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for kind, write in WRITERS.items():
            write(root / kind / "whole", tree)
            for name, damage in cases(kind).items():
                if name != "whole":
                    shutil.copytree(root / kind / "whole", root / kind / name)
                    damage(step=root / kind / name)
        with tarfile.open(archive, "x:xz") as out:
            for kind in WRITERS:
                out.add(root / kind, kind, filter=_without_owner)


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    return member


if __name__ == "__main__":
    sys.exit(main())
