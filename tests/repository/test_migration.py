"""The migration guides: complete tables, and equivalent replacements.

Packages that are not installed are compared with lists from their sources.
"""

import ast
import builtins
import dataclasses
import datetime
import inspect
import math
import re
from collections.abc import Iterator
from types import SimpleNamespace

import jax.numpy as jnp
import optax
import pytest
from flax import serialization
from flax.training import checkpoints
from flax.training.train_state import TrainState
from hypothesis import given
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import configs, datasets, errors, policies, transforms
from flaxckpt.integrations import tensorboard
from flaxckpt.policies import (
    BestN,
    EveryNSteps,
    EveryNStepsClosest,
    LatestDuration,
    LatestN,
    OnSteps,
    WithoutMetric,
)
from tests import ROOT
from tests.helpers import syntax

ocp = pytest.importorskip("orbax.checkpoint")

from orbax.checkpoint import checkpoint_managers as managers  # noqa: E402
from orbax.checkpoint import v1  # noqa: E402

GUIDES = ROOT / "docs" / "migration"
CODE = re.compile(r"`([^`]+)`")
NAME = re.compile(r"[\w.]+")

# google-research/t5x at cc342d419ec3e3e9c4bf1df33c82330cafdc1e16, 21 April 2026.
T5X = {
    "SaveCheckpointConfig": """
        dtype period checkpoint_steps keep keep_dataset_checkpoints save_dataset
        checkpointer_cls state_transformation_fns checkpoint_manager_cls
    """,
    "RestoreCheckpointConfig": """
        path mode assignment_map strict fallback_to_scratch dtype restore_dataset
        checkpointer_cls state_transformation_fns checkpoint_manager_cls
    """,
    "CheckpointConfig": "save restore",
    # Checkpointer, SaveBestCheckpointer, OrbaxCheckpointManagerInterface
    "constructors": """
        train_state partitioner checkpoints_dir dataset_iterator keep save_dtype
        restore_dtype keep_dataset_checkpoints
        metric_name_to_monitor metric_mode keep_checkpoints_without_metrics
        force_keep_period
        directory period checkpoint_steps
    """,
    # their save and restore, load_t5x_checkpoint
    "calls": """
        train_state state_transformation_fns concurrent_gb force
        step path fallback_state lazy_parameters
        remap restore_dtype
    """,
    "Checkpointer": """
        all_steps all_dataset_checkpoint_steps latest_step save restore
        restore_from_tf_checkpoint convert_from_tf_checkpoint
    """,
}

# young-geng/EasyLM at fe5b2c354e25d697fce7cd225e23bbbe72570da3, 12 August 2024, and
# fjformer 0.0.91 (erfanzar/FJFormer at f9940b0), 2 December 2024.
STREAMS = {
    "settings": """
        float_dtype save_optimizer_state config checkpoint_dir enable verbose
    """,
    "arguments": """
        train_state filename gather_fns path obj metadata dataset milestone target
        shard_fns remove_dict_prefix load_from trainstate_target trainstate_shard_fns
        disallow_trainstate updates
        state mismatch_allowed callback load_type load_path state_target
        state_shard_fns disallow_state
    """,
    "methods": """
        get_default_config save_checkpoint save_train_state_to_file save_pickle save_all
        load_checkpoint load_flax_checkpoint load_trainstate_checkpoint
        load_checkpoint_safe save_checkpoint_safe save_state_to_file
        load_state_checkpoint
    """,
}


# ---- the tables --------------------------------------------------------------------

Table = list[list[str]]


def tables(guide: str, heading: str = "") -> list[Table]:
    """Yields the tables of a guide, or of one of its sections, with their headers."""
    found: list[Table] = []
    rows: Table = []
    section = ""
    for line in [*(GUIDES / guide).read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("## "):
            section = line.removeprefix("## ")
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.split("|")[1:-1]])
        elif rows:
            if heading in ("", section):
                found.append([rows[0], *rows[2:]])
            rows = []
    assert found, f"{guide} has no table below {heading!r}"
    return found


def listed(table: Table) -> set[str]:
    """Returns the names in the left column of a table."""
    spans = [span for row in table[1:] for span in CODE.findall(row[0])]
    return {NAME.match(span)[0] for span in spans}


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def fields(home: object, *names: str) -> set[str]:
    return {
        f"{name}.{field.name}"
        for name in names
        for field in dataclasses.fields(getattr(home, name))
    }


