"""Pictures on the page: chosen, pasted, dropped, sent, kept; hostile ones change nothing."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from e2e.picture_requests import COMMON, NAME
from e2e.seeing_models import make_seeing_model
from e2e.test_page_hostile import TRAP, check
from e2e.test_page_shown import axe, serious, url
from support.browser import Tab, browser_path, started_browser
from support.hostile_markup import HOSTILE
from support.hostile_pictures import LAUGHS, SVG, png, saved
from support.page_server import Script, model_data
from support.patience import WAIT_SECONDS
from support.served import served

__all__ = ["axe", "url"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser_path() is None, reason="no Chromium is installed"),
]
LIMITS: dict[str, Any] = {
    "formats": ["BMP", "GIF", "JPEG", "PNG", "WEBP"],
    "most_bytes": 2 << 20,
    "most_pixels": 1 << 20,
    "most_pictures": None,
    "most_chars": 8 << 20,
}
THUMBS = "document.querySelectorAll('#composer .thumbs li').length"
SHOWN = "[...document.querySelectorAll('.user img')].map((each) => each.getAttribute('src'))"
SEES = "document.querySelector('[aria-label=\"Add pictures\"]')?.checkVisibility()"
PROBLEM = "#composer .problem"
FILES = "document.querySelector('#composer input[type=file]')"
KEPT = """new Promise((resolve) => {
  const request = indexedDB.open('metronome');
  request.onsuccess = () => {
    const keys = request.result.transaction('pictures').objectStore('pictures').getAllKeys();
    keys.onsuccess = () => { request.result.close(); resolve(keys.result.length); };
  };
})"""
RED, BLUE = saved("PNG", (40, 30)), saved("JPEG", (30, 40))


@pytest.fixture
def script() -> Script:
    return Script(model=model_data(pictures=LIMITS))


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    with started_browser(tmp_path / "profile") as browser, browser.tab() as opened:
        opened.call("Page.addScriptToEvaluateOnNewDocument", source=TRAP)
        yield opened
        assert not opened.problems


def data_url(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def choose(tab: Tab, files: Sequence[Path], place: str = FILES) -> None:
    """Choose files, as in the dialog that the button opens."""
    tab.until(place)
    found = tab.call("Runtime.evaluate", expression=place)["result"]["objectId"]
    tab.call("DOM.setFileInputFiles", files=[str(each) for each in files], objectId=found)


def transfer(files: dict[str, bytes], kind: str = "image/png", text: str = "") -> str:
    """The script that makes what is pasted or dropped: files by their names."""
    contents = {name: base64.b64encode(content).decode() for name, content in files.items()}
    return f"""
      const data = new DataTransfer();
      for (const [name, content] of Object.entries({json.dumps(contents)})) {{
        const bytes = Uint8Array.from(atob(content), (each) => each.charCodeAt(0));
        data.items.add(new File([bytes], name, {{ type: {json.dumps(kind)} }}));
      }}
      if ({json.dumps(text)}) data.setData('text/plain', {json.dumps(text)});
    """


def paste(tab: Tab, files: dict[str, bytes], text: str = "") -> None:
    tab.run(f"""(() => {{ {transfer(files, text=text)}
      const about = {{ clipboardData: data, bubbles: true, cancelable: true }};
      document.querySelector('#prompt').dispatchEvent(new ClipboardEvent('paste', about));
    }})()""")


def drop(tab: Tab, files: dict[str, bytes], kind: str = "image/png", at: str = "#talk") -> None:
    tab.until(SEES)
    tab.run(f"""(() => {{ {transfer(files, kind)}
      for (const name of ['dragover', 'drop']) {{
        const about = {{ dataTransfer: data, bubbles: true, cancelable: true }};
        document.querySelector({at!r}).dispatchEvent(new DragEvent(name, about));
      }}
    }})()""")


def until_kept(tab: Tab, number: int) -> None:
    """Wait until the browser's database has this number of pictures."""
    end = time.monotonic() + WAIT_SECONDS
    while tab.run(KEPT) != number:
        assert time.monotonic() < end
        time.sleep(0.05)


def parts_of(body: Any, place: int = -1) -> Any:
    return body["messages"][place]["content"]


def answered(tab: Tab, num: int) -> None:
    tab.until(f"document.querySelectorAll('.answer .actions').length === {num}")


def begin(tab: Tab, url: str) -> None:
    """Send a message with a picture, and wait until the answer has come and the picture is kept."""
    tab.go(url)
    drop(tab, {"red.png": RED})
    tab.until(f"{THUMBS} === 1")
    tab.type("#prompt", "First")
    tab.press("Enter")
    answered(tab, 1)
    until_kept(tab, 1)


def picture_part(content: bytes, kind: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(content, kind)}}


