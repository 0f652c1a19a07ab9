"""A wheel, installed alone, saves and loads, and has its command."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests import ROOT

VERBS = sorted(file.stem for file in (ROOT / "flaxckpt/cli").glob("[a-z]*.py"))

TRY = """
import pathlib
import jax.numpy as jnp, optax
from flax.training.train_state import TrainState
import flaxckpt

params = {"w": jnp.arange(6.0).reshape(2, 3)}
state = TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))
with flaxckpt.Checkpointer("run") as checkpointer:
    checkpointer.save(1, state, metrics={"loss": 0.5})
again = flaxckpt.load("run")
assert (again.params["w"] == params["w"]).all()
assert type(again.opt_state[0]) is optax.ScaleByAdamState
print(pathlib.Path(flaxckpt.__file__).parent)
"""


def run(*command, cwd):
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
        *("--wheel-dir", folder, ROOT),
        cwd=folder,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_contains_exactly_package_files(wheel):
    """Also the scripts, styles and licences beside the modules."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    files = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "flaxckpt").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert "flaxckpt/py.typed" in files
    assert {name for name in names if ".dist-info/" not in name} == files
    assert any(name.endswith("/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_wheel_works_in_empty_environment(wheel, tmp_path):
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    run(
        *(home / "bin/python", "-m", "pip", "install", "--quiet", "--no-compile"),
        *("--disable-pip-version-check", wheel),
        cwd=tmp_path,
    )
    installed = run(home / "bin/python", "-c", TRY, cwd=tmp_path).strip()
    assert Path(installed).is_relative_to(home)
    command = home / "bin/flaxckpt"
    help_text = run(command, "--help", cwd=tmp_path)
    assert [verb for verb in VERBS if f" {verb} " not in help_text] == []
    assert "  loss  marks" in run(command, "ls", "run", cwd=tmp_path)
    assert "params/w" in run(command, "diff", "--json", "run", "run", cwd=tmp_path)
    run(command, "verify", "run", cwd=tmp_path)
    run(command, "convert", "run", "model.safetensors", cwd=tmp_path)
    shown = run(home / "bin/python", "-m", "flaxckpt", "show", "run", cwd=tmp_path)
    assert "float32[2, 3]" in shown