def parameters(*functions: object) -> set[str]:
    names = {name for f in functions for name in inspect.signature(f).parameters}
    return names - {"self", "kwargs", "args"}


def test_lists_every_method_of_manager():
    methods, constructor = tables("orbax.md", "Every method of `CheckpointManager`")
    assert listed(methods) == public(ocp.CheckpointManager)
    assert listed(constructor) == parameters(ocp.CheckpointManager.__init__)


def test_lists_every_option_of_manager():
    [table] = tables("orbax.md", "Every option of `CheckpointManagerOptions`")
    options = dataclasses.fields(ocp.CheckpointManagerOptions)
    assert listed(table) == {option.name for option in options}


def test_lists_every_field_of_smaller_orbax_options():
    [table] = tables("orbax.md", "Every field of the other options")
    names = (
        "AsyncOptions",
        "MultiprocessingOptions",
        "FileOptions",
        "AtomicityOptions",
    )
    assert listed(table) == fields(ocp.options, *names)


def test_lists_every_orbax_policy():
    [table] = tables("orbax.md", "Every policy")
    homes = [
        managers,
        v1.training.preservation_policies,
        v1.training.save_decision_policies,
    ]
    assert listed(table) == {
        name
        for home in homes
        for name, kind in inspect.getmembers(home, inspect.isclass)
        if "polic" in kind.__module__.rsplit(".", 1)[-1]
    }


def test_lists_every_method_and_argument_of_orbax_checkpointers():
    methods, handlers = tables("orbax.md", "Checkpointers")
    kinds = {
        ocp.StandardCheckpointer,
        ocp.AsyncCheckpointer,
        ocp.PyTreeCheckpointer,
        ocp.Checkpointer,
    }
    assert listed(methods) == {kind.__name__ for kind in kinds}.union(
        *(public(kind) for kind in kinds)
    )
    assert listed(handlers) == parameters(
        ocp.PyTreeCheckpointHandler,
        ocp.StandardCheckpointHandler,
        ocp.PyTreeCheckpointer,
    )


def test_lists_everything_in_orbax_args():
    [table] = tables("orbax.md", "Items")
    assert listed(table) - {"grain.checkpoint.CheckpointSave"} == public(ocp.args)


def test_lists_every_way_to_restore_in_part():
    [arguments, utils] = tables(
        "orbax.md", "Restoring in part, in another shape, under other names"
    )
    args = ("StandardSave", "StandardRestore", "PyTreeSave", "PyTreeRestore")
    others = ("RestoreArgs", "ArrayRestoreArgs", "SaveArgs")
    assert listed(arguments) == {
        "apply_transformations",
        "merge_trees",
        "PLACEHOLDER",
        *fields(ocp.args, *args),
        *fields(ocp, *others, "Transform", "RestoreTransform"),
    }
    functions = inspect.getmembers(ocp.checkpoint_utils, inspect.isfunction)
    assert listed(utils) == {name for name, _ in functions if name[0] != "_"}


def test_lists_every_option_of_emergency_checkpoints():
    from orbax.checkpoint.experimental.emergency import checkpoint_manager

    [options] = tables("orbax.md", "Emergency checkpoints")
    kinds = ("LocalCheckpointOptions", "PersistentCheckpointOptions")
    wanted = fields(checkpoint_manager, *kinds, "CheckpointManagerOptions")
    assert wanted <= listed(options)


def test_lists_everything_in_orbax_v1():
    functions, methods, constructor, context = tables("orbax.md", "v1")
    modules = {name for name, _ in inspect.getmembers(v1, inspect.ismodule)}
    assert listed(functions) == public(v1) - modules
    assert listed(methods) == public(v1.training.Checkpointer)
    assert listed(constructor) == parameters(v1.training.Checkpointer.__init__)
    assert listed(context) == parameters(v1.Context.__init__) - {"context"}


