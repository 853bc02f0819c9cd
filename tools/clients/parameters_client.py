"""Sends every parameter of the newest ``openai`` and ``anthropic``: null must mean the same as
absence, and a refusal must name the parameter."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import cells

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import api_types

MAX_SHOWN = 20


def post(url: str, path: str, body: Any) -> tuple[int, Any]:
    """Post a body with a small limit of tokens; returns status and answer."""
    short = {"/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_tokens"}
    limit = {short[path]: 1} if path in short else {}
    data = json.dumps({**limit, **body, "model": cells.NAME}).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def meaning(url: str, path: str, body: Any) -> Any:
    """Status, length of the prompt, and the parameter that the error names."""
    status, answer = post(url, path, body)
    usage = answer.get("usage") or {}
    names = ("prompt_tokens", "input_tokens", "cache_read_input_tokens")
    error = answer.get("error") or {}
    return status, sum(usage.get(name, 0) for name in names), error.get("param")


def nulls(url: str) -> None:
    wrong = []
    for path in api_types.CREATE:
        for each in api_types.nulls_of(path):
            null, absent = (meaning(url, path, body) for body in (each.null, each.absent))
            if null != absent:
                wrong.append((path, each.name, null, absent))
    assert not wrong, f"{len(wrong)}, as {wrong[:MAX_SHOWN]}"


def names(url: str) -> None:
    wrong = []
    for path in api_types.CREATE:
        for name, body in api_types.bodies_of(path):
            status, answer = post(url, path, body)
            error = answer.get("error") or {}
            named = f"{error.get('param')} {error.get('message')}"
            if status != 200 and not (status == 400 and name in named):
                wrong.append((path, name, status, named))
    assert not wrong, f"{len(wrong)}, as {wrong[:MAX_SHOWN]}"


if __name__ == "__main__":
    cells.run({"nulls": nulls, "names": names})