def test_pictures_are_chosen_pasted_and_dropped(
    tab: Tab, url: str, script: Script, tmp_path: Path
) -> None:
    file = tmp_path / "red.png"
    file.write_bytes(RED)
    tab.go(url)
    tab.until(SEES)
    choose(tab, [file])
    tab.until(f"{THUMBS} === 1")
    paste(tab, {"blue.jpg": BLUE})
    tab.until(f"{THUMBS} === 2")
    paste(tab, {"of-a-text.png": RED}, text="a text")  # programs copy both, and the text is pasted
    drop(tab, {"more.gif": saved("GIF"), "and.webp": saved("WEBP"), "old.bmp": saved("BMP")})
    tab.until(f"{THUMBS} === 5")
    assert tab.run("document.querySelector('#announcer').textContent") == "old.bmp was added."
    names = tab.run("[...document.querySelectorAll('.thumbs .name')].map((e) => e.textContent)")
    assert names == ["red.png", "blue.jpg", "more.gif", "and.webp", "old.bmp"]
    tab.click("[aria-label='Remove more.gif']")
    tab.until(f"{THUMBS} === 4")
    assert tab.run("document.activeElement.getAttribute('aria-label')") == "Remove and.webp"
    tab.type("#prompt", "What are these?")
    tab.press("Enter")
    answered(tab, 1)
    wanted = [
        *(picture_part(RED, "png"), picture_part(BLUE, "jpeg")),
        *(picture_part(saved("WEBP"), "webp"), picture_part(saved("BMP"), "bmp")),
        {"type": "text", "text": "What are these?"},
    ]
    assert parts_of(script.bodies[0]) == wanted
    tab.until(f"{THUMBS} === 0")
    shown = [each["image_url"]["url"] for each in wanted[:-1]]
    assert tab.run(SHOWN) == shown
    widths = tab.run("[...document.querySelectorAll('.user img')].map((e) => e.naturalWidth)")
    assert widths == [40, 30, 50, 50]
    tab.type("#prompt", "And now?")
    tab.press("Enter")
    answered(tab, 2)
    assert parts_of(script.bodies[1], 0) == wanted
    assert parts_of(script.bodies[1]) == "And now?"
    check(tab, url)


def test_a_file_is_dropped_with_the_pointer(
    tab: Tab, url: str, script: Script, tmp_path: Path
) -> None:
    """It is removed with the keyboard alone."""
    file = tmp_path / "red.png"
    file.write_bytes(RED)
    tab.go(url)
    tab.until(SEES)
    place = tab.run("(({ x, y }) => ({ x: x + 50, y: y + 50 }))"
                    "(document.querySelector('#messages').getBoundingClientRect())")  # fmt: skip
    data = {"items": [], "files": [str(file)], "dragOperationsMask": 1}
    tab.call("Input.dispatchDragEvent", type="dragEnter", data=data, **place)
    tab.call("Input.dispatchDragEvent", type="dragOver", data=data, **place)
    tab.until("document.querySelector('#talk.dropping')")
    tab.call("Input.dispatchDragEvent", type="drop", data=data, **place)
    tab.until(f"{THUMBS} === 1")
    assert not tab.run("document.querySelector('#talk.dropping')")
    tab.run("document.querySelector('#prompt').focus()")
    for _ in range(3):
        tab.run("window.at = document.activeElement")
        tab.press("Tab", shift=True)
        tab.until("document.activeElement !== window.at")
        if tab.run("document.activeElement.getAttribute('aria-label')") == "Remove red.png":
            break
    tab.press("Enter")
    tab.until(f"{THUMBS} === 0")
    assert tab.run("document.activeElement.getAttribute('aria-label')") == "Add pictures"
    assert tab.run("document.querySelector('#announcer').textContent") == "red.png was removed."


def test_a_picture_alone_is_a_message(tab: Tab, url: str, script: Script) -> None:
    tab.go(url)
    drop(tab, {"photo.png": RED})
    tab.click("#send")  # also while it is still read
    answered(tab, 1)
    assert parts_of(script.bodies[0]) == [picture_part(RED, "png")]
    assert tab.text("#title") == "photo.png"