def test_lists_everything_in_flax_training_checkpoints():
    [functions] = tables("flax.md", "Every function")
    own = {
        name
        for name in public(checkpoints)
        if getattr(getattr(checkpoints, name), "__module__", "") == checkpoints.__name__
    }
    methods = {f"AsyncManager.{name}" for name in public(checkpoints.AsyncManager)}
    assert listed(functions) == own | methods

    save, restore = tables("flax.md", "Every argument")
    assert listed(save) == parameters(
        checkpoints.save_checkpoint, checkpoints.save_checkpoint_multiprocess
    )
    assert listed(restore) == parameters(checkpoints.restore_checkpoint)


def test_lists_every_field_and_argument_of_t5x():
    [save] = tables("t5x.md", "Every field of `SaveCheckpointConfig`")
    restore, both = tables("t5x.md", "Every field of `RestoreCheckpointConfig`")
    constructors, calls = tables("t5x.md", "Every argument of the checkpointers")
    [functions] = tables("t5x.md", "Every function")
    assert listed(save) == set(T5X["SaveCheckpointConfig"].split())
    assert listed(restore) == set(T5X["RestoreCheckpointConfig"].split())
    assert listed(both) == set(T5X["CheckpointConfig"].split())
    assert listed(constructors) == set(T5X["constructors"].split())
    assert listed(calls) == set(T5X["calls"].split())
    methods = {f"Checkpointer.{name}" for name in T5X["Checkpointer"].split()}
    assert methods <= listed(functions)


def test_lists_whole_interface_of_easylm_and_fjformer():
    settings, arguments = tables("easylm.md", "Every setting and argument")
    [methods] = tables("easylm.md", "Every method")
    assert listed(settings) == set(STREAMS["settings"].split())
    assert listed(arguments) == set(STREAMS["arguments"].split())
    assert listed(methods) == set(STREAMS["methods"].split())


# ---- names in the tables -----------------------------------------------------------

OWNERS = {
    "flaxckpt": flaxckpt,
    "formats": flaxckpt.formats,
    "checkpointer": flaxckpt.Checkpointer,
    "on_step": flaxckpt.CheckpointCallback,
    "CheckpointConfig": configs.CheckpointConfig,
}
"""The values of variables in the tables, and modules."""

HOMES = [
    *OWNERS.values(),
    *(flaxckpt.SaveHandle, flaxckpt.CheckpointMetadata),
    *(configs, datasets, policies, tensorboard, transforms),
]

CALLED = [
    flaxckpt.Checkpointer,
    flaxckpt.CheckpointCallback,
    flaxckpt.Checkpointer.save,
]


def meanings(node: ast.expr) -> list[object]:
    """Yields the possible values of a name or attribute, here or in Python."""
    if isinstance(node, ast.Name):
        found = [getattr(home, node.id, None) for home in (*HOMES, builtins)]
        return [OWNERS.get(node.id), *found]
    assert isinstance(node, ast.Attribute)
    if isinstance(node.value, ast.Name) and node.value.id in OWNERS:
        return [getattr(OWNERS[node.value.id], node.attr, None)]
    return [getattr(home, node.attr, None) for home in HOMES]


def takes(function: object, keyword: str) -> bool:
    return callable(function) and keyword in inspect.signature(function).parameters


def unknown(span: str) -> Iterator[str]:
    """Returns the names in a piece of code that flaxckpt does not have."""
    tree = syntax.parse(span.replace("…", "..."))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):  # a keyword alone, as in keep=[…]
            [keyword] = node.targets
            if not any(takes(function, keyword.id) for function in CALLED):
                yield f"{keyword.id}="
        if isinstance(node, ast.Call):
            found = [m for m in meanings(node.func) if m is not None]
            if not found:
                yield ast.unparse(node.func)
            for keyword in node.keywords:
                if not any(takes(function, keyword.arg) for function in found):
                    yield f"{ast.unparse(node.func)}({keyword.arg}=)"
        is_alone = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call)
        if is_alone and not any(meanings(node.value)):
            yield ast.unparse(node)


@pytest.mark.parametrize("guide", ["easylm.md", "flax.md", "orbax.md", "t5x.md"])
def test_recommended_names_exist(guide):
    spans = [
        span
        for header, *rows in tables(guide)
        for row in rows
        for span in CODE.findall(row[header.index("here")])
    ]
    assert len(spans) > 20
    assert {span: names for span in spans if (names := [*unknown(span)])} == {}


@pytest.mark.parametrize(
    "span", ["Chekpointer(d)", "save(step, dataset_iterator=x)", "kep=[]", "saved"]
)
def test_detects_unknown_names(span):
    assert [*unknown(span)]


