"""The files of a release agree with each other, and its archives pass the checks."""

import hashlib
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import tomllib

import pytest
import yaml

import flaxckpt
from tests import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]

CONDA_NAMES = {"msgpack": "msgpack-python"}
"""Package -> its name on conda-forge, if that is another."""


def read_yaml(path):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def split(requirement):
    """Returns the name and the lowest version of a requirement."""
    name, version = re.fullmatch(r"([\w.-]+?) ?>=([\d.]+)", requirement).groups()
    return name, version


def test_all_files_name_the_same_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d[^\]]*)\]", changelog, re.MULTILINE)
    assert newest[1] == VERSION
    assert read_yaml("conda-recipe/recipe.yaml")["context"]["version"] == VERSION
    assert read_yaml("CITATION.cff")["version"] == VERSION


def test_package_version_matches_installation():
    assert flaxckpt.__version__ == importlib.metadata.version("flaxckpt")


def test_conda_recipe_has_requirements_of_package():
    recipe = read_yaml("conda-recipe/recipe.yaml")
    requirements = recipe["requirements"]
    run = dict(map(split, requirements["run"]))
    assert run.pop("python") == PROJECT["requires-python"].removeprefix(">=")
    [clu] = requirements["run_constraints"]  # only an integration needs it
    found = {**run, **dict([split(clu)])}
    wanted = dict(map(split, PROJECT["dependencies"]))
    assert found == {CONDA_NAMES.get(name, name): wanted[name] for name in wanted}
    assert recipe["build"]["python"]["entry_points"] == [
        f"{name} = {target}" for name, target in PROJECT["scripts"].items()
    ]
    [backend] = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"][
        "requires"
    ]
    assert split(backend) in map(split, requirements["host"][2:])
    assert recipe["about"]["license"] == PROJECT["license"]
    assert recipe["about"]["summary"] == PROJECT["description"]
    assert (ROOT / "conda-recipe" / recipe["source"]["path"]).resolve() == ROOT


def test_citation_is_complete():
    citation = read_yaml("CITATION.cff")
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == [dict(author) for author in PROJECT["authors"]]


def test_issue_templates_ask_for_doctor_output():
    folder = ROOT / ".github/ISSUE_TEMPLATE"
    forms = {file.stem: read_yaml(file) for file in folder.glob("*.yml")}
    assert forms.keys() == {"bug", "question", "config"}
    for name in ("bug", "question"):
        form = forms[name]
        assert form["name"]
        assert form["description"]
        fields = [part for part in form["body"] if part["type"] != "markdown"]
        assert all(part["attributes"]["label"] for part in fields)
        ids = [part["id"] for part in fields]
        assert "doctor" in ids
        assert len(set(ids)) == len(ids)
        assert "flaxckpt doctor" in str(fields)


def test_security_explains_reporting_and_names_no_address():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "## Report a vulnerability" in text.split("\n## Guarantees")[0]
    assert "private vulnerability reporting" in text
    assert not re.search(r"\w@\w", text)


def run(*command, cwd):
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_archives_pass_release_checks(tmp_path):
    for tool in ("build", "twine", "check_wheel_contents"):
        pytest.importorskip(tool)
    run("build", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    sdist, wheel = sorted(tmp_path.iterdir(), key=lambda file: file.suffix)
    assert sdist.name == f"flaxckpt-{VERSION}.tar.gz"
    assert wheel.name == f"flaxckpt-{VERSION}-py3-none-any.whl"
    run("twine", "check", "--strict", sdist, wheel, cwd=tmp_path)
    run("check_wheel_contents", wheel, cwd=tmp_path)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CITATION.cff", "conftest.py"} <= names
    assert not any(name.startswith((".ci", "dist", ".venv")) for name in names)


@pytest.mark.slow
def test_conda_recipe_builds_files_of_wheel(tmp_path):
    for tool in ("hatchling", "rattler_build"):
        pytest.importorskip(tool, reason="make dist has it")
    run("hatchling", "build", "--target", "wheel", "-d", tmp_path, cwd=ROOT)
    [wheel] = tmp_path.iterdir()
    done = subprocess.run(
        [sys.executable, ROOT / "conda-recipe/build.py", wheel],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"flaxckpt-{VERSION}-py")
    assert f"has the files of {wheel.name} and passes its tests" in done.stdout


def test_third_party_scripts_match_notes():
    package = ROOT / "flaxckpt"
    notes = (package / "_report/static/THIRD_PARTY.md").read_text()
    noted = dict(re.findall(r"\| (\S+\.(?:js|css)) \| `([0-9a-f]{64})` \|", notes))
    found = {
        file.relative_to(package).as_posix(): hashlib.sha256(
            file.read_bytes()
        ).hexdigest()
        for file in package.rglob("*.min.*")
    }
    assert found == noted
