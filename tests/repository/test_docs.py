"""Every Python and shell block of the documents runs, in order.

Each document has a directory, and its Python one namespace. A block of text that
directly follows another block is what is printed. A block after `<!-- not run: why -->`
is left out.
"""

import contextlib
import io
import itertools
import re
import runpy
import sys
from types import ModuleType
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from etils import epath

import flaxckpt
from flaxckpt import transforms
from flaxckpt.cli import app
from flaxckpt.policies import LatestN
from tests import ROOT
from tests.helpers import documented_runs
from tests.helpers.documents import (
    NOT_RUN,
    README_AND_GUIDES,
    blocks,
    commands,
    is_printed,
)

SVG = "{http://www.w3.org/2000/svg}"
LANGUAGES = {"python", "sh", "text", "toml", "yaml", "json"}

# The contents of a document's directory before its first block.
PREPARED = {
    "cli.md": documented_runs.make,
    "report.md": documented_runs.make,
    "maps.md": documented_runs.make_model,
    "fine-tune-from-hugging-face.md": documented_runs.make_model,
}

README = (ROOT / "README.md").read_text(encoding="utf-8")

BENCHMARKS = "tests/repository/test_benchmarks.py"

# Shell lines that take long, or change the machine -> the file that runs the same, and
# a text in that file.
RUN_ELSEWHERE = {
    "make demo": (
        "tests/repository/test_examples.py",
        "def test_demo_finds_equal_runs",
    ),
    "openssl req -x509 -newkey rsa:2048 -nodes -days 365 -subj /CN=job -keyout key.pem"
    " -out cert.pem": (
        "tests/distributed/jobs.py",
        "openssl req -x509 -newkey rsa:2048",
    ),
    "cat key.pem cert.pem > peer.pem": (
        "tests/distributed/jobs.py",
        "key.read_bytes()",
    ),
    "make quick": ("Makefile", "quick: check"),
    "make test": ("Makefile", "test: check"),
    "make test-all": ("Makefile", "test-all: test"),
    "make test-orbax-versions": (".ci/run", "test-orbax-versions"),
    **{
        f"make verification NAME={search}": (f"verification/{name}/__main__.py", text)
        for search, name, text in (
            ("filesystems", "filesystems", "def main"),
            ("model", "model", "def main"),
            ("mutants ARGS=_storage/locks.py", "mutants", '"modules"'),
            ("oom", "oom", "def main"),
            ("sequences", "sequences", "def main"),
            ("simulation", "simulation", "def main"),
            (
                'simulation ARGS="--seeds 1000000 --first 20000"',
                "simulation",
                "--first",
            ),
            ("soak", "soak", "def main"),
        )
    },
    "python -m verification simulation --seeds 1 --first 354 --trace": (
        "verification/simulation/__main__.py",
        "--trace",
    ),
    "make bench": (BENCHMARKS, "from benchmarks.__main__ import main"),
    'make bench BENCH_ARGS="--only train_state tiny"': (BENCHMARKS, '"--only"'),
    'make bench BENCH_ARGS="--quick"': (BENCHMARKS, '"--quick"'),
    ".venv/bin/python -m benchmarks.picture bench-results/results.json"
    " docs/benchmarks.svg": (BENCHMARKS, "picture"),
    "pip install .": ("Makefile", "-m pip install"),
    ".venv/bin/python -m examples.digits_nnx --config=configs/digits_nnx.py": (
        "tests/repository/test_examples.py",
        "def test_learns_digits",
    ),
    "FLAXCKPT_EVERY_FAULT=1 python -m pytest tests/faults": (
        "tests/faults/test_sweeps.py",
        "FLAXCKPT_EVERY_FAULT",
    ),
    "FLAXCKPT_POWER_CUTS=50 python -m pytest tests/faults/test_power_cut.py": (
        "tests/faults/test_power_cut.py",
        "FLAXCKPT_POWER_CUTS",
    ),
    "python -m benchmarks.reliability --rounds 100 --json out.json": (
        "tests/repository/test_benchmarks_reliability.py",
        "def test_rootless_reliability_cases_lose_nothing",
    ),
}

DOCUMENTS = [
    file
    for file in [*sorted(ROOT.glob("*.md")), *README_AND_GUIDES[1:]]
    if any(
        block.language in ("python", "sh")
        for block in blocks(file.read_text(encoding="utf-8"))
    )
]


