"""The page's data: what it shows of requests, to whom, and how seldom the engine is read."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from support.fakes import FakeClock, scheduled_session
from support.patience import WAIT_SECONDS

from engine import AsyncLLMEngine, SamplingParams
from engine.errors import EngineDeadError
from engine.frontend.async_watching import LiveRequest
from policylab.verify.fake import DigestWorker

pytest.importorskip("starlette")

from starlette.requests import Request

from engine.core.client import NumCores
from engine.messages.stats import RankUse
from engine.server.adapters import ServedAdapters
from engine.server.app import make_app
from engine.server.http.openapi import ApiRoute, document_of
from engine.server.keys import KeyGuard, KeyRing
from engine.server.names import ServedNames
from engine.server.page.assets import HEADERS, MEDIA_TYPES, STATIC, PageAssets
from engine.server.page.ended import EndedRequests
from engine.server.page.now import INTERVAL, Now
from engine.server.page.owners import HTTP_REQUEST, HttpRequest
from engine.server.page.routes import Page
from engine.server.page.shown import plain_id, shown_waits

FINISHED: Any = SimpleNamespace(
    request_id="x", num_prompt_tokens=1, num_cached_tokens=0, num_output_tokens=1,
    metrics=SimpleNamespace(waits={"seats": 1.0}, arrival_time=0.0, first_token_time=None),
)  # fmt: skip

ONE, TWO, BOSS = "key-one", "key-two", "key-admin"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def ask(
    app: Any, path: str, key: str | None = None, method: str = "GET", **headers: str
) -> Answer:
    """The answer of an application to one request."""
    path, _, query = path.partition("?")
    given = {name.replace("_", "-").lower(): value for name, value in headers.items()}
    if key is not None:
        given["authorization"] = f"Bearer {key}"
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http", "method": method, "path": path, "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }  # fmt: skip
    # As in a server, each request has a task, and so context variables, of its own.
    await asyncio.create_task(app(scope, receive, send))
    headers = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], headers, b"".join(each.get("body", b"") for each in sent[1:]))


class SlowWorker(DigestWorker):
    """A worker whose steps take some milliseconds; a test can make it hang or die."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, 16)
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.pause = 0.005
        self.dies = False

    def collect(self, ticket: Any) -> Any:
        time.sleep(self.pause)
        assert self.goes_on.wait(WAIT_SECONDS)
        if self.dies:
            raise RuntimeError("the worker is gone")
        result = super().collect(ticket)
        result.seconds = 0.25
        return result


class PageBox:
    """An engine with a real scheduler and a fake worker, and the application of its page."""

    def __init__(self, keys: KeyRing, **options: Any) -> None:
        num_blocks = options.setdefault("num_blocks", 200)
        self.worker = SlowWorker(num_blocks)
        options = {"max_num_seqs": 1, **options}
        session = scheduled_session(time.monotonic, worker=self.worker, **options)
        self.engine = AsyncLLMEngine(session)
        names = ServedNames(("box",))
        self.num_looks = 0
        look = self.engine.look

        async def counted(read: Any) -> Any:
            self.num_looks += 1
            return await look(read)

        self.engine.look = counted  # type: ignore[method-assign]
        page = Page(self.engine, keys, names, ServedAdapters(self.engine, names))
        self.tasks: list[asyncio.Task[None]] = []
        generate = ApiRoute("POST", "/v1/completions", self.generate)
        app = make_app([generate, *page.routes()])
        self.app: Any = KeyGuard(page.owned(app), keys, 1, page.open_paths)

    async def generate(self, request: Request) -> Any:
        """Generate as many tokens as the path's query wants."""
        from starlette.responses import Response

        num = int(request.query_params["num"])
        name = f"cmpl-{request.headers['x-request-id']}~{len(self.tasks)}"
        params = SamplingParams(max_tokens=num, n=int(request.query_params.get("n", 1)))
        token = int(request.query_params.get("token", 5))
        async for _ in self.engine.generate([token] * 20, params, name):
            pass
        return Response(b"")

    async def begin(
        self, name: str, key: str | None = None, num: int = 4, n: int = 1, token: int = 5
    ) -> None:
        """Begin an HTTP request, and wait until the engine has it."""
        path = f"/v1/completions?num={num}&n={n}&token={token}"
        begun = ask(self.app, path, key, "POST", X_Request_Id=name)
        self.tasks.append(asyncio.create_task(begun))  # type: ignore[arg-type]
        async with asyncio.timeout(WAIT_SECONDS):
            while not await self.engine.look(partial(has_request, name)):
                await asyncio.sleep(0.001)

    async def finish(self) -> None:
        self.worker.pause = 0.0
        await asyncio.gather(*self.tasks)
        self.worker.pause = 0.005

    async def now(self, key: str | None = None, after: int = 0) -> Any:
        answer = await ask(self.app, f"/page/now?after={after}", key)
        assert answer.status == 200, answer.body
        return answer.json

    async def now_anew(self, key: str | None = None, after: int = 0) -> Any:
        """What ``now`` returns from a new reading."""
        await asyncio.sleep(INTERVAL + 0.01)
        return await self.now(key, after)


