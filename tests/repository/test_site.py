"""The site builds without warnings, has every page and name, and needs no network."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import griffe
import pytest

import flaxckpt
from tests import ROOT
from tests.helpers import programs

AT_THE_TOP = ["FORMAT", "ARCHITECTURE", "SECURITY", "CHANGELOG"]
ELSEWHERE = re.compile(r"(https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The directory of a site, built with warnings as errors."""
    directory = tmp_path_factory.mktemp("site")
    words = ("-m", "mkdocs", "build", "--strict", "-d", directory)
    built = programs.run(*words, cwd=ROOT, NO_MKDOCS_2_WARNING="1")
    assert "WARNING" not in built.stderr, built.stderr
    return directory


class Page(HTMLParser):
    """The anchors, the links and the loaded files of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids.add(found.get("id") or "")
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link":
            self.loaded.append(found["href"])
        self.loaded += [found[name] for name in ("src", "data") if found.get(name)]


@pytest.fixture(scope="module")
def pages(site):
    found = {file: Page(file) for file in site.rglob("*.html")}
    del found[site / "404.html"]  # its links work from any path
    return found


@pytest.mark.slow
def test_every_document_is_a_page(site):
    documents = [file.relative_to(ROOT / "docs") for file in ROOT.glob("docs/**/*.md")]
    names = ["index", *AT_THE_TOP, *(file.with_suffix("") for file in documents)]
    assert [n for n in names if not (site / f"{n}.html").is_file()] == []


@pytest.mark.slow
def test_every_page_is_in_the_navigation(site, pages):
    home = Page(site / "index.html")
    linked = {site / link.partition("#")[0] for link in home.links}
    assert pages.keys() <= linked | {site / "index.html"}


@pytest.mark.slow
def test_every_link_resolves(site, pages):
    broken = [
        f"{file.relative_to(site)}: {link}"
        for file, page in pages.items()
        for link in page.links
        if not ELSEWHERE.match(link) and not leads_somewhere(file, link, pages)
    ]
    assert broken == []


def leads_somewhere(file: Path, link: str, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(link)
    target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    if target.is_dir():
        target /= "index.html"
    anchor = unquote(parts.fragment)
    return target.is_file() and (not anchor or anchor in pages[target].ids)


@pytest.mark.slow
def test_raised_errors_link_to_their_reference(site, pages):
    links = pages[site / "reference/saving.html"].links
    assert "errors.html#flaxckpt.errors.RestoreMismatchError" in links


def test_document_links_resolve_in_repository():
    broken = [
        f"{file.relative_to(ROOT)}: {link}"
        for file in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
        for link in re.findall(r"\]\(([^)#\s]+)", file.read_text(encoding="utf-8"))
        if not ELSEWHERE.match(link) and not (file.parent / link).exists()
    ]
    assert broken == []


@pytest.mark.slow
def test_site_loads_nothing_from_other_hosts(site, pages):
    loaded = [url for page in pages.values() for url in page.loaded]
    for file in site.rglob("*.css"):
        loaded += re.findall(r"url\(['\"]?([^)'\"]+)", file.read_text(encoding="utf-8"))
    assert len(loaded) > len(pages)
    assert [url for url in loaded if ELSEWHERE.match(url)] == []


@pytest.fixture(scope="module")
def public():
    """Returns all exports of the package and its public modules, from their source."""
    package = griffe.load("flaxckpt", search_paths=[ROOT])
    integrations = package["integrations"].modules.values()
    modules = [package, *(m for m in integrations if not m.name.startswith("_"))]
    return [found for module in modules for found in exported(module)]


def exported(module: griffe.Module | griffe.Alias) -> Iterator[griffe.Alias]:
    for name in module.exports:
        found = module[name]
        if found.is_module:
            yield from exported(found)
        else:
            yield found


def test_the_reference_has_every_public_name_and_no_other(public):
    """The build fails for a name that there is not."""
    texts = [f.read_text(encoding="utf-8") for f in ROOT.glob("docs/reference/*.md")]
    shown = set(re.findall(r"^::: (\S+)$", "\n".join(texts), re.M))
    explained = {name.canonical_path for name in public if name.path in shown}
    assert len(public) > len(flaxckpt.__all__)
    assert [n.path for n in public if n.canonical_path not in explained] == []
    assert shown <= {name.path for name in public}


@pytest.fixture(scope="module")
def methods(public):
    """Returns the paths of all methods and properties that have a docstring."""
    return [
        f"{name.path}.{method}"
        for name in public
        if name.is_class
        for method, found in name.all_members.items()
        if method[0] != "_" and found.has_docstring
        if found.is_function or "property" in found.labels
    ]


@pytest.mark.slow
def test_reference_lists_or_excludes_every_method(pages, methods):
    """Also methods of base classes; the docstring of a class describes its fields.

    What implements a protocol, and has no docstring, is told of there. Methods that
    only flaxckpt or a framework calls are left out, by a filter under the class.
    """
    ids = set().union(*(page.ids for page in pages.values()))
    left_out = re.compile("|".join(filters()))
    assert "flaxckpt.Checkpointer.best_step" in methods
    shown = [m for m in methods if m.rpartition(".")[0] in ids]
    assert [m for m in shown if m not in ids and not left_out.fullmatch(m)] == []
    assert [m for m in ids if left_out.fullmatch(m)] == []


def test_reference_excludes_only_existing_methods(methods):
    unused = [
        name
        for name in filters()
        if not any(re.fullmatch(name, method) for method in methods)
    ]
    assert unused == []


def filters():
    """Yields a pattern on the path for each name in the filters of the reference."""
    for file in ROOT.glob("docs/reference/*.md"):
        text = file.read_text(encoding="utf-8")
        for path, names in re.findall(
            r'^::: (\S+)\n    options:\n      filters: .*"!\^\((.+)\)\$"', text, re.M
        ):
            for name in names.replace("\\\\", "\\").split("|"):
                yield rf"{re.escape(path)}\.{name}"


@pytest.mark.slow
def test_reference_shows_no_private_names(site):
    private = re.compile(r"(?<![\w.\"'])_[a-z]\w*\.|\w\._\w|&lt;factory|field\(")
    for file in (site / "reference").glob("*.html"):
        article = re.search(r"<article.*</article>", file.read_text("utf-8"), re.S)
        text = re.sub("<[^>]+>", "", article[0])
        assert private.findall(text) == [], file.name


def test_every_public_name_has_a_docstring(public):
    assert [name.path for name in public if not name.has_docstring] == []