# ---- equivalence ------------------------------------------------------------------

LOSSES = [0.9, 0.8, 0.1, 0.7, 0.6, 0.5, 0.4, 0.45, 0.55, 0.65]
BEST = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min"}
STATE = {"w": jnp.ones(2)}


def loss_of(step):
    return {"loss": LOSSES[step - 1]}


def steps_of_orbax(directory, metrics=lambda step: None, steps=range(1, 11), **options):
    with ocp.CheckpointManager(
        directory, options=ocp.CheckpointManagerOptions(**options)
    ) as manager:
        for step in steps:
            args = ocp.args.StandardSave(STATE)
            manager.save(step, args=args, metrics=metrics(step))
        manager.wait_until_finished()
        return manager.all_steps()


def steps_here(directory, keep, metrics=lambda step: None, steps=range(1, 11)):
    with flaxckpt.Checkpointer(directory, keep=keep) as checkpointer:
        for step in steps:
            checkpointer.save(step, STATE, metrics=metrics(step))
    return checkpointer.steps()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "keep"),
    [
        ({"max_to_keep": 2}, [LatestN(2)]),
        ({"max_to_keep": 2, "keep_period": 4}, [LatestN(2), EveryNSteps(4)]),
        ({"max_to_keep": 2, **BEST}, [BestN(2, "loss", "min")]),
        ({"max_to_keep": 2, **BEST, "best_mode": "max"}, [BestN(2, "loss", "max")]),
        (
            {"max_to_keep": 2, "keep_period": 4, **BEST},
            [BestN(2, "loss", "min"), EveryNSteps(4)],
        ),
        ({"preservation_policy": managers.CustomSteps([2, 5])}, [OnSteps([2, 5])]),
        (
            {"preservation_policy": managers.EveryNStepsClosest(4)},
            [EveryNStepsClosest(4)],
        ),
        (
            {
                "preservation_policy": managers.LatestDuration(
                    datetime.timedelta(days=1)
                )
            },
            [LatestDuration(86400)],
        ),
        (
            {
                "preservation_policy": managers.AnyPreservationPolicy(
                    [
                        managers.LatestN(1),
                        managers.BestN(
                            get_metric_fn=BEST["best_fn"], reverse=True, n=2
                        ),
                    ]
                ),
                **BEST,
            },
            [LatestN(1), BestN(2, "loss", "min")],
        ),
    ],
    ids=[
        "latest",
        "period",
        "best",
        "best-max",
        "best-period",
        "steps",
        "closest",
        "duration",
        "any",
    ],
)
def test_keeps_same_steps_as_orbax_and_newest(tmp_path, options, keep):
    old = steps_of_orbax(tmp_path / "old", loss_of, **options)
    new = steps_here(tmp_path / "new", keep, loss_of)
    assert new == sorted({*old, 10})


@given(st.sets(st.integers(0, 60)), st.integers(1, 9))
def test_closest_steps_match_orbax(steps, n):
    saved = [SimpleNamespace(step=step) for step in sorted(steps)]
    are_kept = managers.EveryNStepsClosest(n).should_preserve(
        saved, context=managers.PreservationContext()
    )
    old = {c.step for c, is_kept in zip(saved, are_kept, strict=True) if is_kept}
    assert EveryNStepsClosest(n).preserved(saved) | {*sorted(steps)[-1:]} == old


def test_keeps_steps_without_metrics_if_policy_says_so(tmp_path):
    def sometimes(step):
        return loss_of(step) if step % 2 else None

    best = BestN(2, "loss", "min")
    options = {"max_to_keep": 2, **BEST}
    old = steps_of_orbax(tmp_path / "old", sometimes, **options)
    assert steps_here(tmp_path / "new", [best, WithoutMetric("loss")], sometimes) == old

    options["keep_checkpoints_without_metrics"] = False
    old = steps_of_orbax(tmp_path / "old-2", sometimes, **options)
    assert steps_here(tmp_path / "new-2", [best], sometimes) == [*old, 10]