def has_request(name: str, client: Any, live: list[LiveRequest]) -> Callable[[], bool]:
    """Whether the engine has an HTTP request."""
    return lambda: any(f"-{name}~" in request.request_id for request in live)


@pytest.fixture
def opened() -> Iterator[Any]:
    boxes: list[PageBox] = []

    def opened(*keys: str, admin: str | None = None, **options: Any) -> PageBox:
        boxes.append(PageBox(KeyRing(keys, None, admin), **options))
        return boxes[-1]

    yield opened
    for box in boxes:
        box.worker.pause = 0.0
        box.worker.goes_on.set()
        box.engine.shutdown()


async def test_each_rank_shows_how_long_it_waited_in_its_steps(opened: Any) -> None:
    box = opened(ranks=lambda: [RankUse(0, 0, 10.0, 1.0), RankUse(0, 1, 10.0, 2.0, 0.5)])
    (core,) = (await box.now())["cores"]
    assert core["ranks"] == [
        {"rank": 0, "steps": 10.0, "waited": 1.0},
        {"rank": 1, "steps": 10.0, "waited": 2.5},
    ]


async def test_a_waiting_request_shows_its_cause_and_later_why_it_waited(opened: Any) -> None:
    box = opened()
    for name in ("a", "b"):
        await box.begin(name, num=200)
    await box.now()
    found = await box.now_anew()
    states = {each["id"]: each for each in found["requests"]}
    assert found["scope"] == "all" and found["num_requests"] == 2
    a, b = states["a"], states["b"]
    assert (a["state"], a["cause"], a["prompt"], a["core"]) == ("running", "", 20, 0)
    assert (b["state"], b["cause"], b["output"]) == ("waiting", "seats", 0)
    assert b["waited"]["seats"] > 0 and b["age"] >= b["since"] > 0
    (core,) = found["cores"]
    assert (core["alive"], core["running"], core["waiting"]) == (True, 1, 1)
    (kv,) = core["kv"]
    assert (kv["group"], kv["total"]) == ("full", 199) and 2 <= kv["used"] <= 8
    assert core["prefix"]["queries"] == 20
    await box.finish()
    ended = await ask(box.app, "/page/request/b")
    assert ended.status == 200 and ended.headers["cache-control"] == "no-store"
    about = ended.json
    assert about["waited"]["seats"] > 0 and about["first_token"] >= about["waited"]["seats"]
    assert (about["id"], about["state"], about["core"]) == ("b", "ended", 0)
    assert (about["prompt"], about["cached"], about["output"]) == (20, 16, 200)
    found = await box.now_anew()
    assert found["requests"] == [] and found["num_requests"] == 0
    assert found["waits"]["seats"] > 0


async def test_steps_have_tokens_by_request_and_numbers_that_go_on(opened: Any) -> None:
    box = opened(max_num_seqs=4)
    await box.now()
    await box.begin("a", num=8, n=2)
    await box.finish()
    steps = (await box.now_anew())["steps"]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    total: dict[str, int] = {}
    for step in steps:
        for name, num in step["tokens"].items():
            total[name] = total.get(name, 0) + num
        assert step["core"] == 0 and abs(step["at"] - time.time()) < WAIT_SECONDS
    assert sum(step["num_steps"] for step in steps) >= 8 and steps[0]["seconds"] >= 0.25
    assert all(name.startswith("a") for name in total)
    assert sum(total.values()) + sum(each["others"] for each in steps) >= 20 + 7 + 4 + 7
    last = steps[-1]["step"]
    assert (await box.now(after=last))["steps"] == []
    assert len((await box.now(after=last - 1))["steps"]) == 1
    assert len((await box.now(after=last + 1000))["steps"]) == len(steps)  # of another server
    assert (await box.now(after=10**15 - 1))["steps"] == []  # a page that wants none


