"""What SECURITY.md promises of the code; hostile files are in test_readers.py."""

import ast
import re
from pathlib import Path

import pytest

from flaxckpt import _zarr

PACKAGE = Path(__file__).parents[1] / "flaxckpt"
MODULES = sorted(PACKAGE.rglob("*.py"))

RUNS_CODE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code"}
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


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_nothing_that_runs_code_from_files_is_used(module):
    tree = ast.parse(module.read_text())
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
    }
    assert imported.isdisjoint(RUNS_CODE)
    assert calls(tree).isdisjoint(CALLS | {"os.system", "os.popen", "yaml.load"})
    assert "allow_pickle=True" not in module.read_text()
    assert not {"np.load", "numpy.load", "torch.load"} & calls(tree)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_tensorstore_opens_only_what_was_put_together_here(module):
    text = module.read_text()
    opened = re.findall(r"\bts\.open\(\s*([^,)]*)", text)
    assert not opened or module.name in ("_read.py", "_write.py")
    assert all(argument.startswith(("spec", "{")) for argument in opened)
    stores = re.findall(r"KvStore\.open\(\s*([^)]*)\)", text)
    assert all(argument.startswith(("spec", "_zarr.kvstore(")) for argument in stores)
    assert not re.search(r"TensorStore\.open|ts\.Spec\(|KvStore\.Spec\(", text)


@pytest.mark.parametrize("ocdbt", [False, True])
def test_the_place_of_an_array_is_in_its_directory_whatever_it_is_called(ocdbt):
    for name in ("w", "file:///etc/", "http://127.0.0.1:9/", '{"driver":"http"}'):
        spec = _zarr.kvstore(Path("/run/7"), name, ocdbt=ocdbt)
        assert set(spec) <= {"driver", "path", "base"}
        assert spec["driver"] == ("ocdbt" if ocdbt else "file")
        base = spec["base"] if ocdbt else spec
        assert base["driver"] == "file"
        assert base["path"].startswith("/run/7/")


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
def test_classes_are_made_only_of_flax_and_optax(name):
    from flaxckpt import _flax

    assert _flax.resolve(name) is None
    assert _flax.resolve("flax.core.frozen_dict:FrozenDict") is not None
