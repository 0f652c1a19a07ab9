"""docs/errors.md explains every error, with messages that are really raised."""

import ast
import inspect
import pickle
import re

import pytest

from flaxckpt import errors
from tests import ROOT
from tests.helpers import documented_errors, syntax
from tests.helpers.documents import blocks, is_printed

DOCUMENT = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\w+Error)\n(.*?)(?=^## |\Z)", DOCUMENT, re.M | re.S))
EXAMPLES = [
    (section, block.code.strip())
    for section, text in SECTIONS.items()
    for block in blocks(text)
]
RAISING = [
    function
    for name, function in vars(documented_errors).items()
    if inspect.isfunction(function)
    if function.__module__ == documented_errors.__name__
    if name not in ("make_run", "train_state")
]
# The start of a row in a table of other messages.
OTHER_MESSAGES = re.findall(r"^\| (\*.+?\*)(?: with .*?)? \|", DOCUMENT, re.M)


def test_every_error_has_a_section():
    classes = [name for name in errors.__all__ if name.endswith("Error")]
    assert sorted(SECTIONS) == sorted(classes)


@pytest.mark.parametrize(
    ("raises", "section", "message"),
    [(f, *e) for f, e in zip(RAISING, EXAMPLES, strict=True)],
    ids=[function.__name__ for function in RAISING],
)
def test_every_example_is_raised(
    raises, section, message, tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    arguments = inspect.signature(raises).parameters
    with pytest.raises(getattr(errors, section)) as caught:
        raises(*([monkeypatch] if arguments else []))
    assert type(caught.value).__name__ == section
    assert is_printed(message, str(caught.value)), str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))  # as pools of processes do
    assert (type(again), str(again)) == (type(caught.value), str(caught.value))
    assert vars(again) == vars(caught.value)


def test_other_messages_exist_in_source():
    texts = "\n".join(
        text.replace("\n", " ")
        for file in (ROOT / "flaxckpt").rglob("*.py")
        for text in literals(file.read_text(encoding="utf-8"))
    )
    phrases = [p for row in OTHER_MESSAGES for p in re.findall(r"\*(.+?)\*", row)]
    assert len(phrases) > 20
    assert [phrase for phrase in phrases if not is_in(phrase, texts)] == []


def literals(source):
    """Yields the strings of a module, with `…` for each value in an f-string."""
    for node in ast.walk(syntax.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [getattr(part, "value", "…") for part in node.values]
            yield "".join(p if isinstance(p, str) else "…" for p in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def is_in(phrase, texts):
    return re.search(re.escape(phrase).replace("…", ".*"), texts)