async def test_sequences_of_one_request_have_numbers(opened: Any) -> None:
    box = opened(max_num_seqs=4)
    await box.begin("a", num=100, n=3)
    found = await box.now()
    assert [each["id"] for each in found["requests"]] == ["a/0", "a/1", "a/2"]
    await box.finish()
    assert (await ask(box.app, "/page/request/a")).json["output"] == 300


async def test_a_key_sees_its_own_requests_and_the_admin_key_all(opened: Any) -> None:
    box = opened(ONE, TWO, admin=BOSS, max_num_seqs=1)
    await box.begin("mine", ONE, num=200)
    await box.begin("theirs", TWO, num=200)
    await box.begin("same", BOSS, num=200)
    seen = {key: await box.now(key) for key in (ONE, TWO, BOSS)}
    ids = {key: {each["id"] for each in found["requests"]} for key, found in seen.items()}
    assert ids == {ONE: {"mine"}, TWO: {"theirs"}, BOSS: {"mine", "theirs", "same"}}
    assert [seen[key]["num_requests"] for key in (ONE, TWO, BOSS)] == [1, 1, 3]
    short = {key: hashlib.sha256(key.encode()).hexdigest()[:12] for key in (ONE, TWO, BOSS)}
    senders = {each["id"]: each["key"] for each in seen[BOSS]["requests"]}
    assert senders == {"mine": short[ONE], "theirs": short[TWO], "same": short[BOSS]}
    for key in (ONE, TWO):
        found = seen[key]
        assert found["scope"] == "own" and not any("key" in each for each in found["requests"])
        assert (found["cores"], found["steps"], found["waits"]) == ([], [], {})
    assert seen[BOSS]["scope"] == "all" and seen[BOSS]["cores"]
    await box.finish()


async def test_a_record_is_found_with_its_key_only(opened: Any) -> None:
    """A foreign id and an unknown one have the same answer; the same id is two requests."""
    box = opened(ONE, TWO, admin=BOSS)
    for name, key, num in (("x", ONE, 2), ("same", ONE, 3), ("same", TWO, 5)):
        await ask(box.app, f"/v1/completions?num={num}", key, "POST", X_Request_Id=name)
    foreign = await ask(box.app, "/page/request/x", TWO)
    unknown = await ask(box.app, "/page/request/y", TWO)
    assert foreign.status == unknown.status == 404
    assert foreign.body == unknown.body.replace(b"'y'", b"'x'")
    assert "if it still runs, see /page/now" in unknown.json["error"]["message"]
    outputs = {
        key: (await ask(box.app, "/page/request/same", key)).json["output"]
        for key in (ONE, TWO, BOSS)
    }
    assert outputs == {ONE: 3, TWO: 5, BOSS: 5}


async def test_without_a_valid_key_no_data_are_shown(opened: Any) -> None:
    paths = ("/page/now", "/page/model", "/page/request/x", "/page/nothing")
    for box in (opened(ONE), opened(ONE, admin=BOSS), opened(admin=BOSS)):
        for path in paths[:3]:
            for key in (None, "wrong", ONE + "x"):
                answer = await ask(box.app, path, key)
                assert answer.status == 401 and answer.json["error"]["code"] == "invalid_api_key"
        for path in ("/", "/page/index.html"):
            assert (await ask(box.app, path)).status == 200
    only_admin = opened(admin=BOSS)
    assert (await ask(only_admin.app, "/page/model", BOSS)).status == 200
    assert (await only_admin.now(BOSS))["scope"] == "all"
    assert (await ask(opened().app, "/page/model")).status == 200


async def test_a_key_does_not_see_who_preempted_its_request(opened: Any) -> None:
    """Two keys compete for blocks until one's request loses them to the other's."""
    box = opened(ONE, TWO, admin=BOSS, num_blocks=7, max_num_seqs=2)
    box.worker.pause = 0.05
    await box.begin("mine", ONE, num=60)
    await box.begin("theirs", TWO, num=60, token=6)
    lost: list[Any] = []
    while not lost:
        found = await box.now_anew(BOSS)
        assert found["requests"], "both have ended"
        lost = [each for each in found["requests"] if each["cause"].startswith("preempted")]
    (loser,) = lost
    winner = {"mine": "theirs", "theirs": "mine"}[loser["id"]]
    assert loser["cause"] == f"preempted by {winner}"
    key = {"mine": ONE, "theirs": TWO}[loser["id"]]
    shown = await box.now_anew(key)
    assert winner not in json.dumps(shown)
    assert shown["requests"][0]["cause"] == "preempted"
    assert shown["requests"][0]["waited"]["preempted"] > 0
    await box.finish()
    ended = await ask(box.app, f"/page/request/{loser['id']}", key)
    assert winner.encode() not in ended.body and ended.json["waited"]["preempted"] > 0


