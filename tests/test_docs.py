"""Every fenced Python block in the documents runs, in order, one namespace a file.

A block after the line `<!-- not run -->` is left out.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"\s*(`{3,}|~{3,})\s*(\w*)")
NOT_RUN = "<!-- not run -->"


def python_blocks(text: str) -> Iterator[str]:
    """Yields the code of each block, below as many empty lines as stand above it.

    So a traceback gives the line of the document.
    """
    fence, language, code = "", "", []
    skip = False
    for number, line in enumerate(text.splitlines()):
        opening = FENCE.match(line)
        if fence:
            if line.strip() == fence:
                if language == "python" and not skip:
                    yield "\n".join(code)
                fence, skip = "", False
            else:
                code.append(line)
        elif opening:
            fence, language = opening.groups()
            code = [""] * (number + 1)
        elif line.strip():
            skip = line.strip() == NOT_RUN


DOCUMENTS = [
    file
    for file in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    if any(python_blocks(file.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)
def test_every_python_block_runs(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # A real module, as dataclasses and flax modules look theirs up by name.
    module = ModuleType(f"doc_{document.stem.lower()}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for code in python_blocks(document.read_text(encoding="utf-8")):
        exec(compile(code, str(document), "exec"), module.__dict__)


def test_blocks_are_found_with_their_lines():
    text = """\
# Title
```python
a = 1
```

<!-- not run -->

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
    assert list(python_blocks(text)) == ["\n\na = 1", "\n" * 14 + "d = 1"]
