"""Hostile strings in every place of the page change nothing, and nothing leaves its origin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import Tab, browser_path, started_browser
from support.hostile_markup import HOSTILE
from support.page_server import Script, model_data, now_data, page_server, row_data

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser_path() is None, reason="no Chromium is installed"),
]
MOST_NAMES = 60
TRAP = "window.hits = 0; window.pwned = () => { window.hits += 1; };"
IN_PROSE = """
  [...document.querySelectorAll('.prose *')].flatMap((each) => [
    each.localName, ...each.getAttributeNames().map((name) => `${each.localName}@${name}`)])
"""
ELEMENTS = {
    "p",
    "br",
    "hr",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "ul",
    "ol",
    "li",
    "blockquote",
    "pre",
    "code",
    "em",
    "strong",
    "del",
    "a",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "span",
    "div",
    "button",
}
ATTRIBUTES = {
    *("a@href", "a@rel", "a@target", "a@referrerpolicy", "a@title"),
    *("div@class", "div@tabindex", "div@role", "div@aria-label"),
    *("pre@tabindex", "pre@role", "pre@aria-label", "button@type", "button@class"),
    *("ol@start", "th@align", "td@align"),
}


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def url(script: Script) -> Iterator[str]:
    with page_server(script) as address:
        yield address


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    with started_browser(tmp_path) as browser, browser.tab() as opened:
        opened.call("Page.addScriptToEvaluateOnNewDocument", source=TRAP)
        yield opened


def check(tab: Tab, url: str) -> None:
    """Nothing ran, nothing was refused by the content policy, nothing left the origin."""
    assert tab.run("window.hits") == 0
    assert not tab.problems
    assert not tab.dialogs
    assert {each for each in tab.urls if not each.startswith((url, "data:", "about:"))} == set()
    made = set(tab.run(IN_PROSE))
    assert {each for each in made if "@" not in each} <= ELEMENTS
    assert {each for each in made if "@" in each} <= ATTRIBUTES
    links = tab.run("[...document.querySelectorAll('.prose a')].map((a) => a.href)")
    assert all(link.startswith(("http://", "https://")) for link in links)
    relations = tab.run("[...document.querySelectorAll('.prose a')].map((a) => a.rel)")
    assert all("noopener noreferrer" in relation for relation in relations)
    assert tab.run("document.querySelectorAll('main, header, dialog').length") == 3
    assert tab.run("document.querySelectorAll('iframe, object, embed, base, style').length") == 0
    assert tab.run("({}).polluted ?? Object.keys(Object.prototype).length") == 0


def stored(name: str, messages: list[dict[str, Any]], title: str = "") -> str:
    """The script that stores a conversation."""
    about = {"id": name, "title": title, "changed": 1, "settings": {}, "messages": messages}
    return f"localStorage.setItem('metronome.chat.{name}', {json.dumps(json.dumps(about))})"


def test_there_are_200_of_them() -> None:
    assert len(set(HOSTILE)) == len(HOSTILE) >= 200


def test_in_stored_conversations_and_their_titles(tab: Tab, url: str, script: Script) -> None:
    tab.go(url)
    messages: list[dict[str, Any]] = []
    for i, text in enumerate(HOSTILE):
        call = {"id": f"call-{i}", "name": text, "arguments": text}
        trouble = {"text": text, "advice": text}
        stats = {"id": text, "waited": {text: 1.5}, "output": 3}
        messages += [
            {"role": "user", "text": text},
            {"role": "assistant", "text": text, "thinking": text, "calls": [call]}
            | {"end": text, "trouble": trouble, "stats": stats},
            {"role": "tool", "call": f"call-{i}", "name": text, "text": text},
        ]
    tab.run(stored("all", messages, "all"))
    for i, text in enumerate(HOSTILE):
        tab.run(stored(f"c{i}", [], text))
    tab.run("localStorage.setItem('metronome.last', 'all')")
    tab.reload()
    tab.until(f"document.querySelectorAll('.answer').length === {len(HOSTILE)}")
    spoken = tab.run("[...document.querySelectorAll('.spoken')].map((each) => each.textContent)")
    assert spoken == list(HOSTILE)
    titles = tab.run("[...document.querySelectorAll('#conversations li')].map((e) => e.innerText)")
    assert len(titles) == len(HOSTILE) + 1
    tab.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    check(tab, url)


def test_streamed_in_prompts_answers_thinking_and_calls(tab: Tab, url: str, script: Script) -> None:
    tab.go(url)
    for i in range(0, len(HOSTILE), 40):
        some = HOSTILE[i : i + 40]
        parts = [{"reasoning_content": text} for text in some]
        for text in some:  # in two parts, as tokens cut it
            parts += [{"content": text[:7]}, {"content": text[7:] + "\n\n"}]
        calls = [
            {"index": 0, "id": "x", "function": {"name": some[0], "arguments": some[1]}},
        ]
        script.deltas = [*parts, {"tool_calls": calls}]
        tab.click("#new-chat")
        tab.type("#prompt", " ".join(some[:10]))
        tab.click("#send")
        tab.until("document.querySelector('.actions button')?.textContent === 'Edit'")
        tab.until("document.querySelector('.answer .actions')")
        check(tab, url)


def test_as_the_name_of_the_model(tab: Tab, url: str, script: Script) -> None:
    script.model = model_data(models=list(HOSTILE), version=HOSTILE[0])
    tab.go(url)
    tab.until(f"document.querySelectorAll('#set-model option').length === {len(HOSTILE)}")
    script.model = model_data()
    check(tab, url)


def test_in_the_view_of_now(tab: Tab, url: str, script: Script) -> None:
    for i in range(0, len(HOSTILE), MOST_NAMES):
        some = HOSTILE[i : i + MOST_NAMES]
        rows = [row_data(text, cause=text, state="waiting", waited={text: 1}) for text in some]
        now = now_data(requests=rows, num_requests=len(rows), waits=dict.fromkeys(some, 2.0))
        core = now["cores"][0]
        core["kv"] = [{"group": text, "used": 1, "total": 2} for text in some]
        core["prefix"]["missed"] = dict.fromkeys(some, 5)
        step = {"step": i + 1, "core": 0, "at": now["time"] - 1, "seconds": 0.1, "others": 0}
        step |= {"tokens": dict.fromkeys(some, 1), "causes": dict.fromkeys(some, 1)}
        script.now = {**now, "steps": [step]}
        tab.go(f"{url}/?{i}#now")
        tab.until(f"document.querySelectorAll('.now tbody tr').length === {len(some) + 1}")
        for _ in range(3):
            tab.run("document.querySelector('.bars').focus()")
            tab.press("ArrowLeft")
        check(tab, url)


def test_in_errors(tab: Tab, url: str, script: Script) -> None:
    script.deltas = [{"content": "x"}]
    tab.go(url)
    for i, text in enumerate(HOSTILE[::8]):
        status = (400, 404, 429, 500, 503)[i % 5]
        script.refusal = status, {"message": text, "code": text, "param": text}
        tab.click("#new-chat")
        tab.type("#prompt", "x")
        tab.click("#send")
        tab.until("document.querySelector('.trouble.bad')?.checkVisibility()")
    script.refusal = None
    assert HOSTILE[0][:5] not in tab.run("document.querySelector('.trouble').innerHTML")
    check(tab, url)
