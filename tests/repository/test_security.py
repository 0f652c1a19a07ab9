"""The guarantees of SECURITY.md on the code, and on run directories of others.

Hostile files are in test_readers.py.
"""

import ast
import json
import logging
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict, freeze
from flax.training.train_state import TrainState

import flaxckpt
from flaxckpt import errors
from tests import ROOT
from tests.helpers import old_stores, strategies, syntax

PACKAGE = ROOT / "flaxckpt"
MODULES = sorted(PACKAGE.rglob("*.py"))

RUNS_CODE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code"}
FROZEN_DICT = "flax.core.frozen_dict:FrozenDict"
CALLS = {"eval", "exec", "compile", "__import__", "system", "popen"}


def calls(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Name(id=name):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id=of), attr=name):
                    found.add(f"{of}.{name}")
                case ast.Attribute(attr=name):
                    found.add(name)
    return found


def imported(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def test_modules_run_no_code_from_files():
    refused = CALLS | {"os.system", "os.popen", "yaml.load"}
    refused |= {"np.load", "numpy.load", "torch.load"}
    for module in MODULES:
        text = module.read_text()
        tree = syntax.parse(text)
        assert not RUNS_CODE & imported(tree), module
        assert not refused & calls(tree), module
        assert "allow_pickle=True" not in text, module


def test_tensorstore_opens_only_specs_built_here():
    for module in MODULES:
        text = module.read_text()
        opened = re.findall(r"\bts\.open\(\s*([^,)]*)", text)
        assert not opened or module.name in ("read.py", "encode.py"), module
        assert all(argument.startswith(("spec", "{")) for argument in opened), module
        stores = re.findall(r"KvStore\.open\(\s*([^)]*)\)", text)
        built = ("spec", "zarr_metadata.kvstore(")
        assert all(argument.startswith(built) for argument in stores), module
        other = re.search(r"TensorStore\.open|ts\.Spec\(|KvStore\.Spec\(", text)
        assert not other, module


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_array_names_cannot_leave_their_directory(tmp_path, codec):
    path, urls = tmp_path / "c", ("file:///etc/w", "http://127.0.0.1:9/w")
    names = ("w", '{"driver":"http"}', *urls)
    state = {name: np.full(3, n) for n, name in enumerate(names)}
    layout = flaxckpt.ArrayLayout(codec=codec)
    flaxckpt.save(path, state, layout=layout)
    strategies.assert_same(state, flaxckpt.load(path))
    old_stores.make_databases(path)
    strategies.assert_same(state, flaxckpt.load(path))
    flaxckpt.save(path, state, layout=layout, overwrite=True)
    old_stores.make_directories(path)
    with pytest.raises(errors.DamagedCheckpointError, match="lead out") as refused:
        flaxckpt.load(path)
    assert [name for name in names if repr(name) in str(refused.value)] == [*urls]


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "builtins:dict",
        "subprocess:Popen",
        "flax.struct:dataclasses.Field",
        "flax.core.frozen_dict:collections.abc.Mapping",
        "optax._src.float64_test:Float64Test",
        "flax.testing:Benchmark",
        "flax.core:",
        "flax..core:FrozenDict",
        ":",
        "",
    ],
)
def test_makes_classes_only_of_flax_and_optax(tmp_path, name):
    flaxckpt.save(tmp_path / "c", {"a": freeze({"b": 1})})
    assert type(flaxckpt.load(tmp_path / "c")["a"]) is FrozenDict
    text = (tmp_path / "c/flaxckpt.json").read_text()
    assert FROZEN_DICT in text
    manifest = json.loads(text.replace(FROZEN_DICT, name))
    old_stores.rewrite_manifest(tmp_path / "c", manifest)
    try:
        assert type(flaxckpt.load(tmp_path / "c")["a"]) is dict
    except errors.DamagedCheckpointError:
        assert not name.strip(":")


@pytest.fixture
def run(tmp_path):
    """A run with a step, and an empty directory `elsewhere` beside it."""
    (tmp_path / "elsewhere").mkdir()
    flaxckpt.Checkpointer(tmp_path / "run").save(1, {"a": 1}).wait()
    return tmp_path / "run"


def test_does_not_add_metrics_behind_link(run):
    elsewhere = run.parent / "elsewhere"
    (run / "1" / "metrics").symlink_to(elsewhere)
    with pytest.raises(errors.SaveFailedError, match="link"):
        flaxckpt.Checkpointer(run).add_metrics(1, {"loss": 1.0})
    assert not any(elsewhere.iterdir())


def test_does_not_write_run_metadata_behind_link(run):
    elsewhere = run.parent / "elsewhere"
    (run / "metadata").symlink_to(elsewhere)
    with pytest.raises(errors.SaveFailedError, match="link"):
        flaxckpt.Checkpointer(run, metadata={"name": "a"})
    assert not any(elsewhere.iterdir())