def test_keeps_best_step_where_orbax_deletes_it_for_nan(tmp_path):
    losses = [0.9, float("nan"), 0.7, 0.1, float("nan"), 0.5]

    def metrics(step):
        return {"loss": losses[step - 1]}

    steps = range(1, 7)
    old = steps_of_orbax(tmp_path / "old", metrics, steps, max_to_keep=2, **BEST)
    new = steps_here(tmp_path / "new", [BestN(2, "loss", "min")], metrics, steps)
    assert old == [5, 6]
    assert new == [4, 6]


@pytest.mark.parametrize(
    ("options", "triggers"),
    [
        ({"save_interval_steps": 3}, {"every_steps": 3, "save_first": True}),
        (
            {"save_interval_steps": 3, "save_on_steps": [5]},
            {"every_steps": 3, "save_first": True, "on_steps": [5]},
        ),
        ({"save_decision_policy": managers.FixedIntervalPolicy(3)}, {"every_steps": 3}),
        (
            {"save_decision_policy": managers.SpecificStepsPolicy([2, 5])},
            {"on_steps": [2, 5]},
        ),
    ],
    ids=["interval", "on-steps", "interval-policy", "steps-policy"],
)
def test_saves_same_steps_as_orbax(tmp_path, options, triggers):
    with (
        flaxckpt.Checkpointer(tmp_path / "new") as checkpointer,
        flaxckpt.CheckpointCallback(
            checkpointer, save_last=False, **triggers
        ) as on_step,
    ):
        on_step.restore_or_init(STATE)
        for step in range(1, 11):
            on_step(step, STATE)
    assert checkpointer.steps() == steps_of_orbax(tmp_path / "old", **options)


def spaced(guide: str) -> type:
    """Returns the class `Spaced` from the code of a guide."""
    text = (GUIDES / guide).read_text(encoding="utf-8")
    code = text[text.index("class Spaced:") :].split("\n\n\n", 1)[0]
    found: dict[str, type] = {}
    exec(code, found)
    return found["Spaced"]


@pytest.mark.parametrize("max_to_keep", [None, 2])
def test_spaced_keeps_steps_of_orbax_without_exact_interval(tmp_path, max_to_keep):
    steps = (1, 2, 4, 5, 7, 8, 10, 11)
    policy = managers.EveryNSteps(3, exact_interval=False, max_to_keep=max_to_keep)
    old = steps_of_orbax(tmp_path / "old", steps=steps, preservation_policy=policy)
    keep = [spaced("orbax.md")(3, max_to_keep)]
    assert steps_here(tmp_path / "new", keep, steps=steps) == [*old, 11]


def test_spaced_keeps_steps_of_flax_keep_every_n_steps(tmp_path):
    for step in range(1, 11):
        checkpoints.save_checkpoint(
            tmp_path / "old", STATE, step, keep=1, keep_every_n_steps=4
        )
    keep = [LatestN(1), spaced("flax.md")(4)]
    new = steps_here(tmp_path / "new", keep)
    assert new == checkpoints.available_steps(tmp_path / "old")


@pytest.mark.parametrize(
    ("options", "step_format"),
    [
        ({"step_prefix": "ckpt"}, "ckpt_{step}"),
        ({"step_format_fixed_length": 8}, "{step:08d}"),
        ({"step_prefix": "ckpt", "step_format_fixed_length": 8}, "ckpt_{step:08d}"),
    ],
)
def test_step_names_match_orbax(tmp_path, options, step_format):
    steps_of_orbax(tmp_path, steps=(5,), **options)
    checkpointer = flaxckpt.Checkpointer(tmp_path, step_format=step_format)
    checkpointer.save(6, STATE).wait()
    assert checkpointer.steps() == [5, 6]
    with ocp.CheckpointManager(
        tmp_path, options=ocp.CheckpointManagerOptions(**options)
    ) as manager:
        assert manager.all_steps() == [5, 6]

    other = flaxckpt.Checkpointer(tmp_path, step_format="other_{step}")
    with pytest.raises(flaxckpt.errors.CheckpointFormatError) as caught:
        flaxckpt.CheckpointCallback(other).restore_or_init(STATE)
    assert f"step_format={step_format!r}" in str(caught.value)


def test_ignores_and_keeps_orbax_leftover(tmp_path):
    left = tmp_path / "7.orbax-checkpoint-tmp"
    left.mkdir()
    with flaxckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, STATE)
    assert checkpointer.steps() == [1]
    assert left.is_dir()