def test_edit_and_retry_with_pictures(tab: Tab, url: str, script: Script) -> None:
    tab.go(url)
    drop(tab, {"red.png": RED, "blue.jpg": BLUE})
    tab.until(f"{THUMBS} === 2")
    tab.type("#prompt", "First")
    tab.press("Enter")
    answered(tab, 1)
    tab.run("[...document.querySelectorAll('.answer button')].at(-1).click()")  # retry
    tab.until("document.querySelector('.answer .actions')")
    assert script.bodies[0]["messages"] == script.bodies[1]["messages"]
    tab.click(".user .actions button")
    tab.click(".edit [aria-label='Remove red.png']")
    drop(tab, {"new.gif": saved("GIF")}, at=".edit textarea")
    tab.until("document.querySelectorAll('.edit .thumbs li').length === 2")
    assert tab.run(THUMBS) == 0
    tab.press("Escape")  # from the field: nothing is changed
    tab.run("document.querySelector('.edit textarea')?.focus()")
    tab.press("Escape")
    assert len(tab.run(SHOWN)) == 2
    tab.click(".user .actions button")
    tab.click(".edit [aria-label='Remove red.png']")
    drop(tab, {"new.gif": saved("GIF")}, at=".edit textarea")
    tab.until("document.querySelectorAll('.edit .thumbs li').length === 2")
    tab.run("document.querySelector('.edit textarea').value = 'Edited'")
    tab.run("document.querySelector('.edit').requestSubmit()")
    tab.until("document.querySelector('.spoken')?.innerText.trim() === 'Edited'")
    answered(tab, 1)
    wanted = [
        picture_part(BLUE, "jpeg"), picture_part(saved("GIF"), "gif"),
        {"type": "text", "text": "Edited"},
    ]  # fmt: skip
    assert parts_of(script.bodies[-1]) == wanted


def test_pictures_are_found_again_and_deleted(tab: Tab, url: str, script: Script) -> None:
    begin(tab, url)
    assert "base64" not in tab.run("JSON.stringify(localStorage)")
    tab.reload()
    tab.until(f"{SHOWN}[0]")
    assert tab.run(SHOWN) == [data_url(RED, "png")]
    tab.type("#prompt", "And?")
    tab.press("Enter")
    answered(tab, 2)
    assert parts_of(script.bodies[1], 0)[0] == picture_part(RED, "png")
    tab.click("#delete")
    until_kept(tab, 0)


def test_a_picture_that_is_gone_is_named(tab: Tab, url: str, script: Script) -> None:
    """What the database has in its place is not shown."""
    begin(tab, url)
    for other in ("https://example.org/x.png", data_url(SVG, "svg+xml"), 5, None):
        tab.run(f"""new Promise((resolve) => {{
          const request = indexedDB.open('metronome');
          request.onsuccess = () => {{
            const change = request.result.transaction('pictures', 'readwrite');
            const pictures = change.objectStore('pictures');
            pictures.getAllKeys().onsuccess = (event) => {{
              pictures.put({json.dumps(other)}, event.target.result[0]);
            }};
            change.oncomplete = () => {{ request.result.close(); resolve(); }};
          }};
        }})""")
        tab.reload()
        tab.until("document.querySelector('.gone')")
        assert tab.text(".gone") == "red.png is no longer kept in this browser"
        tab.type("#prompt", "And?")
        tab.press("Enter")
        tab.until("document.querySelector('.trouble.bad')?.checkVisibility()")
        assert "“red.png” is no longer kept" in tab.text(".trouble.bad")
    assert len(script.bodies) == 1
    check(tab, url)


def test_files_that_the_server_would_refuse_are_not_sent(
    tab: Tab, url: str, script: Script
) -> None:
    tab.go(url)
    for name, content, reason in (
        ("drawing.svg", SVG, "the server takes BMP, GIF, JPEG, PNG, WEBP. Convert it."),
        ("laughs.png", LAUGHS, "Convert it."),
        ("page.png", b"<script>pwned()</script>", "Convert it."),
        ("photo.tiff", saved("TIFF"), "Convert it."),
        ("empty.png", b"", "Convert it."),
        ("half.png", RED[:40], "cannot be read"),
        ("large.png", RED + bytes(2 << 20), "has 2.0 MB, and the server takes 2.0 MB. Shrink it."),
        ("wide.png", png(2000, 1000, None), "has 2,000 × 1,000 pixels"),
    ):
        drop(tab, {name: content})
        tab.until(f"document.querySelector({PROBLEM!r}).textContent.startsWith({name!r})")
        assert reason in tab.text(PROBLEM)
    assert tab.run(THUMBS) == 0
    drop(tab, {"bad.svg": SVG, "red.png": RED, "worse.svg": SVG})
    tab.until(f"{THUMBS} === 1")
    tab.until(f"document.querySelector({PROBLEM!r}).textContent.includes('worse.svg')")
    assert "bad.svg" in tab.text(PROBLEM)
    drop(tab, {"late.svg": SVG})
    tab.run("document.querySelector('#composer').requestSubmit()")
    tab.until(f"document.querySelector({PROBLEM!r}).textContent.includes('late.svg')")
    assert not script.bodies  # people decide whether to send the others
    check(tab, url)


