"""Makes pages of the files at the top and of the notebooks, and mends links.

In the repository a link leads to a file beside the page. In the site README.md is the
home page, docs/ is the root, a notebook is a page, and programs that pages link to are
files of the site.
"""

from __future__ import annotations

import json
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "FORMAT.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
]
PROGRAMS = "examples"
NOTEBOOK = ".ipynb"
SUFFIXES = (".py", NOTEBOOK)
SHELL = "%%sh\n"
COLORS = re.compile(r"\x1b\[[\d;]*m")
# How much a word on such a page counts in the search; 1 on all others.
BOOST = {
    "getting-started.md": 3,
    "how-to/": 3,
    "faq.md": 2,
    "errors.md": 2,
    "FORMAT.md": 0.3,
    "ARCHITECTURE.md": 0.3,
    "decisions/": 0.3,
    "CHANGELOG.md": 0.3,
}
ERRORS = "reference/errors.md"
ERROR = re.compile(r"<code>(\w+Error)</code>")
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)(?=[)#])")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Shows the version on every page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    config.site_name += f" {project['project']['version']}"
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the files that are not below docs/."""
    files_there = (ROOT / PROGRAMS).rglob("*.*")
    programs = (f.relative_to(ROOT) for f in files_there if f.suffix in SUFFIXES)
    for path in [*PAGES, *sorted(map(Path.as_posix, programs))]:
        source = ROOT / path
        if path.endswith(NOTEBOOK):
            page = make_page(json.loads(source.read_text(encoding="utf-8")))
            files.append(File.generated(config, in_site(path), content=page))
        else:
            files.append(
                File.generated(config, in_site(path), abs_src_path=str(source))
            )
    return files


def make_page(notebook: dict[str, Any]) -> str:
    """Returns a notebook with its outputs as Markdown."""
    parts: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        language = "sh" if source.startswith(SHELL) else "python"
        parts.append(f"```{language}\n{source.removeprefix(SHELL)}\n```")
        shown = [
            "".join(output.get("text") or output["data"]["text/plain"])
            for output in cell["outputs"]
        ]
        if text := COLORS.sub("", "".join(shown)).rstrip():
            parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts)


def on_page_markdown(
    markdown: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Makes links through the repository those through the site; ranks the page."""
    boost = [BOOST[path] for path in BOOST if page.file.src_uri.startswith(path)]
    page.meta["search"] = {"boost": boost[0] if boost else 1}
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    here = posixpath.dirname(page.file.src_uri)
    there = posixpath.dirname(in_repository(page.file.src_uri))

    def mended(link: re.Match[str]) -> str:
        target = in_site(posixpath.normpath(posixpath.join(there, link[1])))
        return posixpath.relpath(target, here or ".")

    return LINK.sub(mended, markdown)


def on_page_content(
    html: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Links the errors that docstrings name to where they are explained."""
    if not page.file.src_uri.startswith(posixpath.dirname(ERRORS)):
        return html
    explained = (ROOT / "docs" / ERRORS).read_text(encoding="utf-8").split()

    def linked(error: re.Match[str]) -> str:
        name = f"flaxckpt.errors.{error[1]}"
        is_there = name in explained
        return f'<a href="errors.html#{name}">{error[0]}</a>' if is_there else error[0]

    return ERROR.sub(linked, html)


def in_site(path: str) -> str:
    """Where a file, or a directory of programs, is in the site."""
    if path == "README.md":
        return "index.md"
    if path.startswith(PROGRAMS) and not path.endswith(SUFFIXES):
        return "examples.md"
    if path.endswith(NOTEBOOK):
        return path.replace(NOTEBOOK, ".md")
    return path.removeprefix("docs/")


def in_repository(page: str) -> str:
    """Where a page of the site is in the repository."""
    if page.startswith(PROGRAMS + "/"):
        return page.replace(".md", NOTEBOOK)
    return next((path for path in PAGES if in_site(path) == page), f"docs/{page}")