async def test_ten_pages_share_one_reading(opened: Any) -> None:
    """Also those of several keys, once each key has polled; and nothing is read without pages."""
    box = opened(ONE, TWO, admin=BOSS)
    await asyncio.sleep(0.05)
    assert box.num_looks == 0
    keys = [ONE, TWO, BOSS] * 4
    await asyncio.gather(*(box.now(key) for key in keys))
    assert box.num_looks <= 3
    await asyncio.sleep(INTERVAL + 0.01)
    before = box.num_looks
    for _ in range(3):
        await asyncio.gather(*(box.now(key) for key in keys))
    assert box.num_looks == before + 1
    assert (await box.now(ONE))["scope"] == "own"


async def test_polls_do_not_count_as_open_requests_of_a_key(opened: Any) -> None:
    box = opened(ONE)  # with one open request a key
    await box.begin("a", ONE, num=20)
    assert (
        await ask(box.app, "/v1/completions?num=1", ONE, "POST", X_Request_Id="b")
    ).status == 429
    assert (await box.now(ONE))["num_requests"] == 1
    await box.finish()


async def test_a_silent_core_is_shown_as_it_was_and_a_dead_one_as_dead(opened: Any) -> None:
    box = opened()
    await box.begin("a", num=200)
    before = await box.now()
    assert [each["id"] for each in before["requests"]] == ["a"]
    box.worker.goes_on.clear()
    silent = await box.now_anew()
    assert silent["time"] == before["time"] and silent["cores"][0]["alive"]
    box.worker.dies = True
    box.worker.goes_on.set()
    with pytest.raises(EngineDeadError):
        await box.engine.check_health()
    dead = await box.now_anew()
    assert [(each["core"], each["alive"]) for each in dead["cores"]] == [(0, False)]
    assert dead["requests"] == [] and dead["num_requests"] == 0


async def test_after_is_the_number_of_a_step(opened: Any) -> None:
    box = opened()
    for wrong in ("-1", "x", "1.5", "9" * 16, "%C2%B2"):
        answer = await ask(box.app, f"/page/now?after={wrong}")
        assert answer.status == 400 and answer.json["error"]["param"] == "after", wrong


async def test_ended_requests_are_kept_within_limits() -> None:
    clock = FakeClock()
    ended = EndedRequests(lambda name: 1, most=3, clock=clock)
    for name, owner in [("a", b"1"), *((str(index), b"2") for index in range(5))]:
        HTTP_REQUEST.set(HttpRequest(name, owner))
        ended.observe(FINISHED)
    assert [ended.find(name, b"2") is not None for name in "01234"] == [False] * 2 + [True] * 3
    found = ended.find("a", b"1")  # others' requests do not push it out
    assert found is not None and found.document(None)["core"] == 1
    assert ended.find("a", b"2") is None and ended.find("4", None) is not None
    clock.now += 601.0
    assert ended.find("a", b"1") is None and ended.find("4", None) is None


async def test_requests_of_keys_that_are_gone_take_no_memory() -> None:
    clock = FakeClock()
    ended = EndedRequests(lambda name: 1, clock=clock)
    gone = HttpRequest("a", b"1")
    known = weakref.ref(gone)
    for request in (gone, HttpRequest("b", b"2")):
        HTTP_REQUEST.set(request)
        ended.observe(FINISHED)
    del gone, request
    clock.now += 601.0
    HTTP_REQUEST.set(HttpRequest("c", b"3"))
    ended.observe(FINISHED)
    assert known() is None and ended.find("c", b"3") is not None


def test_ids_and_causes_are_shown_plainly() -> None:
    for core_id, shown in {
        "17/chatcmpl-a.B:1~0123456789ab": "a.B:1",
        "clients-0a1b/3/cmpl-x~1": "x",
        "client-2/3/resp-x-y~1": "x-y",
        "tool": "tool",
    }.items():
        assert plain_id(core_id) == shown
    waits = {"preempted by 1/cmpl-a~0": 1.0, "preempted by 2/cmpl-b~0": 2.0, "seats": 0.5}
    assert shown_waits(waits, b"key") == {"preempted": 3.0, "seats": 0.5}
    assert shown_waits(waits, None) == {"preempted by a": 1.0, "preempted by b": 2.0, "seats": 0.5}