def test_does_not_append_events_behind_link(run, caplog):
    file = run.parent / "elsewhere" / "notes"
    file.write_text("mine")
    (run / "events.jsonl").unlink()
    (run / "events.jsonl").symlink_to(file)
    flaxckpt.Checkpointer(run).save(2, {"a": 1}).wait()
    assert file.read_text() == "mine"
    assert "events are missing" in caplog.text


def test_does_not_save_params_only_behind_link(run):
    other = run.parent / "other"
    with flaxckpt.Checkpointer(other) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"a": step}).wait()
    (run / "params_only").symlink_to(other)
    state = TrainState.create(
        apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.adam(1e-3)
    )
    with pytest.raises(errors.SaveFailedError, match="link"):
        flaxckpt.Checkpointer(run).save_params_only(7, state)
    assert flaxckpt.Checkpointer(other).steps() == [1, 2]


EVIL = "\x1b[31mred"


def assert_plain(text):
    assert "\\x1b[31mred" in text
    assert "\x1b" not in text


def test_escapes_names_from_files_for_terminal(run, caplog):
    ckpt = flaxckpt.Checkpointer(run)
    (run / "1" / f"READING-{EVIL}-12-0123abcd").touch()
    with pytest.raises(errors.SaveFailedError) as info:
        ckpt.delete(1)
    assert_plain(str(info.value))
    assert_plain(str(ckpt.explain()[1]))
    (run / "1" / "DAMAGED").write_text('{"reason": "\\u001b[31mred"}')
    assert_plain(ckpt.damaged()[1])


def test_escapes_item_names_for_terminal(tmp_path, caplog):
    flaxckpt.save(tmp_path / "c", {"a": 1})
    for name in ("flaxckpt.json", "commit_success.txt"):
        (tmp_path / "c" / name).unlink()
    (tmp_path / "c" / "state").rename(tmp_path / "c" / f"x{EVIL}")
    flaxckpt.save(tmp_path / "d", {"a": 1})
    (tmp_path / "d" / "state").rename(tmp_path / "c" / f"y{EVIL}")
    with caplog.at_level(logging.WARNING):
        flaxckpt.load(tmp_path / "c")
    assert "state is missing from this step" in caplog.text
    assert_plain(caplog.text)
    (tmp_path / "c" / f"y{EVIL}" / "_METADATA").unlink()
    with pytest.raises(errors.CheckpointError) as info:
        flaxckpt.load(tmp_path / "c", {f"y{EVIL}": {"a": 1}})
    assert_plain(str(info.value))


def test_escapes_step_names_for_terminal(tmp_path):
    for step in (1, 2):
        flaxckpt.save(tmp_path / f"{EVIL}_{step}", {"a": jnp.ones(3)})
    (tmp_path / f"{EVIL}_2" / "state" / "_METADATA").unlink()
    (tmp_path / f"{EVIL}_2" / "state" / "manifest.ocdbt").unlink()
    run = flaxckpt.Checkpointer(
        tmp_path, step_format=f"{EVIL}_{{step}}", read_only=True
    )
    with pytest.raises(errors.DamagedCheckpointError) as info:
        run.restore(step=2)
    assert_plain(str(info.value))
    with pytest.raises(errors.CheckpointNotFoundError) as info:
        flaxckpt.load(tmp_path, step=2)
    assert_plain(str(info.value))
    (tmp_path / f"{EVIL}_4.orbax-checkpoint-tmp").mkdir()
    with pytest.raises(errors.CheckpointNotFoundError) as info:
        flaxckpt.load(tmp_path)
    assert_plain(str(info.value))


def test_escapes_names_in_report_for_terminal(tmp_path):
    flaxckpt.save(tmp_path / "c", {EVIL: jnp.ones(3)})
    [file] = (tmp_path / "c/state/d").glob("*.small.0")
    file.unlink()
    file.symlink_to("/etc/passwd")
    (tmp_path / "c" / f"extra{EVIL}").touch()
    report = flaxckpt.verify(tmp_path / "c")
    assert not report.ok
    assert_plain(str(report))


def test_directory_named_damaged_marks_a_step_as_damaged(run):
    (run / "1" / "DAMAGED").mkdir()
    ckpt = flaxckpt.Checkpointer(run)
    assert ckpt.steps() == []
    assert list(ckpt.damaged()) == [1]
    with pytest.raises(errors.DamagedCheckpointError, match="marked as damaged"):
        flaxckpt.load(run)
    ckpt.save(1, {"a": 2}).wait()
    assert ckpt.restore(step=1) == {"a": 2}
    assert ckpt.steps() == [1]
