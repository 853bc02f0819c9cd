"""A server of the page whose data are made up: answers of any text and length, at once."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine.server.page.assets import PageAssets
from support.patience import WAIT_SECONDS
from support.served import free_port

Data = dict[str, Any]


def model_data(**changes: Any) -> Data:
    about = {
        "models": ["tiny"],
        "max_model_len": 32768,
        "sampling": {"temperature": 0.6, "top_p": 0.95},
        "thinking": True,
        "tools": True,
        "generates": True,
        "pools": False,
        "version": "0.1.0",
    }
    return {**about, **changes}


def row_data(name: str, **changes: Any) -> Data:
    row = {"id": name, "state": "running", "priority": 0, "cause": "", "since": 1.2, "age": 1.5}
    row |= {"prompt": 40, "computed": 40, "cached": 16, "output": 12, "core": 0, "waited": {}}
    return {**row, **changes}


def now_data(**changes: Any) -> Data:
    core: Data = {"core": 0, "alive": True, "running": 1, "waiting": 0}
    core["kv"] = [{"group": "full attention", "used": 310, "total": 1024}]
    core["prefix"] = {"queries": 2000, "hits": 900, "missed": {"never seen": 1000, "evicted": 100}}
    about = {"time": time.time(), "scope": "all", "requests": [row_data("a")], "num_requests": 1}
    return {**about, "cores": [core], "steps": [], "waits": {"seats": 12.5}, **changes}


@dataclass
class Script:
    """What the server answers. ``deltas``: those of each answer; ``pause``: seconds between."""

    model: Data = field(default_factory=model_data)
    now: Data = field(default_factory=now_data)
    deltas: list[Data] = field(default_factory=lambda: [{"content": "Hello."}])
    pause: float = 0.0
    record: Data = field(default_factory=dict)
    refusal: tuple[int, Data] | None = None  # status and error, in place of an answer
    bodies: list[Data] = field(default_factory=list)  # of all requests for answers

    async def chat(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        if self.refusal is not None:
            status, error = self.refusal
            return JSONResponse({"error": error}, status, {"Retry-After": "3"})
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        for delta in self.deltas:
            yield event_of({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
            if self.pause:
                await asyncio.sleep(self.pause)
        has_calls = any("tool_calls" in delta for delta in self.deltas)
        end = "tool_calls" if has_calls else "stop"
        yield event_of({"choices": [{"index": 0, "delta": {}, "finish_reason": end}]})
        usage: Data = {"prompt_tokens": 31, "completion_tokens": len(self.deltas)}
        usage["prompt_tokens_details"] = {"cached_tokens": 16}
        yield event_of({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    async def about_model(self, request: Request) -> Response:
        return JSONResponse(self.model)

    async def about_now(self, request: Request) -> Response:
        after, steps = int(request.query_params["after"]), self.now["steps"]
        if steps and after <= steps[-1]["step"]:  # else it was started again
            steps = [step for step in steps if step["step"] > after]
        return JSONResponse({**self.now, "steps": steps})

    async def about_request(self, request: Request) -> Response:
        if not self.record:
            return JSONResponse({"error": {"message": "no such request"}}, 404)
        return JSONResponse({"id": request.path_params["id"], "state": "ended", **self.record})

    async def score(self, request: Request) -> Response:
        return JSONResponse({"data": [{"score": 0.75}], "usage": {"prompt_tokens": 21}})


def event_of(data: Data) -> str:
    return f"data: {json.dumps(data)}\n\n"


@contextmanager
def page_server(script: Script) -> Iterator[str]:
    """The address of a server that follows the script."""
    assets = PageAssets()
    routes = [
        Route("/v1/chat/completions", script.chat, methods=["POST"]),
        Route("/score", script.score, methods=["POST"]),
        Route("/page/model", script.about_model),
        Route("/page/now", script.about_now),
        Route("/page/request/{id}", script.about_request),
        *assets.routes(),
    ]
    port = free_port()
    config = uvicorn.Config(Starlette(routes=routes), port=port, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    end = time.monotonic() + WAIT_SECONDS
    while not server.started:
        assert time.monotonic() < end
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.force_exit = server.should_exit = True
        thread.join(WAIT_SECONDS)
