"""Links between documents, and what they name in the source, lead to what exists."""

from __future__ import annotations

import re

import pytest
from support.source_tree import ROOT, sources

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
LINK = re.compile(r"\]\(((?!https?:)[^()\s]+)\)")
SOURCE = re.compile(r"`(?:python |node )?((?!my_)[\w.-]+/[\w./-]+\.(?:py|mjs|toml|md))\b")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    titles = (re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(text))
    return {title.replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_source_files_exist(page):
    """Paths begin at the root of the repository or in ``engine``."""
    for path in SOURCE.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists() or (ROOT / "engine" / path).exists(), f"{page.name}: {path}"


def test_names_in_the_architecture_exist():
    """Classes, functions, constants and modules, outside of drawings."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    words = {word for module in sources() for word in re.findall(r"\w+", module.text)}
    words |= {part for module in sources() for part in module.path.with_suffix("").parts}
    named = re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)`", text)
    assert not (missing := [name for name in named if not words.issuperset(name.split("."))]), (
        missing
    )
