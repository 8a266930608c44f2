"""The pages of the documentation name files that exist, and every page is reachable from the index."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from guards.source_files import tracked_files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TOP = (
    "client/",
    "master/",
    "daemon/",
    "protos/",
    "tests/",
    "benchmarks/",
    "experiments/",
    "examples/",
    "tools/",
    "docs/",
)
# Design notes are history: they name the modules of their time.
PAGES = [*ROOT.glob("*.md"), *(page for page in DOCS.rglob("*.md") if "design" not in page.parts)]
PAGES = sorted(page for page in PAGES if page.name != "CHANGELOG.md")


# Scripts of the reader's own, in examples of commands.
EXAMPLES = {"train.py", "far_apart.py"}


def named_modules(text: str) -> Iterator[str]:
    """Yield what a page names in backquotes as a module: `moves.py`, `core/moves.py`."""
    for quoted in re.findall(r"`([\w/-]+\.py)`", text):
        if quoted not in EXAMPLES:
            yield quoted


def named_paths(text: str) -> Iterator[str]:
    """Yield the repository paths in backquotes."""
    for quoted in re.findall(r"`([\w./-]+)`", text):
        if quoted.startswith(TOP):
            yield quoted


def links(page: Path) -> Iterator[str]:
    """Yield the targets of a page's relative links, without anchors."""
    for target in re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", page.read_text()):
        if ":" not in target:
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    assert [name for name in named_paths(page.read_text()) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    modules = [f"/{name}" for name in tracked_files(ROOT)]
    missing = [
        name for name in named_modules(page.read_text()) if not any(module.endswith(f"/{name}") for module in modules)
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    assert [target for target in links(page) if not (page.parent / target).exists()] == []


def words_of_files() -> dict[str, frozenset[str]]:
    """Return the words of each source file by its path."""
    names = tracked_files(ROOT, suffixes=(".py", ".proto", ".txt", ".toml", "Makefile"))
    return {name: frozenset(re.findall(r"\w+", (ROOT / name).read_text())) for name in names}


WHERE = (DOCS / "explanation" / "architecture.md").read_text().partition("## Where to change")[2]


def test_every_name_in_the_entries_where_to_change_occurs_in_the_code() -> None:
    names = {name for name in re.findall(r"`([A-Za-z_][\w.]*)`", WHERE) if not re.search(r"\.(md|py|txt|proto)$", name)}
    assert len(names) > 100, "the page has another form"
    assert {part for name in names for part in name.split(".")} - frozenset().union(*words_of_files().values()) == set()


def test_every_name_in_the_entries_where_to_change_is_in_the_file_that_they_give() -> None:
    placed = re.findall(r"`([A-Za-z_][\w.]*)`\s+(?:in\s+|\()`([\w/-]+\.\w+)`", WHERE)
    assert len(placed) > 30, "the page has another form"
    files = words_of_files()
    for name, file in placed:
        found = [words for known, words in files.items() if f"/{known}".endswith(f"/{file}")]
        assert any(words.issuperset(name.split(".")) for words in found), f"{name} is not in {file}"


def test_the_index_leads_to_every_page() -> None:
    index = DOCS / "index.md"
    linked = {os.path.normpath(DOCS / target) for target in links(index)}
    pages = {str(page) for page in PAGES if page.is_relative_to(DOCS)} - {str(index)}
    assert pages - linked == set()


def test_the_readme_fits_on_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90