# -- files


async def test_files_have_headers_that_confine_them_and_a_tag(opened: Any) -> None:
    box = opened(ONE)
    for path in ("/", "/page/index.html"):
        answer = await ask(box.app, path)
        assert answer.status == 200 and answer.body == (STATIC / "index.html").read_bytes()
        for name, value in HEADERS.items():
            assert answer.headers[name.lower()] == value
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        tag = answer.headers["etag"]
        for known in (tag, f"W/{tag}", f'"x", {tag}', "*"):
            same = await ask(box.app, path, If_None_Match=known)
            assert (same.status, same.body) == (304, b"") and same.headers["etag"] == tag
        assert (await ask(box.app, path, If_None_Match='"x"')).status == 200
        head = await ask(box.app, path, method="HEAD")
        assert head.status == 200 and head.headers["etag"] == tag


@pytest.mark.parametrize(
    "path",
    [
        "/page/../assets.py", "/page/..", "/page/", "/page/./index.html", "/page//index.html",
        "/page/index.html/", "/page/INDEX.HTML", "/page/vendor/../index.html", "/page/\\index.html",
        "/page/index.html\0", "/page//etc/passwd", "/page/%2e%2e/assets.py",
    ],
)  # fmt: skip
async def test_only_whole_names_of_files_are_served(opened: Any, path: str) -> None:
    answer = await ask(opened(ONE).app, path)
    assert answer.status == 401  # as for every unknown path
    assert (await ask(opened().app, path)).status == 404


async def test_other_kinds_of_files_are_not_served(tmp_path: Path) -> None:
    for name in ("index.html", "app.js", "LICENSE", "notes.txt", "key.pem", ".hidden.js"):
        (tmp_path / name).write_text(name)
    (tmp_path / "vendor").mkdir()
    (tmp_path / "vendor" / "library.js").write_text("library")
    assets = PageAssets(tmp_path)
    expected = {"/", "/page/index.html", "/page/app.js", "/page/vendor/library.js"}
    assert assets.paths - {"/page/.hidden.js"} == expected
    app = make_app(assets.routes())
    script = await ask(app, "/page/vendor/library.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert script.headers["x-content-type-options"] == "nosniff"


def test_every_file_of_the_page_is_packaged() -> None:
    """The package data of pyproject.toml have all files that are served."""
    import tomllib

    root = STATIC.parents[3]
    setup = tomllib.loads((root / "pyproject.toml").read_text())
    globs = setup["tool"]["setuptools"]["package-data"]["engine"]
    packaged = {file for each in globs for file in (root / "engine").glob(each)}
    files = {file for file in STATIC.rglob("*") if file.is_file()}
    assert files and files <= packaged
    assert any(file.suffix in MEDIA_TYPES for file in files)


async def test_the_routes_are_described(opened: Any) -> None:
    engine = opened().engine
    names = ServedNames(("box",))
    routes = Page(engine, KeyRing(), names, ServedAdapters(engine, names)).routes()
    paths = document_of(routes, ["box"])["paths"]
    assert set(paths) == {
        "/", "/page/{file}", "/page/model", "/page/now", "/page/request/{request_id}"
    }  # fmt: skip
    for route in routes:
        assert paths[route.path.replace(":path}", "}")]["get"]["summary"]


async def test_several_cores_are_shown_with_their_requests() -> None:
    """A core that has died is listed, and its numbers of steps may begin again."""
    box = scheduled_session(time.monotonic, num_blocks=50)
    client: Any = box.client
    calls: list[Any] = []

    class TwoCores:
        def begin_each(self, name: str, *args: Any) -> Any:
            calls.append(args)
            return lambda: {1: client.call(name, *args)}

    class Engine:
        num_cores = NumCores(1, 2, num_prefill=1)

        async def look(self, begin: Any) -> Any:
            return begin(TwoCores(), [])()

    now = Now(Engine(), interval=0.0)  # type: ignore[arg-type]
    found = json.loads(await now.document(None, 0))
    assert [(each["core"], each["alive"]) for each in found["cores"]] == [(0, False), (1, True)]
    assert [each["role"] for each in found["cores"]] == ["prefill", "decode"]
    assert found["cores"][1]["kv"][0]["total"] == 49 and found["cores"][0]["kv"] == []
    assert now.core_of("unknown") is None
    assert calls[0][0] == {} and calls[0][1] > 0
    await now.document(b"key", 0)
    assert calls[-1][0] is not None  # another page still sees all
