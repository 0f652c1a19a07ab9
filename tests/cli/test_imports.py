"""Verbs that read metadata import neither jax nor TensorStore, and print the same."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import flaxckpt
from tests.helpers import programs, ui_server

HEAVY = {"jax", "flax", "optax", "tensorstore", "numpy", "ml_dtypes", "rich"}

PROBE = """
import json, sys
from flaxckpt.cli import main
try:
    main()
finally:
    print(json.dumps([*sys.modules]), file=sys.stderr)
"""

VERBS = [
    *("ls RUN", "ls RUN --keep best:1:loss:min --json", "ls RUN/2", "du RUN --json"),
    *("du RUN/1", "explain RUN --keep latest:1", "pin RUN 1", "unpin RUN 1"),
    *("prune RUN --keep latest:1", "show RUN", "show RUN --json", "show RUN/1 params"),
]


def state():
    """A state of containers, shardings and leaves of all kinds."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data", None))
    both = NamedSharding(mesh, PartitionSpec(("data",)))
    params = {
        "kernel": jax.device_put(jnp.ones((8, 4)), rows),
        "scale": jax.device_put(jnp.ones(8, jnp.bfloat16), both),
    }
    return {
        "params": params,
        "opt_state": optax.adam(1e-3).init(params),
        "module": nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
        "rest": {
            "key": jax.random.key(1),
            "fast": jax.random.key(1, impl="rbg"),
            "bits": jnp.ones(4, jnp.uint4),
            "half": np.ones(3, np.float16),
            "step": 3,
            "name": "run",
            "none": None,
        },
    }


def save_ours(directory, **options):
    with flaxckpt.Checkpointer(directory, **options) as run:
        for step in (1, 2):
            run.save(step, state(), metrics={"loss": 1 / step}, json={"config": {}})


def save_orbax(directory, *, zarr3):
    names = ("params", "opt_state")
    kept = {name: state()[name] for name in names} | {"step": 3, "name": "run"}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=zarr3)
    options = ocp.CheckpointManagerOptions(best_fn=lambda found: found["loss"])
    with ocp.CheckpointManager(
        directory, options=options, item_handlers=handler
    ) as manager:
        for step in (1, 2):
            args = ocp.args.PyTreeSave(kept)
            manager.save(step, args=args, metrics={"loss": 1 / step})


RUNS = {
    "flaxckpt": save_ours,
    "items": lambda path: save_ours(path, items=[*state()]),
    "orbax": lambda path: save_orbax(path, zarr3=False),
    "orbax zarr 3": lambda path: save_orbax(path, zarr3=True),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("imports")
    for name, save in RUNS.items():
        save(root / name)
    return root


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "run",
    [pytest.param(run, marks=[pytest.mark.slow] * ("zarr 3" in run)) for run in RUNS],
)
@pytest.mark.parametrize("verb", VERBS)
def test_reads_metadata_without_jax(made, command, monkeypatch, run, verb):
    monkeypatch.chdir(made)
    arguments = [word.replace("RUN", run) for word in verb.split()]
    found = programs.run("-c", PROBE, *arguments, COLUMNS="80")
    *errors, modules = found.stderr.splitlines()
    assert errors == []
    assert HEAVY.isdisjoint(json.loads(modules))
    assert found.stdout == command(*arguments).stdout  # here, jax is imported


def test_reads_orbax_database_without_jax(here):
    found = programs.run("-c", PROBE, "show", "orbax")
    assert {"jax", "flax", "optax"}.isdisjoint(
        json.loads(found.stderr.splitlines()[-1])
    )


def test_reads_leaf_statistics_without_jax(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        on_step = flaxckpt.CheckpointCallback(
            run, every_steps=1, statistics=True, check_step=False
        )
        for step in (1, 2):
            on_step(step, {"w": np.full(4, step)})
    found = programs.run("-c", PROBE, "report", "run", "--no-diff", cwd=tmp_path)
    assert "Statistics of 1 leaf" in (tmp_path / "report.html").read_text()
    assert HEAVY.isdisjoint(json.loads(found.stderr.splitlines()[-1]))


@pytest.mark.parametrize("run", ["flaxckpt", "items"])
def test_page_shows_leaf_tree_without_jax(made, run):
    with ui_server.serving(made / run) as served:
        shown = served.ask(f"/leaves/branch?run={run}&step=2").text
        assert "opt_state" in shown, shown
        ours, its = (
            Path(f"/proc/{pid}/maps").read_text()
            for pid in ("self", served.process.pid)
        )
    assert "jaxlib" in ours
    assert "jaxlib" not in its