SLOW = ("loops", "fine-tuning", "fine-tune-from-hugging-face", "maps")


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(file, id=file.stem, marks=[pytest.mark.slow] * (file.stem in SLOW))
        for file in DOCUMENTS
    ],
)
def test_every_block_runs(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    PREPARED.get(document.name, lambda _: None)(tmp_path)
    # A real module, because dataclasses and flax modules look up their module by name.
    module = ModuleType(f"doc_{document.stem.lower()}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    printed = None
    for block in blocks(document.read_text(encoding="utf-8")):
        if block.follows and block.language == "text" and printed is not None:
            assert is_printed(block.code, printed), printed
        printed = None
        if block.is_run and block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(block.code, str(document), "exec"), module.__dict__)
            printed = output.getvalue()
        elif block.is_run and block.language == "sh":
            printed = "".join(run(command) for command in commands(block.code))


def test_recipes_run_again_as_one_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    python = [block.code for block in blocks(text) if block.language == "python"]
    code = compile("\n".join(map(str.strip, python)), "train.py", "exec")
    for _ in range(2):
        module = ModuleType("doc_recipes")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(code, module.__dict__)
    assert flaxckpt.Checkpointer("finetuned").steps() == [1, 2]  # it has resumed


def test_readme_is_short_and_starts_with_reasons_and_python():
    before, python, _ = README.partition("```python")
    assert python
    assert before.count("\n") < 25
    assert "| flaxckpt | Orbax |" in before
    assert README.count("\n") <= 150


def test_readme_lines_match_orbax_lines_beside_them(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    header, _, *rows = table_of(README, "with Orbax")
    assert len(rows) == 10
    found = []
    for column, label in enumerate(header):
        open_run, save, rest = (
            compile("\n".join(row[column].strip("`") for row in part), label, "exec")
            for part in (rows[:2], rows[2:4], rows[4:])
        )
        folder = epath.Path(tmp_path / label)
        names = {
            **{"ocp": ocp, "jax": jax, "flaxckpt": flaxckpt, "LatestN": LatestN},
            **{"directory": folder / "run", "path": folder / "single"},
        }
        exec(open_run, names)
        for step in (1, 2, 3):
            names |= {"step": step, "state": {"w": jnp.full(3, step), "n": step}}
            exec(save, names)
        exec(rest, names)
        names["manager"].close()
        state = jax.tree.map(np.asarray, names["state"])
        found.append((names["steps"], names["latest"], str(state)))
    assert found[0] == found[1]
    assert found[0][:2] == ([2, 3], 3)


def table_of(text, first):
    """Returns the rows of the table that begins with the column `first`."""
    lines = iter(text[text.index(f"| {first} |") :].splitlines())
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_files_in_cli_document_match_those_used(tmp_path):
    documented_runs.make(tmp_path)
    shown = blocks((ROOT / "docs/cli.md").read_text(encoding="utf-8"))
    files = {block.language: block.code.strip() for block in shown}
    assert files["toml"] == (tmp_path / "run.toml").read_text().strip()
    assert files["json"] == (tmp_path / "wanted.json").read_text()


def run(command):
    """Returns the output of a shell line; nothing if another test runs it."""
    if command.line in RUN_ELSEWHERE:
        return ""
    program, *args = command.words
    assert program == "flaxckpt", f"to be run, or in RUN_ELSEWHERE: {command.line}"
    found = CliRunner().invoke(app, args, catch_exceptions=False)
    assert found.exit_code == command.code, found.output
    return found.output


@pytest.mark.parametrize("line", RUN_ELSEWHERE)
def test_lines_run_elsewhere_exist_in_a_test_and_a_document(line):
    file, text = RUN_ELSEWHERE[line]
    assert text in (ROOT / file).read_text(encoding="utf-8")
    assert line in [
        command.line
        for document in DOCUMENTS
        for block in blocks(document.read_text(encoding="utf-8"))
        if block.language == "sh"
        for command in commands(block.code)
    ]


@pytest.mark.parametrize("document", README_AND_GUIDES, ids=lambda file: file.stem)
def test_every_block_has_a_known_language_and_reasons_for_skips(document):
    text = document.read_text(encoding="utf-8")
    assert {block.language for block in blocks(text)} <= LANGUAGES
    assert all(mark[1] for mark in map(NOT_RUN.match, text.splitlines()) if mark)


@pytest.mark.parametrize("document", README_AND_GUIDES, ids=lambda file: file.stem)
def test_fold_titles_are_html_and_hide_no_headings(document):
    """Neither GitHub nor the site reads Markdown in a title."""
    text = document.read_text(encoding="utf-8")
    titles = re.findall(r"<summary>(.*?)</summary>", text)
    folds = re.findall(r"^<details.*?^</details>", text, re.DOTALL | re.MULTILINE)
    assert len(titles) == len(folds) == text.count("<details")
    assert [title for title in titles if re.search(r"[`*\[]", title)] == []
    assert [fold for fold in folds if re.search(r"^##+ ", fold, re.MULTILINE)] == []


def test_finds_blocks_with_their_lines():
    text = """\
# Title
```python
a = 1
```

<!-- not run: it is c -->

```python
b = 1
```
```sh
c
```
~~~python
d = 1
~~~
"""
    assert [tuple(block) for block in blocks(text)] == [
        ("python", "\n\na = 1", True, False),
        ("python", "\n" * 8 + "b = 1", False, False),
        ("sh", "\n" * 11 + "c", True, True),
        ("python", "\n" * 14 + "d = 1", True, True),
    ]


def test_commands_may_have_comments_and_several_lines():
    code = "a 'b c' \\\n  d  # exits with 2\n\n# nothing\ne\n"
    assert [tuple(command) for command in commands(code)] == [
        ("a 'b c'   d", ["a", "b c", "d"], 2),
        ("e", ["e"], 0),
    ]


def test_is_printed_detects_other_output():
    wanted = "step  1000\n…\n3 steps, 1.5 kB"
    assert is_printed(wanted, "step 2000\na\nb\n1 steps, 7 kB\n")
    assert not is_printed(wanted, "step 2000\na\nb\n1 step, 7 kB\n")
    assert not is_printed(wanted, "a step 1\n1 steps, 7 kB\n")


def test_glossary_has_concepts_of_architecture():
    architecture = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    concepts = architecture.partition("## Concepts")[2].partition("\n## ")[0]
    glossary = terms((ROOT / "docs/glossary.md").read_text(encoding="utf-8"))
    assert len(terms(concepts)) > 5
    assert terms(concepts) <= glossary


def test_decisions_have_all_sections_and_are_listed():
    directory = ROOT / "docs/decisions"
    index = (directory / "index.md").read_text(encoding="utf-8")
    records = sorted(file for file in directory.glob("*.md") if file.name != "index.md")
    for file in records:
        headings = re.findall(r"^## (.+)$", file.read_text(encoding="utf-8"), re.M)
        assert headings == ["Context", "Decision", "Cost"], file.name
    listed = re.findall(r"^\| \[.+?\]\((.+?)\)", index, re.M)
    assert sorted(listed) == [file.name for file in records]


def terms(text):
    """Returns the first cells of a table, in lower case; a cell may hold several."""
    cells = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)
    return {term.strip().lower() for cell in cells for term in cell.split(",")}


def test_readme_figures_match_measurements():
    measured = compared("docs/benchmarks.md") | compared("docs/reliability.md")
    told = compared("README.md")
    assert len(told) >= 10
    assert told.items() <= measured.items()


def test_recording_shows_commands_of_its_program():
    program = runpy.run_path(str(ROOT / "docs/record.py"))
    picture = ElementTree.parse(ROOT / "docs/recording.svg").getroot()
    texts = "".join(text.text for text in picture.iter(f"{SVG}text"))
    assert [c for c in program["COMMANDS"] if c not in texts] == []
    assert "Killed" in texts


def compared(document):
    """Returns the cells for flaxckpt and Orbax beside a label, in tables with both."""
    found, header = {}, []
    for line in (ROOT / document).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
        elif {"flaxckpt", "Orbax"} <= set(header):
            row = dict(zip(header, cells, strict=True))
            found[cells[0]] = (row["flaxckpt"], row["Orbax"])
    return found


def test_transforms_table_is_complete():
    text = (ROOT / "docs/fine-tuning.md").read_text(encoding="utf-8")
    rows = [row.split("|")[1] for row in text.splitlines() if row.startswith("| `")]
    named = set(re.findall(r"`(\w+)\(", " ".join(rows)))
    classes = {name for name in transforms.__all__ if name[0].isupper()}
    assert not set(transforms.__all__) - classes - named - {"inverse"}
