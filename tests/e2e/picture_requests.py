"""Requests with pictures for a server of a random tiny model that sees."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from e2e.picture_cases import as_file, picture
from support.served import Served

NAME = "seeing"
COMMON = ("--num-threads", "1", "--max-num-seqs", "8", "--num-kv-blocks", "400")
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
SHOWN = picture(50, 30)
FILE = as_file(SHOWN)


def fill_folder(root: Path) -> Path:
    """Write the picture to a directory, with a link that leads out of it."""
    (root / "shown.png").write_bytes(FILE)
    (root / "out").symlink_to("/etc/passwd")
    return root


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def shown(url: Any, **about: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **about}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def chat(server: Served, messages: list[Any], **about: Any) -> Any:
    body = {"model": NAME, "messages": messages, **GREEDY, "return_token_ids": True, **about}
    answer = server.ask("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return answer.json


def ids_of(answer: Any) -> list[int]:
    """Token ids of prompt and answer."""
    return [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"]]
