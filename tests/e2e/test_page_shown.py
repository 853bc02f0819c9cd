"""What the page shows in a browser of made-up data: long answers, trouble, tools, contrast."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import Tab, browser_path, started_browser
from support.page_server import Script, model_data, now_data, page_server, row_data

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser_path() is None, reason="no Chromium is installed"),
]
AXE = "axe-core@4.14.1"
BLOCKS = """\
## Part {0}

Light is **absorbed** by [chlorophyll](https://example.org/{0}), which `passes` it on; then
water is split.

* the first item of part {0}
* the second item

```python
def part_{0}(a, b):
    return a + b
```

| a | b |
|---|---|
| {0} | two |

"""
SHAPES = {
    "blocks": "".join(BLOCKS.format(i) for i in range(300)),
    "one paragraph": "The light *reactions* happen in the thylakoid. " * 900,
    "one list": "".join(f"* item {i} of a long list\n" for i in range(2000)),
    "one block of code": "```\n" + "x = sorted(a + b)\n" * 2200,
    "no spaces": "photosynthesis" * 2800,
}
TOKENS = "document.querySelector('.tiles div:nth-child(3) dd')?.textContent"
LOOKS = (
    "performance.getEntriesByType('resource').filter((e) => e.name.includes('/page/now')).length"
)
LONGEST_TASK = 0.5  # seconds that the page may not respond; the machine may be busy
WATCH = """
  window.longest = 0;
  new PerformanceObserver((list) => {
    for (const each of list.getEntries()) window.longest = Math.max(window.longest, each.duration);
  }).observe({ type: 'longtask' });
"""


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    place = tmp_path_factory.mktemp("axe")
    done = subprocess.run(["npm", "pack", AXE], cwd=place, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot fetch {AXE}")
    with tarfile.open(next(place.glob("*.tgz"))) as archive:
        archive.extractall(place, filter="data")
    return (place / "package" / "axe.min.js").read_text()


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    with page_server(script) as address:
        yield address


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    with started_browser(tmp_path) as browser, browser.tab() as opened:
        yield opened
        assert not opened.problems


def say(tab: Tab, text: str) -> None:
    tab.type("#prompt", text)
    tab.press("Enter")


def parts_of(text: str, num: int) -> list[dict[str, Any]]:
    size = -(-len(text) // num)
    return [{"content": text[i : i + size]} for i in range(0, len(text), size)]


@pytest.mark.parametrize("shape", SHAPES)
def test_an_answer_of_10000_tokens_stays_smooth(
    tab: Tab, url: str, script: Script, shape: str
) -> None:
    text = SHAPES[shape]
    script.deltas, script.pause = parts_of(text, 10_000), 0.0003
    tab.go(url)
    tab.run(WATCH)
    say(tab, "Write much.")
    tab.until("document.querySelector('.answer .actions')", 60)
    longest = tab.run("window.longest") / 1000
    print(f"{shape}: {len(text)} characters, longest task {longest:.3f} s")
    assert longest < LONGEST_TASK
    rendered = f"import('/page/markdown.js').then((m) => m.rendered({json.dumps(text)}))"
    whole = f"{rendered}.then((fragment) => fragment.textContent.trim())"
    assert tab.run("document.querySelector('.prose').textContent.trim()") == tab.run(whole)
    distance = "((m) => m.scrollHeight - m.scrollTop - m.clientHeight)"
    tab.until(f"{distance}(document.querySelector('#messages')) < 100")


def test_stop_edit_and_retry(tab: Tab, url: str, script: Script) -> None:
    script.deltas, script.pause = parts_of("word " * 1000, 1000), 0.01
    tab.go(url)
    say(tab, "First")
    tab.until("document.querySelector('.prose').textContent.length > 60")
    tab.press("Escape")
    tab.until("document.querySelector('.trouble')?.textContent === 'Stopped.'")
    kept = len(tab.text(".prose"))
    assert 50 <= kept < 4000

    script.deltas, script.pause = [{"content": "Second answer."}], 0.0
    tab.run("[...document.querySelectorAll('.answer button')].at(-1).click()")  # retry
    tab.until("document.querySelector('.prose').textContent.trim() === 'Second answer.'")
    tab.click(".user .actions button")
    tab.run("document.querySelector('.edit textarea').value = ''")
    tab.type(".edit textarea", "Edited")
    tab.press("Enter")
    tab.until("document.querySelector('.spoken')?.textContent === 'Edited'")
    tab.until("document.querySelector('.answer .actions')")
    sent = [body["messages"] for body in script.bodies]
    first, edited = ([{"role": "user", "content": text}] for text in ("First", "Edited"))
    assert sent == [first, first, edited]


def test_settings_tools_and_schema_are_sent(tab: Tab, url: str, script: Script) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "get_weather", "arguments": '{"city":'}}
    rest = {"index": 0, "function": {"arguments": '"Oslo"}'}}
    script.deltas = [{"tool_calls": [call]}, {"tool_calls": [rest]}]
    tab.go(url)
    tab.until("document.querySelector('#set-temperature')?.value === '0.6'")
    tab.type("#set-system", "Be brief.")
    tab.run("document.querySelector('#set-temperature').select()")
    tab.call("Input.insertText", text="0.2")
    tab.type("#set-seed", "7")
    tab.run("document.querySelectorAll('#fields details').forEach((d) => { d.open = true; })")
    tab.run("document.querySelectorAll('#fields details button').forEach((b) => b.click())")
    say(tab, "Weather?")
    tab.until("document.querySelector('.call form')")
    assert '"city": "Oslo"' in tab.text(".call pre")
    script.deltas = [{"content": "It is sunny."}]
    tab.type(".call textarea", "21 degrees")
    tab.click(".call form button")
    tab.until("document.querySelectorAll('.answer')[1]?.querySelector('.actions')")

    first, second = script.bodies
    assert (first["temperature"], first["seed"]) == (0.2, 7)
    assert "top_p" not in first  # the maker's, which the server fills in
    assert first["tools"][0]["function"]["name"] == "get_weather"
    assert first["response_format"]["json_schema"]["schema"]["required"] == ["name", "age"]
    assert first["messages"][0] == {"role": "system", "content": "Be brief."}
    given = {"role": "tool", "tool_call_id": "c1", "content": "21 degrees"}
    assert second["messages"][-1] == given
    assert second["messages"][-2]["tool_calls"][0]["function"]["arguments"] == '{"city":"Oslo"}'


def test_conversations_are_found_again(tab: Tab, url: str, script: Script) -> None:
    script.deltas = [{"reasoning_content": "Hm."}, {"content": "Kept."}]
    tab.go(url)
    say(tab, "About plants")
    tab.until("document.querySelector('.answer .actions')")
    tab.click("#new-chat")
    say(tab, "About stars")
    tab.until("document.querySelector('.answer .actions')")
    tab.reload()
    tab.until("document.querySelectorAll('#conversations li').length === 2")
    assert tab.text("#title") == "About stars"
    tab.run("document.querySelectorAll('#conversations button')[1].click()")
    assert tab.text("#title") == "About plants"
    assert tab.text(".prose").strip() == "Kept."
    assert tab.run("document.querySelector('.thinking').open") is False
    tab.click("#delete")
    tab.until("document.querySelectorAll('#conversations li').length === 1")
    assert tab.dialogs == ["Delete “About plants”? It cannot be brought back."]


def test_trouble_is_a_sentence(tab: Tab, url: str, script: Script) -> None:
    tab.go(url)
    refusals = {
        "Too many requests are waiting": (503, {"message": "x", "code": "queue_full"}),
        "This key has too many open requests": (429, {"message": "x", "code": "too_many_requests"}),
        "The core that computed this answer has died": (503, {"message": "x", "code": "core_died"}),
        "min_p is 3": (400, {"message": "min_p is 3", "code": "invalid_value"}),
    }
    for text, refusal in refusals.items():
        script.refusal = refusal
        tab.click("#new-chat")
        say(tab, "x")
        tab.until("document.querySelector('.trouble.bad')?.checkVisibility()")
        assert text in tab.text(".trouble")
    assert "Try again in 3 s." not in tab.text(".trouble")


def test_a_core_that_died_is_named(tab: Tab, url: str, script: Script) -> None:
    script.now = now_data()
    script.now["cores"].append({**script.now["cores"][0], "core": 1, "alive": False})
    tab.go(f"{url}/#now")
    tab.until("document.querySelector('.note')?.textContent.startsWith('Core 1 has died')")
    assert "has died" in tab.text(".state-bad")


def test_steps_are_counted_once_when_the_server_was_started_again(
    tab: Tab, url: str, script: Script
) -> None:
    step = {"core": 0, "num_steps": 1, "seconds": 0.1, "others": 0, "causes": {}}
    for first, tokens in ((5000, 20), (1, 30)):
        script.now = now_data()
        at = {"at": script.now["time"], "tokens": {"a": tokens}}
        script.now["steps"] = [{**step, **at, "step": first + i} for i in range(2)]
        if first > 1:
            tab.go(f"{url}/#now")
            tab.until(f"{TOKENS} === '8'")
    tab.until(f"{TOKENS} === '20'")  # of both
    looks = tab.run(LOOKS)
    tab.until(f"{LOOKS} > {looks} + 1")
    assert tab.run(TOKENS) == "20"


def test_an_own_view_shows_own_requests_only(tab: Tab, url: str, script: Script) -> None:
    script.now = now_data(scope="own", cores=[], steps=[], waits={})
    tab.go(f"{url}/#now")
    tab.until("document.querySelector('.note')?.textContent.startsWith('You see the requests of')")
    assert tab.run("[...document.querySelectorAll('.card:not([hidden]) h3')].length") == 1


def test_models_that_pool_compare_two_texts(tab: Tab, url: str, script: Script) -> None:
    script.model = model_data(generates=False, pools=True)
    tab.go(url)
    tab.until("document.querySelector('#pooled h2')?.checkVisibility()")
    tab.click("#pooled button")
    tab.until("document.querySelector('.score').textContent.startsWith('Score 0.7500')")
    assert not tab.run("document.querySelector('#chat').checkVisibility()")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_nothing_serious(
    tab: Tab, url: str, script: Script, axe: str, scheme: str, width: int
) -> None:
    waiting = row_data("b", state="waiting", cause="seats", waited={"seats": 2.0})
    step = {"step": 1, "core": 0, "at": now_data()["time"], "seconds": 0.1, "others": 3}
    steps = [{**step, "tokens": {"a": 5}, "causes": {"seats": 2}}]
    script.now = now_data(requests=[row_data("a"), waiting], num_requests=2, steps=steps)
    script.record = {"waited": {"seats": 1.5}, "core": 0}
    thinking = {"reasoning_content": "Hm."}
    script.deltas = [thinking, {"content": BLOCKS.format(1)}]
    tab.colours(scheme)
    tab.resize(width, 800)
    tab.go(url)
    tab.run(axe + "; undefined")
    found = [serious(tab, "an empty conversation")]
    say(tab, "Hello")
    tab.until("document.querySelector('.why')")
    tab.run("document.querySelectorAll('.answer details').forEach((d) => { d.open = true; })")
    found.append(serious(tab, "an answer"))
    tab.click("#show-settings" if width == 360 else "#rename")
    tab.run("document.querySelectorAll('#fields details').forEach((d) => { d.open = true; })")
    found.append(serious(tab, "settings"))
    tab.click("#tab-now")
    tab.until("document.querySelector('path.s0')")
    found.append(serious(tab, "now"))
    tab.run("document.querySelector('#key-dialog').showModal()")
    found.append(serious(tab, "key"))
    assert not [each for some in found for each in some]
    assert tab.run("document.documentElement.scrollWidth") <= width


def serious(tab: Tab, where: str) -> list[str]:
    """Findings of axe-core that are serious or critical; others are printed."""
    answer = tab.run("axe.run(document).then((found) => found.violations)")
    lines: dict[str, list[str]] = {"worse": [], "other": []}
    for each in answer:
        places = [node["html"][:150] for node in each["nodes"][:3]]
        kind = "worse" if each["impact"] in ("serious", "critical") else "other"
        lines[kind].append(f"{where}: {each['impact']}: {each['id']}: {places}")
    print("\n".join(lines["other"]))
    return lines["worse"]