def test_reads_and_ranks_orbax_metrics_and_metadata(tmp_path):
    options = ocp.CheckpointManagerOptions(**BEST)
    with ocp.CheckpointManager(
        tmp_path, options=options, metadata={"model": "tiny"}
    ) as manager:
        for step in (2, 3, 4):
            manager.save(
                step,
                args=ocp.args.StandardSave(STATE),
                metrics=loss_of(step),
                custom_metadata={"note": step},
            )

    with flaxckpt.Checkpointer(tmp_path, keep=[BestN(1, "loss", "min")]) as ours:
        assert ours.run_metadata == {"model": "tiny"}
        assert ours.metadata(3).custom == {"note": 3}
        ours.save(5, STATE, metrics=loss_of(5))
    assert ours.best_step("loss", "min") == 3
    assert ours.steps() == [3, 5]

    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        assert manager.best_step() == 3
        assert manager.metrics(5) == loss_of(5)


def test_ranks_nested_orbax_metrics_and_keeps_their_place(tmp_path):
    losses = {2: 0.9, 3: float("nan"), 4: 0.1, 5: 0.5}
    nested = {"best_fn": lambda metrics: metrics["eval"]["loss"], "best_mode": "min"}
    options = ocp.CheckpointManagerOptions(**nested)
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        for step, loss in losses.items():
            metrics = {"eval": {"loss": loss, "recall": [0.25, 1]}, "train/loss": loss}
            manager.save(step, args=ocp.args.StandardSave(STATE), metrics=metrics)

    best = BestN(1, "eval/loss", "min")
    with flaxckpt.Checkpointer(tmp_path / "run", keep=[best]) as ours:
        assert ours.metrics(4) == ours.metadata(4).metrics
        assert ours.metrics(4) == {
            "train/loss": 0.1,
            "eval/loss": 0.1,
            "eval/recall/0": 0.25,
            "eval/recall/1": 1.0,
        }
        assert math.isnan(ours.metrics(3)["eval/loss"])
        ours.add_metrics(2, {"eval/loss": 0.05, "eval/accuracy": 1})
        assert ours.explain()[2] == [str(best)]
        assert ours.explain()[4] == []
        assert ours.prune() == (3, 4)
        assert ours.metrics(2)["eval/accuracy"] == 1.0
    made = flaxckpt.convert(tmp_path / "run", tmp_path / "made", step=2)
    assert flaxckpt.metadata(made.path).metrics["eval/loss"] == 0.05
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        assert manager.best_step() == 2
        assert manager.metrics(2)["eval"]["loss"] == 0.05


def test_restores_item_of_any_name_with_iterator(tmp_path):
    grain = pytest.importorskip("grain")

    def batches():
        return iter(grain.MapDataset.range(20).to_iter_dataset())

    saved, ours = batches(), batches()
    seen = [next(saved), next(saved)]
    with ocp.CheckpointManager(tmp_path) as manager:
        items = ocp.args.StandardSave(STATE)
        dataset = grain.checkpoint.CheckpointSave(saved)
        manager.save(1, args=ocp.args.Composite(items=items, iter=dataset))

    restored = flaxckpt.Checkpointer(tmp_path).restore(STATE, dataset=ours)
    assert jnp.array_equal(restored["w"], STATE["w"])
    assert [*seen, next(ours)] == [0, 1, 2]


def test_several_items_form_one_state_and_can_be_merged(tmp_path):
    with ocp.CheckpointManager(tmp_path / "old") as manager:
        item = ocp.args.StandardSave(STATE)
        manager.save(1, args=ocp.args.Composite(params=item, ema=item))
    ckpt = flaxckpt.Checkpointer(tmp_path / "old")
    with pytest.raises(
        flaxckpt.errors.RestoreMismatchError, match=r'as \{"ema": state\}'
    ):
        ckpt.restore(STATE)
    both = ckpt.restore({"params": STATE, "ema": STATE})
    assert jnp.array_equal(both["ema"]["w"], STATE["w"])

    def below(name):
        return [transforms.rename("(.*)", rf"{name}/\1")]

    with flaxckpt.Checkpointer(tmp_path / "new") as checkpointer:
        on_step = flaxckpt.CheckpointCallback(checkpointer)
        ema = transforms.merge(tmp_path / "old/1/ema", transforms=below("ema"))
        both, start = on_step.restore_or_init(
            {"params": {"w": jnp.zeros(2)}, "ema": {"w": jnp.zeros(2)}},
            source=tmp_path / "old/1/params",
            source_transforms=[*below("params"), ema],
        )
    assert start == 0
    assert jnp.array_equal(both["ema"]["w"], STATE["w"])
    assert jnp.array_equal(both["params"]["w"], STATE["w"])


