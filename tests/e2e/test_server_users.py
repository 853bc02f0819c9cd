"""Whom policies take for the user of a request: the one that it names, or its key."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from support.served import served

from engine.errors import ConfigError
from engine.server.run import ServerOptions

NOTING = """
from engine.sched.policy import Policy

class Noting(Policy):
    def rank(self, req, view):
        return (req.arrival,)

    def on_add(self, req, view):
        with open({path!r}, "a") as file:
            print(req.user or "nobody", file=file)
"""
OPTIONS = (
    "--num-threads", "1", "--max-model-len", "512", "--no-multiprocess",
    "--scheduling-policy", "noting.Noting", "--api-key", "key-of-ann",
)  # fmt: skip
TURNS = [{"role": "user", "content": "Hello"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1, "user": "bob"},
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 1, "user": "bob"},
    "/v1/responses": {"input": "a", "max_output_tokens": 1, "user": "bob"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 1, "metadata": {"user_id": "bob"}},
    "/api/chat": {"messages": TURNS, "options": {"num_predict": 1}, "stream": False},
}


@pytest.mark.parametrize("is_key", [True, False])
def test_the_user_is_the_one_of_the_request_or_its_key(is_key: bool, tmp_path: Path) -> None:
    noted = tmp_path / "users"
    (tmp_path / "noting.py").write_text(NOTING.format(path=str(noted)))
    options = (*OPTIONS, "--user-from-key") if is_key else OPTIONS
    with served(*options, PYTHONPATH=str(tmp_path), METRONOME_LOG_LEVEL="warning") as server:
        for path, body in REQUESTS.items():
            for header in ({"Authorization": "Bearer key-of-ann"}, {"x_api_key": "key-of-ann"}):
                answer = server.ask(path, {"model": "box", **body}, **header)
                assert answer.status == 200, answer.body
    key = sha256(b"key-of-ann").hexdigest()[:12]
    named = [key if is_key else "bob" for _ in range(8)]
    assert noted.read_text().split() == [*named, *[key if is_key else "nobody"] * 2]


def test_a_user_from_a_key_needs_keys() -> None:
    with pytest.raises(ConfigError, match="user_from_key is True without API keys: add --api-key"):
        ServerOptions(user_from_key=True)
