"""The page of a real server, as people use it: a queue, its causes, keys, a core that is killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.browser import Browser, Tab, browser_path, started_browser
from support.processes import tree_of
from support.served import Served, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser_path() is None, reason="no Chromium is installed"),
]
SLOW = ("--scheduling-policy", "support.slow_steps.SlowSteps")
OPTIONS = ("--max-model-len", "2048", "--num-threads", "1", *SLOW)
TESTS = str(Path(__file__).parents[1])  # where the policy is found
ONE_SEAT = (*OPTIONS, "--max-num-seqs", "1")
LONG = {"model": "box", "prompt": "a", "max_tokens": 600, "ignore_eos": True}
# The model in the box ends by itself after a few words; the page has no field for this.
GO_ON = """
  const fetched = window.fetch;
  window.fetch = (path, options) => {
    if (!options?.body) return fetched(path, options);
    const body = JSON.stringify({ ...JSON.parse(options.body), ignore_eos: true });
    return fetched(path, { ...options, body });
  };
"""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with started_browser(tmp_path) as started:
        yield started


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    with browser.tab() as opened:
        opened.call("Page.addScriptToEvaluateOnNewDocument", source=GO_ON)
        yield opened


def say(tab: Tab, text: str, *, tokens: int) -> None:
    tab.until("document.querySelector('#set-max_tokens')")
    tab.run("document.querySelector('#set-max_tokens').value = ''")
    tab.type("#set-max_tokens", str(tokens))
    tab.type("#prompt", text)
    tab.press("Enter")


def give_key(tab: Tab, key: str) -> None:
    tab.until("document.querySelector('#key-dialog').open")
    tab.run("document.querySelector('#key').value = ''")
    tab.type("#key", key)
    tab.press("Enter")


def test_a_chat_streams_and_stops_and_a_queue_moves(browser: Browser, tab: Tab) -> None:
    with (
        served(*ONE_SEAT, PYTHONPATH=TESTS) as server,
        browser.tab() as now,
        ThreadPoolExecutor() as threads,
    ):
        tab.go(server.url)
        now.go(f"{server.url}/#now")
        say(tab, "Count.", tokens=1900)
        tab.until("document.querySelector('.prose').textContent.length > 100")
        first = len(tab.text(".prose"))
        tab.until(f"document.querySelector('.prose').textContent.length > {first + 100}")

        others = [threads.submit(server.ask, "/v1/completions", LONG) for _ in range(2)]
        tab.click("#new-chat")
        say(tab, "Wait.", tokens=8)
        tab.until("/Waiting.*no free seat/.test(document.querySelector('.answer').innerText)")
        rows = "[...document.querySelectorAll('.now tbody tr')].map((r) => r.innerText).join('\\n')"
        now.until(f"/running/.test({rows}) && /waiting[^]*no free seat/.test({rows})")
        now.until("document.querySelector('path.s0') && document.querySelector('path.c0')")

        tab.run("document.querySelectorAll('#conversations button')[1].click()")  # the first
        tab.press("Escape")
        tab.until("document.querySelector('.trouble')?.textContent === 'Stopped.'")
        now.until(f"!/waiting/.test({rows})")
        tab.run("document.querySelectorAll('#conversations button')[0].click()")
        tab.until("document.querySelector('.why')")
        assert [each.result().status for each in others] == [200] * 2
        assert "no free seat" in tab.text(".why summary")
        foot = tab.text(".answer .foot")
        assert "tokens/s" in foot and "first token" in foot and "8 tokens" in foot
        for each in (tab, now):
            assert not each.problems
            assert not [url for url in each.urls if not url.startswith((server.url, "data:"))]


def test_keys_and_what_they_see(browser: Browser, tab: Tab) -> None:
    keys = ("--api-key", "one-key", "--api-key", "two-key", "--admin-api-key", "admin-key")
    with served(*ONE_SEAT, *keys, PYTHONPATH=TESTS) as server, ThreadPoolExecutor() as threads:
        other = threads.submit(
            server.ask, "/v1/completions", {**LONG, "max_tokens": 900},
            Authorization="Bearer one-key",
            X_Request_Id="secret-of-one",
        )  # fmt: skip
        tab.go(server.url)
        give_key(tab, "wrong")
        tab.until("/does not accept/.test(document.querySelector('#key-problem').textContent)")
        give_key(tab, "two-key")
        tab.until("document.querySelector('#served').textContent === 'box'")
        tab.click("#tab-now")
        tab.until("/requests of your key/.test(document.querySelector('.note')?.textContent)")
        seen = tab.run("fetch('/page/now?after=0', {headers: {authorization: 'Bearer two-key'}})"
                       ".then((answer) => answer.text())")  # fmt: skip
        assert "secret-of-one" not in seen
        tab.until("/No request is running/.test(document.querySelector('.now').innerText)")
        assert "secret-of-one" not in tab.run("document.documentElement.innerHTML")

        with browser.tab() as admin:
            admin.go(f"{server.url}/#now")
            give_key(admin, "admin-key")
            admin.until("/secret-of-one/.test(document.querySelector('.now').innerText)")
        with browser.tab() as mine:
            mine.go(f"{server.url}/#now")
            give_key(mine, "one-key")
            mine.until("/secret-of-one/.test(document.querySelector('.now').innerText)")
            assert mine.run("sessionStorage.length") == 1
            assert "one-key" not in mine.run("JSON.stringify(localStorage)")
        assert other.result().status == 200


def test_a_killed_core_and_a_lost_server_are_sentences(tab: Tab) -> None:
    options = (*OPTIONS, "--multiprocess", "--on-core-death", "restart")
    with served(*options, PYTHONPATH=TESTS) as server:
        tab.go(server.url)
        say(tab, "Count.", tokens=1900)
        tab.until("document.querySelector('.prose').textContent.length > 50")
        for pid in cores_of(server):
            os.kill(pid, signal.SIGKILL)
        tab.until("document.querySelector('.trouble.bad')?.checkVisibility()")
        assert "The core that computed this answer has died." in tab.text(".trouble")
        assert len(tab.text(".prose")) > 50

        def is_served() -> bool:
            tab.click("#new-chat")
            say(tab, "x", tokens=5)
            tab.until("document.querySelector('.answer .actions')")
            return not tab.run("document.querySelector('.trouble.bad')?.checkVisibility()")

        waiting = threading.Event()
        assert any(is_served() or waiting.wait(1) for _ in range(30)), tab.text(".trouble")

        server.process.kill()
        server.process.wait()
        tab.click("#tab-now")
        tab.until("/cannot be reached/.test(document.querySelector('#banner').innerText)")
    restarted = Served.start(server.port, *OPTIONS, PYTHONPATH=TESTS)
    try:
        tab.until("document.querySelector('#banner').hidden", 60)
    finally:
        restarted.process.kill()
        restarted.process.wait()


def cores_of(server: Served) -> list[int]:
    tree = tree_of(server.process.pid)[1:]
    return [pid for pid in tree if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