def test_pad_and_slice_match_non_strict_orbax_restore(tmp_path):
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        state = {"w": jnp.arange(6.0).reshape(2, 3)}
        checkpointer.save(tmp_path / "old", args=ocp.args.StandardSave(state))
        target = {"w": jnp.zeros((3, 2))}
        args = ocp.args.StandardRestore(target, strict=False)
        before = checkpointer.restore(tmp_path / "old", args=args)
    changes = [transforms.pad("w", (3, None)), transforms.slice("w", (None, 2))]
    after = flaxckpt.load(tmp_path / "old", target, transforms=changes)
    assert before["w"].tolist() == after["w"].tolist() == [[0, 1], [3, 4], [0, 0]]


def test_overwrite_keeps_newer_steps_unlike_flax(tmp_path):
    for step in (1, 2, 3):
        checkpoints.save_checkpoint(tmp_path, STATE, step, keep=9)
    with flaxckpt.Checkpointer(tmp_path, step_format="checkpoint_{step}") as ours:
        ours.save(2, STATE, on_exists="overwrite").wait()
        assert ours.steps() == [1, 2, 3]
    checkpoints.save_checkpoint(tmp_path, STATE, 2, keep=9, overwrite=True)
    assert checkpoints.available_steps(tmp_path) == [1, 2]


def create() -> TrainState:
    params = {"w": jnp.ones(2)}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1))


def test_first_save_rejects_orbax_run_counting_from_0(tmp_path):
    state = create().apply_gradients(grads=create().params)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))  # one update

    on_step = flaxckpt.CheckpointCallback(flaxckpt.Checkpointer(tmp_path))
    state, start = on_step.restore_or_init(create())
    assert (start, state.step) == (0, 1)
    state = state.apply_gradients(grads=state.params)
    with pytest.raises(flaxckpt.errors.OptionError, match="the loop counts from 0"):
        on_step(start + 1, state, force=True)
    assert on_step(int(state.step), state, force=True)
    on_step.close()
    assert on_step.checkpointer.steps() == [0, 2]


def test_restores_checkpoints_of_t5x_orbax_manager(tmp_path):
    state = create().apply_gradients(grads=create().params)
    adam = state.opt_state[0]
    moments = {"count": adam.count, "mu": adam.mu, "nu": adam.nu}
    tree = {
        "state": {"param_states": {"0": moments}, "step": state.step},
        "target": state.params,
    }
    options = ocp.CheckpointManagerOptions(step_prefix="checkpoint")
    with ocp.CheckpointManager(tmp_path / "t5x", options=options) as manager:
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(tree))
        manager.save(1, args=args)

    on_step = flaxckpt.CheckpointCallback(flaxckpt.Checkpointer(tmp_path / "run"))
    again, start = on_step.restore_or_init(
        create(),
        source=tmp_path / "t5x",
        source_transforms=[
            transforms.rename("target/(.*)", r"params/\1"),
            transforms.rename("state/step", "step"),
            transforms.rename("state/param_states/(.*)", r"opt_state/\1"),
        ],
        optimizer="match",
    )
    on_step.close()
    assert start == 1
    assert jnp.array_equal(again.opt_state[0].mu["w"], adam.mu["w"])


def test_error_for_clu_directory_names_file_to_pass(tmp_path):
    state = {"w": jnp.ones(3)}
    for number in (9, 10):
        file = tmp_path / f"ckpt-{number}.flax"
        file.write_bytes(serialization.to_bytes(state))
        file.with_suffix(".index").touch()
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "ckpt-10"')
    with pytest.raises(errors.CheckpointFormatError, match=r"as .*/ckpt-10\.flax$"):
        flaxckpt.load(tmp_path, state)
    assert flaxckpt.load(tmp_path / "ckpt-10.flax", state)["w"].shape == (3,)
