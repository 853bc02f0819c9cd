"""The page of a real server: its files and headers, its data by key, and a core that is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.patience import WAIT_SECONDS
from support.served import Served, forked
from support.slow_steps import GATE

psutil = pytest.importorskip("psutil")

KEY, OTHER, ADMIN = "key-one", "key-two", "key-admin"
OPTIONS = ("--num-threads", "1", "--max-model-len", "2048", "--max-num-seqs", "1")
OPTIONS += ("--scheduling-policy", "support.slow_steps.GatedSteps")
BROWSER = {"Accept": "text/html,*/*"}


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps are slow while this file exists, so that requests last until the test has seen them."""
    made = tmp_path_factory.mktemp("gate") / "gate"
    made.touch()
    return made


@pytest.fixture(scope="module")
def server(gate: Path) -> Iterator[Served]:
    keys = ("--api-key", KEY, "--api-key", OTHER, "--admin-api-key", ADMIN)
    with forked(*OPTIONS, *keys, **{GATE: str(gate)}) as made:
        yield made


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def generate(server: Served, name: str, key: str | None, num: int = 1500) -> threading.Thread:
    body = {"model": "box", "prompt": "x", "max_tokens": num, "ignore_eos": True}
    headers = {"X_Request_Id": name, **({} if key is None else bearer(key))}
    started = threading.Thread(
        target=lambda: server.ask("/v1/completions", body, **headers), daemon=True
    )
    started.start()
    return started


def named_in_steps(view: Any) -> set[str]:
    return {name for step in view["steps"] for name in step["tokens"]}


def until(look: Callable[[], Any]) -> Any:
    """What ``look`` returns as soon as it is true."""
    end = time.monotonic() + WAIT_SECONDS
    while not (found := look()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def test_the_page_opens_without_a_key_and_asks_only_its_own_server(server: Served) -> None:
    page = server.ask("/", **BROWSER)
    assert page.status == 200 and page.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = page.headers["Content-Security-Policy"].split("; ")
    assert policy == [
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:",
        "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
    ]  # fmt: skip
    assert page.headers["Cache-Control"] == "no-cache"
    same = server.ask("/", If_None_Match=page.headers["ETag"], **BROWSER)
    assert (same.status, same.body) == (304, b"")
    head = server.ask("/page/index.html", method="HEAD")
    assert head.status == 200 and head.body == b""
    assert int(head.headers["Content-Length"]) == len(page.body)
    for path in ("/page/../assets.py", "/page/%2e%2e/assets.py", "/page/x.js", "/page/now"):
        assert server.ask(path).status == 401
    assert server.ask("/page/..%2fassets.py", **bearer(KEY)).status == 404
    assert server.ask("/page/index.html", {}).status == 405


def test_each_key_sees_its_own_requests_while_they_run_and_when_they_have_ended(
    server: Served, gate: Path
) -> None:
    assert server.ask("/page/model").status == 401
    model = server.ask("/page/model", **bearer(KEY)).json
    assert model["models"] == ["box"] and model["max_model_len"] == 2048
    assert (model["generates"], model["pools"], model["chats"]) == (True, False, True)

    def now(key: str) -> Any:
        return server.ask("/page/now", **bearer(key)).json

    now(ADMIN)
    running = [generate(server, "mine", KEY), generate(server, "theirs", OTHER)]
    found = until(lambda: len((view := now(ADMIN))["requests"]) == 2 and view)
    assert {each["id"] for each in found["requests"]} == {"mine", "theirs"}
    assert sorted(each["state"] for each in found["requests"]) == ["running", "waiting"]
    assert {each["cause"] for each in found["requests"]} == {"", "seats"}
    for key, own in ((KEY, "mine"), (OTHER, "theirs")):
        view = now(key)
        assert [each["id"] for each in view["requests"]] in ([own], [])
        assert (view["cores"], view["steps"], view["waits"]) == ([], [], {})
    gate.unlink()
    until(lambda: now(ADMIN) and not any(each.is_alive() for each in running))
    until(lambda: named_in_steps(now(ADMIN)) == {"mine", "theirs"})  # a reading is kept for a while
    ended = server.ask("/page/request/mine", **bearer(KEY)).json
    other = server.ask("/page/request/theirs", **bearer(OTHER)).json
    assert max(each["waited"].get("seats", 0.0) for each in (ended, other)) > 0
    assert ended["output"] == other["output"] == 1500
    answers = [server.ask(f"/page/request/{name}", **bearer(KEY)) for name in ("theirs", "nobody")]
    assert [each.status for each in answers] == [404, 404]
    texts = [each.body.replace(b"theirs", b"nobody") for each in answers]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("num_cores", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_core_is_seen_and_others_go_on(num_cores: int, tmp_path: Path) -> None:
    options = ("--multiprocess", "--data-parallel-size", str(num_cores), "--on-core-death", "stay")
    gate = tmp_path / "gate"
    gate.touch()
    with forked(*OPTIONS, *options, **{GATE: str(gate)}) as server:

        def now() -> Any:
            return server.ask("/page/now").json

        def alive() -> list[bool]:
            return sorted(core["alive"] for core in now()["cores"])

        assert alive() == [True] * num_cores
        for name in ("a", "b"):
            generate(server, name, None, 2000)
        until(lambda: {each["core"] for each in now()["requests"]} == set(range(num_cores)))
        children = psutil.Process(server.process.pid).children(recursive=True)
        cores = [child.pid for child in children if "resource_tracker" not in str(child.cmdline())]
        assert len(cores) == num_cores
        for num, core in enumerate(cores, 1):
            os.kill(core, signal.SIGKILL)
            until(lambda num=num: alive() == [False] * num + [True] * (num_cores - num))
        assert now()["requests"] == [] and server.ask("/", **BROWSER).status == 200


def test_without_the_page_nothing_is_at_its_paths() -> None:
    with forked(*OPTIONS, "--no-page", **{GATE: ""}) as server:
        for path in ("/", "/page/index.html", "/page/now", "/page/model", "/page/request/x"):
            answer = server.ask(path, **BROWSER)
            assert answer.status == 404 and answer.json["error"]["code"] == "not_found"