def test_limits_of_a_conversation(tab: Tab, url: str, script: Script) -> None:
    script.model = model_data(pictures={**LIMITS, "most_pictures": 2, "most_chars": 3 << 20})
    large = saved("PNG") + bytes(1536 << 10)
    tab.go(url)
    drop(tab, {"large.png": large, "red.png": RED})
    tab.until(f"{THUMBS} === 2")
    drop(tab, {"third.png": RED})
    tab.until(f"document.querySelector({PROBLEM!r}).textContent.includes('can have 2 pictures')")
    tab.click("[aria-label='Remove red.png']")
    drop(tab, {"other.png": large})
    tab.until(f"document.querySelector({PROBLEM!r}).textContent.includes('the pictures before it')")
    tab.press("Escape")
    tab.click("#send")
    answered(tab, 1)
    drop(tab, {"red.png": RED, "third.png": RED})
    tab.until(f"document.querySelector({PROBLEM!r}).textContent.startsWith('third.png was not')")
    assert tab.run(THUMBS) == 1


def test_a_model_of_text_takes_no_pictures(tab: Tab, url: str, script: Script) -> None:
    tab.go(url)
    drop(tab, {"red.png": RED})
    tab.until(f"{THUMBS} === 1")
    tab.click("#send")
    answered(tab, 1)
    until_kept(tab, 1)
    script.model = model_data(pictures=None)
    tab.reload()
    tab.until("document.querySelector('.user img')?.getAttribute('src')")
    assert not tab.run(SEES)
    paste(tab, {"red.png": RED})
    tab.type("#prompt", "And?")
    tab.press("Enter")
    tab.until("document.querySelector('.trouble.bad')?.checkVisibility()")
    assert "this model reads only text" in tab.text(".trouble.bad")
    assert tab.run(THUMBS) == 0 and len(script.bodies) == 1


def test_hostile_names_change_nothing(tab: Tab, url: str, script: Script) -> None:
    tab.go(url)
    names = [name.replace("/", ":") for name in HOSTILE[::5]]
    for i in range(0, len(names), 20):
        drop(tab, dict.fromkeys(names[i : i + 20], RED), kind=HOSTILE[0])
        tab.until(f"{THUMBS} === {len(set(names[i : i + 20]))}")
        drop(tab, {f"{name}.svg": SVG for name in names[i : i + 20]}, kind="image/svg+xml")
        tab.until(f"document.querySelector({PROBLEM!r}).textContent")
        tab.click("#send")
        tab.until(f"{THUMBS} === 0")
        tab.until("document.querySelector('#send').checkVisibility()")
    stored = {
        "id": "all", "title": "all", "changed": 10**14, "settings": {},
        "messages": [
            {"role": "user", "text": "x", "pictures": [{"id": text, "name": text, "chars": text}]}
            for text in HOSTILE
        ] + [{"role": "user", "text": "y", "pictures": [5, None, {"id": 7}, {"id": {}}, []]}],
    }  # fmt: skip
    check(tab, url)
    tab.run(f"localStorage.setItem('metronome.chat.all', {json.dumps(json.dumps(stored))})")
    tab.run("localStorage.setItem('metronome.last', 'all')")
    tab.reload()
    tab.until(f"document.querySelectorAll('.gone').length === {len(HOSTILE)}")
    check(tab, url)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_nothing_serious_about_pictures(
    tab: Tab, url: str, script: Script, axe: str, scheme: str, width: int
) -> None:
    tab.colours(scheme)
    tab.resize(width, 800)
    tab.go(url)
    tab.run(axe + "; undefined")
    drop(tab, {"a long name of a photo of a street in a town.png": RED, "b.jpg": BLUE})
    tab.until(f"{THUMBS} === 2")
    drop(tab, {"c.svg": SVG})
    tab.until(f"document.querySelector({PROBLEM!r}).textContent")
    found = [serious(tab, "pictures before they are sent")]
    tab.click("#send")
    answered(tab, 1)
    found.append(serious(tab, "pictures of a message"))
    tab.click(".user .actions button")
    found.append(serious(tab, "pictures that are edited"))
    assert not [each for some in found for each in some]
    assert tab.run("document.documentElement.scrollWidth") <= width


def test_a_model_that_sees_answers_about_a_picture(tab: Tab, tmp_path: Path) -> None:
    path = make_seeing_model(tmp_path / "seeing", "smolvlm")
    options = ("--model", str(path), "--served-model-name", NAME, *COMMON)
    start = partial(served, *options, "--limit-mm-per-prompt", '{"image": 2}')
    with start() as server:
        tab.go(server.url)
        drop(tab, {"red.png": RED, "blue.jpg": BLUE, "third.png": RED})
        tab.until(f"document.querySelector({PROBLEM!r}).textContent.includes('can have 2')")
        tab.type("#set-max_tokens", "8")
        tab.type("#prompt", "What is it?")
        tab.press("Enter")
        answered(tab, 1)
        assert not tab.run("document.querySelector('.trouble.bad')?.checkVisibility()")
        assert "tokens" in tab.text(".answer .foot")
        assert len(tab.run(SHOWN)) == 2
        check(tab, server.url)
