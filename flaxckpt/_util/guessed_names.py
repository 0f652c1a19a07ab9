"""Names that newcomers guess, from other libraries, with what to write instead.

`ANSWERS` is the table. `explain` makes Python's errors about unknown attributes and
arguments of a class or function give its answers.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from flaxckpt import errors
from flaxckpt._util import right_call

T = TypeVar("T", bound=Callable[..., Any])

CALL = "()"
"""The name in the table that stands for a call with wrong or missing arguments."""


def _write(advice: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"write {advice}")


def _omit(reason: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"leave it out, {reason}")


# ---- names with the same answer in several places ------------------------------------

_STATE = ("target", "item", "args", "pytree", "tree", "train_state", "ckpt")
_TEMPLATE = (
    *("state", "template", "abstract", "abstract_pytree", "abstract_tree", "like"),
    *("target_state", "items", "save_args", "restore_args", "fallback_state", *_STATE),
)
_PATH = ("directory", "ckpt_dir", "checkpoint_dir", "checkpoint_path", "ckpt_path")
_RUN = ("path", "checkpoints_dir", "output_dir", "save_dir", "root", *_PATH[1:])
_PLACEMENT = ("sharding", "shardings", "mesh", "device", "devices", "map_location")
_LATEST = (
    *("max_to_keep", "keep_n", "keep_last", "keep_latest", "num_to_keep"),
    *("save_total_limit", "total_limit", "keep_last_n", "n_to_keep"),
)
_PERIOD = ("keep_period", "keep_every_n_steps", "force_keep_period")
_BEST = (
    *("best_fn", "best_mode", "monitor", "mode", "save_top_k", "keep_best"),
    *("metric_name_to_monitor", "metric_mode", "metric_for_best_model"),
    *("greater_is_better", "load_best_model_at_end", "save_best_only"),
)
_POLICIES = ("preservation_policy", "preservation_policies", "policy", "policies")
_EVERY = (
    *("every", "every_n_steps", "every_n_train_steps", "save_every", "interval"),
    *("save_interval_steps", "save_interval", "save_steps", "save_freq", "period"),
    *("frequency", "save_strategy", "save_decision_policy", "save_decision_policies"),
)
_EVERY_SECS = (
    *("every_secs", "every_seconds", "every_n_secs", "every_n_seconds"),
    *("save_interval_secs", "train_time_interval", "continuous_checkpointing"),
)
_ON_STEPS = ("save_on_steps", "checkpoint_steps", "steps")
_DATASET = ("dataset_iterator", "iterator", "train_iter", "train_ds", "data")
_ASYNC = ("enable_async_checkpointing", "use_async", "async_save", "async_options")
_WAIT = ("wait", "block", "blocking")
_DTYPE = ("dtype", "save_dtype", "restore_dtype", "float_dtype")

_KEEP = {
    **_write("keep=[LatestN(3)]", *_LATEST),
    **_write("keep=[LatestN(3), EveryNSteps(1000)]", *_PERIOD),
    **_write("keep=[LatestN(3), EveryNSecs(3600)]", "keep_time_interval"),
    **_write('keep=[LatestN(3), BestN(1, "loss", "min")]', *_BEST, *_POLICIES),
    **_write(
        'keep=[BestN(1, "loss", "min"), WithoutMetric("loss")]',
        "keep_checkpoints_without_metrics",
    ),
}

_RESTORE = {
    **_write("transforms=[cast('.*', 'bfloat16')]", *_DTYPE),
    **_write("missing='init', or unused='error'", "strict", "partial", "partial_load"),
    **_write(
        "transforms=[rename('old/(.*)', r'new/\\1')]",
        *("assignment_map", "orbax_transforms", "key_mapping"),
    ),
    **_omit(
        "as all processes read side by side",
        *("parallel", "gda_manager", "allow_partial_mpa_restoration"),
        "orbax_checkpointer",
    ),
    **_omit("as pickles are never opened", "weights_only", "allow_pickle"),
}

_MAPPED = _write("memory_map=", "mmap", "mmap_mode")

_NEWEST = _omit("for the newest step", "latest", "last", "newest")
_BEST_OF = ("best", "best_step", "metric", *_BEST)
_BEST_OF_PATH = {
    **_write('step=Checkpointer(path).best_step("loss", "min")', *_BEST_OF),
    **_NEWEST,
}

_LOOK = {**_write("path=", *_PATH), **_BEST_OF_PATH}

_LOAD = {
    **_BEST_OF_PATH,
    **_write("load(path, state)", *_TEMPLATE),
    **_write("path=", *_PATH),
    **_write("the path of the run, or of a step", "prefix"),
    **_write("load(path, abstract_state(state, mesh=mesh))", *_PLACEMENT),
    **_RESTORE,
}

_SAVE = {
    **_write("save(path, state)", *_STATE),
    **_write("path=", *_PATH),
    **_write("overwrite=True", "force", "on_exists", "exist_ok"),
    **_write("metadata=", "custom_metadata"),
    **_write("layout=", "save_args"),
    **_write("transforms=[cast('.*', 'bfloat16')]", *_DTYPE),
    **_write(
        "Checkpointer(directory, keep=[LatestN(3)]).save(step, state)",
        *("step", "keep", "keep_every_n_steps", *_LATEST),
    ),
    **_write(
        "Checkpointer(directory).save(step, state, metrics=…, dataset=…)",
        *("metrics", "dataset", *_DATASET),
    ),
    **_write("save_async(path, state)", *_ASYNC, *_WAIT, "async_manager"),
    **_write("Checkpointer(directory, step_format='checkpoint_{step}')", "prefix"),
    **_omit("as all processes may call it", "orbax_checkpointer", "gda_manager"),
}

_POLICY_NAMES = (
    *("BestN", "EveryNSecs", "EveryNSteps", "EveryNStepsClosest", "ExponentialSteps"),
    *("LatestDuration", "LatestN", "OnSteps", "WithoutMetric"),
)
_TRANSFORM_NAMES = (
    *("assign", "cast", "copy", "dequantize", "drop", "from_function", "fuse"),
    *("grow", "inverse"),
    *("keep", "map_leaf", "merge", "merge_lora", "offset", "pad", "permute", "remap"),
    *("rename", "reshape", "scale", "slice", "split", "stack", "tie", "transpose"),
    *("unstack", "untie", "use_orbax_names"),
)
_DATASET_NAMES = ("Buffered", "Restarting", "StepIndexed")


def _in_module(module: str, names: tuple[str, ...]) -> dict[str, str]:
    return {name: f"write flaxckpt.{module}.{name}" for name in names}


_WAITING = _write("wait()", "result", "wait_until_finished", "join")

ANSWERS: Mapping[str, Mapping[str, str]] = {
    "flaxckpt": {
        **_write(
            "flaxckpt.load(path, state)",
            *("restore", "restore_checkpoint", "load_checkpoint", "load_pytree"),
            *("restore_pytree", "load_checkpointables", "from_bytes", "read"),
            *("restore_latest", "load_state_dict"),
        ),
        **_write(
            "flaxckpt.load_async(path, state)",
            *("restore_async", "load_pytree_async", "load_checkpointables_async"),
        ),
        **_write(
            "flaxckpt.save(path, state)",
            *("save_checkpoint", "save_checkpoint_multiprocess", "save_pytree"),
            *("save_checkpointables", "to_bytes", "write", "dump", "state_dict"),
        ),
        **_write(
            "flaxckpt.save_async(path, state)",
            *("save_pytree_async", "save_checkpointables_async", "async_save"),
        ),
        **_write(
            "flaxckpt.save(path, state) and flaxckpt.load(path, state)",
            *("StandardCheckpointer", "PyTreeCheckpointer", "AsyncCheckpointer"),
        ),
        **_write(
            "flaxckpt.Checkpointer(directory, keep=[LatestN(3)])",
            *("CheckpointManager", "CheckpointManagerOptions", "Manager", "Saver"),
            "SaveBestCheckpointer",
        ),
        **_write(
            "flaxckpt.CheckpointCallback(checkpointer, every_steps=1000)",
            *("Callback", "ModelCheckpoint", "CheckpointHook", "PeriodicCheckpoint"),
        ),
        **_write(
            "flaxckpt.Checkpointer(directory).latest_step()",
            *("latest_step", "latest", "latest_checkpoint", "get_last_checkpoint"),
        ),
        **_write(
            'flaxckpt.load(path, state, step=Checkpointer(path).best_step("loss",'
            ' "min"))',
            *("restore_best", "load_best", "restore_best_checkpoint"),
        ),
        **_write(
            "flaxckpt.Checkpointer(directory).steps()",
            *("all_steps", "steps", "available_steps", "list_steps"),
        ),
        **_write(
            "flaxckpt.metadata(path)",
            *("pytree_metadata", "checkpointables_metadata", "item_metadata", "info"),
        ),
        **_write("flaxckpt.formats.detect(path)", "is_orbax_checkpoint", "detect"),
        **_write("the state itself: save(path, state)", "args", "SaveArgs"),
        **_write("load(path, abstract_state)", "RestoreArgs", "ArrayRestoreArgs"),
        **_write("flaxckpt.transforms.from_function", "Transform"),
        **_write(
            "flaxckpt.export_huggingface(run, directory)",
            *("save_pretrained", "export_hf", "to_huggingface"),
        ),
        **_write("flaxckpt.maps.find(directory, state)", "from_pretrained"),
        **_write("flaxckpt.configs.CheckpointConfig", "CheckpointConfig"),
        **_write("flaxckpt.errors.CheckpointError", "CheckpointError"),
        **_in_module("policies", _POLICY_NAMES),
        **_in_module("transforms", _TRANSFORM_NAMES),
        **_in_module("datasets", _DATASET_NAMES),
    },
    "flaxckpt.policies": {
        **_write("EveryNSecs(3600)", "EveryNSeconds", "KeepTimeInterval"),
        **_write("OnSteps([100, 200])", "CustomSteps", "SpecificStepsPolicy"),
        **_write("Checkpointer(directory), which keeps all steps", "PreserveAll"),
        **_write("[LatestN(3), …], a list", "AnyPreservationPolicy", "AnyOf"),
        **_write("LatestN(3)", "Latest", "KeepLatest", "LastN", "MaxToKeep"),
        **_write('BestN(1, "loss", "min")', "Best", "KeepBest", "TopK"),
        **_write("EveryNSteps(1000)", "EveryN", "EverySteps", "KeepPeriod"),
    },
    "load": {**_LOAD, **_MAPPED},
    "load_async": {**_LOAD, **_MAPPED},
    "plan": _LOAD,
    "save": _SAVE,
    "save_async": _SAVE,
    "verify": _LOOK,
    "metadata": _LOOK,
    "diff": {
        **_write("diff(path, path, step_a=1, step_b=2)", CALL, "step", "steps"),
        **_write("transforms=[…], or values=False", "rtol", "atol", "tolerance"),
    },
    "convert": {
        **_write("format=", "to", "fmt", "output_format", "target"),
        **_write("overwrite=True", "force", "exist_ok", "on_exists"),
        **_write("transforms=[cast('.*', 'bfloat16')]", *_DTYPE),
        **_write("layout=ArrayLayout(codec='zstd')", "codec", "compression", "store"),
        **_write("layout=ArrayLayout(codec='zstd')", "compress"),
        **_BEST_OF_PATH,
    },
    "Checkpointer": {
        **_write('Checkpointer("run", keep=[LatestN(3)])', CALL),
        **_KEEP,
        **_write("directory=", *_RUN),
        **_write("keep=[LatestN(3)]", "options", "context"),
        **_write("items=", "item_names", "item_handlers", "checkpointers"),
        **_write("items=", "handler_registry", "checkpointables"),
        **_write("CheckpointCallback(checkpointer, every_steps=1000)", *_EVERY),
        **_write("CheckpointCallback(checkpointer, every_steps=1000)", "every_steps"),
        **_write("CheckpointCallback(checkpointer, every_secs=600)", *_EVERY_SECS),
        **_write("CheckpointCallback(checkpointer, on_steps=[10, 20])", *_ON_STEPS[:2]),
        **_write(
            "CheckpointCallback(checkpointer, every_steps=1000)",
            *("should_save", "should_save_fn"),
        ),
        **_write("step_format='ckpt_{step}'", "step_prefix", "prefix"),
        **_write("step_format='{step:08d}'", "step_format_fixed_length"),
        **_write("step_format='step_{step}'", "step_name_format"),
        **_write("save(step, state, dataset=…)", *_DATASET),
        **_write("keep_dataset=[LatestN(3)]", "keep_dataset_checkpoints"),
        **_write("save(step, state) and restore(state)", "train_state", "state"),
        **_write("restore(abstract_state(state, mesh=mesh))", "partitioner", "mesh"),
        **dict.fromkeys(
            ("convert_from_tf_checkpoint", "restore_from_tf_checkpoint"),
            "convert the checkpoint with T5X first",
        ),
        **_write("save(step, state, overwrite=True)", "overwrite", "force"),
        **_write("metadata=", "custom_metadata", "save_root_metadata"),
        **_write("sinks=[…]", "logger", "loggers"),
        **_write("transforms=[cast('.*', 'bfloat16')]", *_DTYPE),
        **_write("peer_timeout_secs=", "multiprocessing_options", "timeout_secs"),
        **_write("permissions=", "file_options"),
        **_write("max_concurrent_bytes=", "concurrent_gb", "concurrent_bytes"),
        **_omit("as the directory is made unless read_only=True", "create"),
        **_omit("as saves are asynchronous, and wait() waits", *_ASYNC),
        **_omit(
            "as leftovers of crashes are removed by themselves",
            *("cleanup_tmp_directories", "enable_background_delete"),
            *("todelete_subdir", "todelete_full_path", "atomicity_options"),
            *("num_deletion_threads", "temporary_path_class"),
        ),
        **_omit(
            "as nothing here needs it",
            *("single_host_load_and_broadcast", "lightweight_initialize"),
            *("prevent_write_metrics", "enable_per_process_directory_creation"),
            "enable_should_save_is_saving_in_progress_check",
        ),
        # attributes
        **_write(
            "steps()", "all_steps", "checkpoints", "list_steps", "available_steps"
        ),
        **_write(
            "latest_step()",
            *("latest", "latest_checkpoint", "last_step", "get_latest_step", "newest"),
        ),
        **_write('best_step("loss", "min")', "best", "best_checkpoint"),
        **_write("wait()", "wait_until_finished", "block_until_finished", "join"),
        **_write("save(step, state).done()", "is_saving_in_progress", "is_saving"),
        **_write("raise_if_failed()", "check_for_errors"),
        **_write("CheckpointCallback.should_stop()", "reached_preemption"),
        **_write("metadata(step)", "item_metadata", "pytree_metadata"),
        **_write("metadata(step)", "checkpointables_metadata", "structure"),
        **_write("run_metadata", "root_metadata", "global_metadata"),
        **_write(
            "restore(state)",
            *("load", "load_pytree", "load_checkpointables", "load_checkpoint"),
            *("restore_checkpoint", "load_state_dict", "load_latest", "load_async"),
            *("load_pytree_async", "load_checkpointables_async"),
        ),
        **_write(
            "CheckpointCallback(checkpointer).restore_or_init(state)",
            *("restore_or_init", "restore_or_initialize", "load_or_init"),
        ),
        **_write("restore_latest(state)", "load_or_initialize", "maybe_restore"),
        **_write(
            'restore(state, step=best_step("loss", "min"))',
            *("restore_best", "load_best", "restore_best_checkpoint", "get_best"),
        ),
        **_write(
            "save(step, state)",
            *("save_checkpoint", "save_pytree", "save_checkpointables", "save_async"),
            *("save_pytree_async", "save_checkpointables_async", "state_dict"),
        ),
        **_write("save(step, state).cancel()", "cancel"),
        **_write("delete(step)", "remove", "delete_async", "delete_step"),
        **_write("prune()", "cleanup", "clean", "garbage_collect", "gc"),
        **_write("step in steps()", "exists", "has_step", "has_checkpoint"),
        **_write(
            "[step for step in steps() if has_dataset(step)]",
            "all_dataset_checkpoint_steps",
        ),
    },
    "Checkpointer.save": {
        **_write("save(step, state)", "items", *_STATE),
        **_write("save(step, state)", "save_kwargs", "checkpointables"),
        **_write("metadata=", "custom_metadata"),
        **_write('metrics={"loss": …}', "metric", "loss"),
        **_write("dataset=", *_DATASET),
        **_write("Checkpointer(directory, keep=[LatestN(3)])", "keep", *_LATEST),
        **_write("save(step, state).wait()", *_WAIT, *_ASYNC),
        **_write("overwrite=True", "force", "exist_ok"),
        **_write(
            "Checkpointer(directory, transforms=[…])",
            *("transforms", "state_transformation_fns", *_DTYPE),
        ),
        **_write("Checkpointer(directory, max_concurrent_bytes=…)", "concurrent_gb"),
    },
    "Checkpointer.restore": {
        **_write('restore(state, step=best_step("loss", "min"))', *_BEST_OF),
        **_NEWEST,
        **_write("restore(state)", *_TEMPLATE, "restore_kwargs"),
        **_write("Checkpointer(directory).restore(state)", "directory", "path"),
        **_write("restore(abstract_state(state, mesh=mesh))", *_PLACEMENT),
        **_write("dataset=", *_DATASET),
        **_RESTORE,
        **_MAPPED,
        **_write("transforms=[…]", "state_transformation_fns", "remap"),
        **_omit("as plan(path, state) reads no arrays", "lazy_parameters"),
    },
    "Checkpointer.restore_latest": {
        **_write("restore_latest(state)", *_TEMPLATE),
        **_write("restore(state, step=step)", "step"),
        **_write("dataset=", *_DATASET),
    },
    "Checkpointer.best_step": _write('best_step("loss", "min")', CALL, "metric_name"),
    "Checkpointer.add_metrics": _write('metrics={"loss": …}', "loss", "metric"),
    "CheckpointCallback": {
        **_write("CheckpointCallback(checkpointer, every_steps=1000)", CALL),
        **_write("every_steps=1000", *_EVERY),
        **_write("every_secs=600", *_EVERY_SECS[1:]),
        **_write("on_steps=[10, 20]", *_ON_STEPS),
        **_write("dataset=", *_DATASET),
        **_write("on_step(step, state, metrics=…)", "metrics", "metric"),
        **_write("on_step.restore_or_init(state)", "state", "train_state"),
        **_write(
            "CheckpointCallback(Checkpointer(directory), every_steps=1000)",
            *("directory", *_RUN),
        ),
        **{
            name: answer.replace("write ", "write Checkpointer(directory, ") + ")"
            for name, answer in _KEEP.items()
        },
        **_write("Checkpointer(directory, keep=[LatestN(3)])", "keep"),
        # attributes
        **_write("on_step(step, state, force=True)", "save", "save_checkpoint"),
        **_write(
            "restore_or_init(state)",
            *("restore", "load", "restore_or_initialize", "maybe_restore", "resume"),
        ),
        **_write("should_stop()", "reached_preemption", "preempted"),
        **_write(
            'checkpointer.restore(state, step=checkpointer.best_step("loss", "min"))',
            *("restore_best", "load_best", "best_model_path"),
        ),
        **_write("checkpointer.latest_step()", "latest_step"),
        **_write("on_step(step, state), which returns if it saved", "should_save"),
    },
    "CheckpointCallback.restore_or_init": {
        **_write("restore_or_init(state)", *(n for n in _TEMPLATE if n != "state")),
        **_write("source=", "path", *_PATH),
        **_write("restore(state, step=…) of the Checkpointer", "step"),
        **_write("source_transforms=", "transforms"),
        **_write("dataset=", *_DATASET),
    },
    "KerasCheckpoint": {
        **_write(
            "KerasCheckpoint(on_step, batches, steps_per_epoch=1000)",
            *(CALL, "filepath", "backup_dir", *_RUN, "directory"),
        ),
        **_write(
            'Checkpointer(directory, keep=[LatestN(3), BestN(1, "val_loss", "min")])',
            *(*_BEST, *_LATEST),
        ),
        **_write(
            "CheckpointCallback(checkpointer, every_steps=1000)",
            *("save_freq", "every_steps", "save_steps", "save_every"),
        ),
        **_write("every_epochs=", "epochs", "period"),
        **_write("batches", "dataset", *_DATASET),
        **_omit("as load reads a part of the state", "save_weights_only"),
        **_omit("as the whole run is saved", "delete_checkpoint", "restore"),
        **_omit("as each save is logged", "verbose"),
        **_omit("as BestN ranks the saved steps", "initial_value_threshold"),
    },
    "CheckpointConfig": {
        **_write("keep=[LatestN(3)], or in a file keep = [{latest = 3}]", *_LATEST),
        **_write(
            "keep=[EveryNSteps(1000)], or in a file keep = [{every_steps = 1000}]",
            *_PERIOD,
        ),
        **_write(
            'keep=[BestN(1, "loss", "min")], or in a file'
            ' keep = [{best = 1, metric = "loss", mode = "min"}]',
            *(*_BEST, *_POLICIES, "keep_checkpoints_without_metrics"),
        ),
        **_write(
            "keep=[EveryNSecs(3600)], or in a file keep = [{every_secs = 3600}]",
            "keep_time_interval",
        ),
        **_write("every_steps = 1000", *_EVERY),
        **_write("every_secs = 600", *_EVERY_SECS[1:]),
        **_write("on_steps = [10, 20]", *_ON_STEPS),
        **_write("directory", *_RUN),
        **_write("source", "init_checkpoint", "restore_from", "load_path"),
        **_write('save_dtype = {pattern = "params/.*", dtype = "bfloat16"}', "dtype"),
    },
    "SaveHandle": _WAITING,
    "LoadHandle": _WAITING,
    "BestN": {
        **_write('BestN(1, "loss", "min")', CALL, "best_fn", "best_mode", "keep"),
        **_write('BestN(1, "loss", "min")', "get_metric_fn", "reverse", *_LATEST),
        **_write(
            '[BestN(1, "loss", "min"), WithoutMetric("loss")]',
            "keep_checkpoints_without_metrics",
        ),
    },
    "LatestN": _write("LatestN(3)", CALL, "keep", *_LATEST),
    "EveryNSteps": _write("EveryNSteps(1000)", CALL, "interval_steps", "steps"),
    "EveryNStepsClosest": _write("EveryNStepsClosest(1000)", CALL, "interval_steps"),
    "EveryNSecs": _write("EveryNSecs(3600)", CALL, "interval_secs", "seconds"),
    "LatestDuration": _write("LatestDuration(3600)", CALL, "duration", "seconds"),
    "OnSteps": _write("OnSteps([100, 200])", CALL),
    "WithoutMetric": _write('WithoutMetric("loss")', CALL),
    "ExponentialSteps": _write("ExponentialSteps(1000)", CALL),
}
"""Class, function or module -> guessed attribute or argument -> what to write."""


# ---- the hook ------------------------------------------------------------------------

_SAID = "_said"
"""Attribute of an error with its message without the call to write."""

_CALLED = {"__init__": "", "__call__": "on_step"}
"""Method -> its name in a call, if that is another; the constructor is the class."""


def explain(target: T) -> T:
    """Makes errors about unknown or misplaced arguments and names say what to write.

    A decorator. Of a class, it changes the constructor, the public methods, and the
    errors about unknown attributes.
    """
    if not isinstance(target, type):
        name = target.__qualname__
        return _explain_arguments(target, name, name, is_method=False)
    name = target.__name__
    for method, function in [*vars(target).items()]:
        if inspect.isfunction(function) and (
            method in _CALLED or not method.startswith("_")
        ):
            place = name if method == "__init__" else f"{name}.{method}"
            called = _CALLED.get(method, method) or name
            explained = _explain_arguments(function, place, called, is_method=True)
            setattr(target, method, explained)
    target.__getattr__ = _getter(name)  # type: ignore[attr-defined]
    return target


def answer(place: str, name: str) -> str | None:
    """Returns what to write instead of a guessed name, or None."""
    return ANSWERS[place].get(name)


def unknown_name(module: str, name: str) -> AttributeError:
    """Returns the error for a name that a module does not have."""
    return _answered(module, name) or AttributeError(
        f"module {module!r} has no attribute {name!r}", name=name
    )


def _answered(place: str, name: str) -> errors.UnknownNameError | None:
    """Returns the error for a guessed name; None if the table has no answer.

    The error's `name` is not set: Python would append its own guess to the message.
    """
    answer = ANSWERS.get(place, {}).get(name)
    if answer is None:
        return None
    return errors.UnknownNameError(f"{place} has no {name}: {answer}")


def _getter(place: str) -> Callable[[object, str], Any]:
    def get(self: object, name: str) -> Any:
        # A property of a subclass may have raised AttributeError.
        is_known = any(name in vars(cls) for cls in type(self).__mro__)
        if not is_known and (error := _answered(place, name)):
            raise error
        return object.__getattribute__(self, name)  # raises Python's own error

    return get


def _explain_arguments(function: T, place: str, called: str, *, is_method: bool) -> T:
    """Returns the function, with other errors about its arguments.

    Args:
        function: The function.
        place: Its place in `ANSWERS`, and its name in errors.
        called: Its name in a call.
        is_method: Whether the first argument is `self`.
    """

    @functools.wraps(function)
    def explained(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except errors.OptionError as error:
            # Of the calls inside of each other, the outermost is that of the user.
            said = getattr(error, _SAID, None)
            if said is None and isinstance(error, errors.ArgumentError):
                raise
            given = args[is_method:]
            meant = right_call.write_swapped(called, function, given, options)
            if meant is None and said is None:
                raise
            if meant is None:
                raise errors.OptionError(said) from None
            said = said or str(error)
            wrong = errors.ArgumentError(f"{said}: write {meant}")
            setattr(wrong, _SAID, said)
            raise wrong from None
        except TypeError as error:
            # Python has called the function if the traceback has another frame.
            traceback = error.__traceback__
            if traceback is None or traceback.tb_next is not None:
                raise
            given, message = args[is_method:], str(error)
            if "unexpected keyword" in message:
                advice = _advise_on_name(place, function, options, message)
            else:
                advice = _advise_on_call(place, called, function, given, options)
                advice = f"{message.replace('.__init__()', '()')}: {advice}"
            if advice is None:
                raise
            raise errors.ArgumentError(advice) from None

    return explained  # type: ignore[return-value]


def _advise_on_name(
    place: str, function: Callable[..., Any], options: Mapping[str, Any], message: str
) -> str | None:
    """Returns what to write instead of an unknown keyword, or None."""
    answers = ANSWERS.get(place, {})
    name = next((name for name in options if f"argument '{name}'" in message), "")
    if name in answers:
        return f"{place} has no {name}: {answers[name]}"
    near = right_call.nearest(function, name)
    return near and f"{place} has no {name}: did you mean {near}=?"


_STEP_WORDS = ("best", "latest", "newest", "last")
"""Words for a step after a path, as the command line takes them."""


def _advise_on_call(
    place: str,
    called: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
) -> str:
    """Returns the call to write instead of one with a wrong number of arguments."""
    answers = ANSWERS.get(place, {})
    for word in args[1:]:
        if isinstance(word, str) and word in _STEP_WORDS and word in answers:
            return answers[word]
    if (example := answers.get(CALL)) is not None:
        return fill_in(example, [*args, *options.values()])
    return f"write {right_call.write(called, function, args, options)}"


def fill_in(answer: str, given: Sequence[object]) -> str:
    """Returns an answer, `write BestN(1, "loss", "min")`, with values of a call.

    A value takes the place of the first one of its type, whatever the order of the
    call; `"min"` and `"max"` take the place of each other only.

    Args:
        answer: The answer; one that is no call of numbers and texts stays as it is.
        given: The values of the call.
    """
    try:
        call = ast.parse(answer.removeprefix("write "), mode="eval").body
        assert isinstance(call, ast.Call)
        assert not call.keywords
        values = [ast.literal_eval(arg) for arg in call.args]
    except (SyntaxError, ValueError, AssertionError):
        return answer
    left = [each for each in given if type(each) in (int, str)]
    for at, value in enumerate(values):
        alike = [
            each
            for each in left
            if type(each) is type(value)
            and (each in right_call.MODES) == (value in right_call.MODES)
        ]
        if alike:
            values[at] = alike[0]
            left.remove(alike[0])
    # In double quotes, as the table has them.
    texts = [json.dumps(v) if isinstance(v, str) else repr(v) for v in values]
    return f"write {ast.unparse(call.func)}({', '.join(texts)})"
