"""The files of the page keep to its content policy, refer only to each other, and are complete."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from engine.server.page.assets import STATIC, PageAssets

OWN = sorted(path for path in STATIC.iterdir() if path.is_file())
SCRIPTS = [path for path in OWN if path.suffix == ".js"]
# What the content policy refuses, and what would make markup of a text.
FORBIDDEN = (
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "eval(",
    "new Function",
    "setAttribute('style'",
    'setAttribute("style"',
)


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed((STATIC / "index.html").read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_has_no_inline_scripts_and_styles() -> None:
    for tag, attributes in Page().tags:
        assert tag != "style"
        assert tag != "script" or str(attributes["src"]).startswith("/page/")
        wrong = [name for name in attributes if name == "style" or name.startswith("on")]
        assert not wrong, (tag, wrong)


def test_all_that_the_page_refers_to_is_served() -> None:
    paths = PageAssets().paths
    named = [at.get("src") or at.get("href") for _, at in Page().tags]
    assert {name for name in named if name and name.startswith("/page/")} <= paths
    for script in [*SCRIPTS, *(STATIC / "vendor").glob("*.js")]:
        for name in re.findall(
            r"""^(?:import|export)\b[^'"]*from ["'](.+?)["']""", script.read_text(), re.M
        ):
            assert (script.parent / name).resolve().is_relative_to(STATIC)
            assert (script.parent / name).is_file(), (script, name)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_no_script_makes_markup_of_a_text(script: object) -> None:
    text = (STATIC / str(script)).read_text()
    assert not [word for word in FORBIDDEN if word in text]
    own = [line for line in text.splitlines() if re.search(r"https?://[a-z]", line)]
    assert all("w3.org" in line for line in own), own


def test_ids_that_scripts_use_are_in_the_page() -> None:
    ids = [attributes["id"] for _, attributes in Page().tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for script in SCRIPTS:
        used = re.findall(r'byId\("([\w-]+)"\)', script.read_text())
        assert set(used) <= set(ids), script.name


def test_every_control_has_a_label() -> None:
    tags = Page().tags
    labelled = {attributes.get("for") for tag, attributes in tags if tag == "label"}
    fields = [at["id"] for tag, at in tags if tag in ("input", "textarea", "select")]
    assert set(fields) <= labelled


def test_other_peoples_code_has_its_licence() -> None:
    for script in (STATIC / "vendor").glob("*.js"):
        assert list(script.parent.glob(f"LICENSE-{script.stem}*")), script.name
