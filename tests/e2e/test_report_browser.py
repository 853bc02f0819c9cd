"""A browser opens a report and answers from it: skipped where none is installed."""

from __future__ import annotations

import shutil
import subprocess
from html import escape
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

from policylab.sim.report import write_report
from policylab.sim.report.states import because
from policylab.sim.run import Engine, run

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

pytestmark = pytest.mark.slow


@pytest.fixture
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser is installed; looked for {', '.join(BROWSERS)}")
    return found


def test_a_browser_tells_from_the_page_why_a_request_waited(browser: str, tmp_path: Path) -> None:
    workload = "log-uniform(num_requests=150,num_users=3)"
    runs = [
        run(name, workload, Engine(num_blocks=250, max_num_seqs=16), rate=12.0, steps=True)
        for name in ("fcfs", "vtc")
    ]
    page = tmp_path / "out.html"
    write_report(page, runs)
    had = runs[1]
    assert had.history is not None
    place = int(np.argmax(had.requests.counts("num_preempted")))
    name = had.requests.names["request_id"][place]
    stays = [stay for stay in had.history.stays[place] if stay.is_again]
    moment = (stays[0].start + stays[0].end) / 2

    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000"]
    link = f"{page.as_uri()}#run=1&time={moment}&request={quote(name)}"
    shown = subprocess.run([*command, link], capture_output=True, text=True, check=True)
    text = shown.stdout

    story = text.split('id="story"')[1].split("</table>")[0]
    assert story.count("was preempted") == len(stays)
    assert escape(because(stays[0].causes)) in story
    assert "had its last token; outcome: done" in story
    waiting = text.split('id="waiting"')[1].split("</table>")[0]
    assert f"<td>{name}</td>" in waiting and escape(because(stays[0].causes)) in waiting
    assert "of the KV pool in use" in text.split('id="state"')[1].split("</p>")[0]
