"""The server that is measured: its address, its models, and what each request must carry."""

from __future__ import annotations

import json
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from engine.errors import ConfigError, EngineError
from policylab.bench.client import CONNECT_SECONDS, Endpoint

RETRY_SECONDS = 0.2
CHAT = "/chat/completions"


class ServerError(EngineError):
    """The server cannot be measured."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """An endpoint of a server."""

    host: str
    port: int
    endpoint: Endpoint

    @property
    def is_chat(self) -> bool:
        return self.endpoint.path.endswith(CHAT)

    @property
    def base_url(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.endpoint.tls is None else 'https'}://{name}:{self.port}"

    def wait(self, seconds: float) -> None:
        """Wait until the server accepts connections. Raises ``ServerError`` after this many."""
        end = time.monotonic() + seconds
        while True:
            try:
                socket.create_connection((self.host, self.port), CONNECT_SECONDS).close()
                return
            except OSError as error:
                if time.monotonic() >= end:
                    raise ServerError(
                        f"no server answers at {self.base_url} ({error.strerror or error}): start "
                        "one, as with `metronome serve`, or name another with --base-url; "
                        "--ready-check-timeout-sec waits for it"
                    ) from error
            time.sleep(RETRY_SECONDS)

    def first_model(self) -> str:
        """The first model that the server lists. Raises ``ServerError``."""
        before = self.endpoint.path.partition("/v1/")[0]
        url = f"{self.base_url}{before}/v1/models"
        request = urllib.request.Request(url, headers=dict(self.endpoint.headers))
        try:
            with urllib.request.urlopen(request, timeout=60.0, context=self.endpoint.tls) as answer:
                found: dict[str, Any] = json.load(answer)
            return str(found["data"][0]["id"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ServerError(f"{url} lists no model ({error}): name one with --model") from error


def find_target(
    base_url: str, endpoint: str, key: str | None, headers: Sequence[str], *, is_insecure: bool
) -> Target:
    """Read the address of a server. Raises ``ConfigError``.

    headers: NAME=VALUE. is_insecure: accept any TLS certificate.
    """
    parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not port:
        raise ConfigError(
            f"--base-url is {base_url!r}, must be as in http://127.0.0.1:8000 or "
            "https://api.example.com"
        )
    if not endpoint.startswith("/") or not endpoint.endswith("/completions"):
        raise ConfigError(
            f"--endpoint is {endpoint!r}, must be a path that ends in /completions: "
            "/v1/completions or /v1/chat/completions"
        )
    own = {"Authorization": f"Bearer {key}"} if key else {}
    path = parts.path.rstrip("/")
    if path.endswith("/v1") and endpoint.startswith("/v1/"):  # as clients of OpenAI write it
        path = path.removesuffix("/v1")
    return Target(
        host=parts.hostname,
        port=port,
        endpoint=Endpoint(
            path + endpoint,
            {**own, **dict(map(_header, headers))},
            _tls(is_insecure) if parts.scheme == "https" else None,
        ),
    )


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or any(sign in text for sign in "\r\n"):
        raise ConfigError(f"--header has {text!r}, must be NAME=VALUE, as in x-team=search")
    return name.strip(), value


def _tls(is_insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if is_insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
