"""The document of `metronome serve`, and a server that does as it says; and the same over TLS."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.patience import WAIT_SECONDS
from support.schema_fuzz import fuzz
from support.served import Served, forked

trustme = pytest.importorskip("trustme")
if find_spec("schemathesis") is None:  # which runs in a process of its own
    pytest.skip("schemathesis is not installed", allow_module_level=True)

OPTIONS = (
    "--served-model-name", "box", "--num-threads", "1", "--max-model-len", "64",
    "--num-kv-blocks", "100", "--dtype", "float32", "--max-body-bytes", "1000000",
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with forked(*OPTIONS) as made:
        yield made


@pytest.mark.parametrize("runner", ["generate", "pooling"])
def test_every_route_is_described(runner: str) -> None:
    """A route that is added has a line in the document, with what it takes and gives."""
    from engine.observe.guard import Failures
    from engine.server.adapters import ServedAdapters
    from engine.server.app import routes_of
    from engine.server.http.openapi import ApiRoute, document_of
    from engine.server.keys import KeyRing
    from engine.server.limits import ServerLimits
    from engine.server.names import ServedNames
    from engine.server.operations import Operations

    engine: Any = SimpleNamespace(
        max_model_len=64,
        measure=lambda: None,
        add_observer=print,
        failures=Failures(),
        runner=runner,
    )
    operations = Operations(engine, KeyRing(), "box", 1.0)
    names = ServedNames(("box",))
    adapters = ServedAdapters(engine, names)
    routes = routes_of(engine, names, adapters, operations, ServerLimits())
    assert len(routes) > 10
    paths = document_of(routes, ["box"])["paths"]
    for route in routes:
        assert isinstance(route, ApiRoute), f"{route} describes itself: make it an ApiRoute"
        operation = paths[route.path.replace(":path}", "}")][route.method.lower()]
        assert operation["summary"], f"{route.path}: its handler has no docstring"
        assert {"200", "400", "401", "503"} <= operation["responses"].keys()
        assert (route.takes is not None) == ("requestBody" in operation)


def test_the_document_names_fields_and_ranges(server: Served) -> None:
    with urllib.request.urlopen(f"{server.url}/openapi.json") as answer:
        document = json.loads(answer.read())
    schemas = document["components"]["schemas"]
    fields = schemas["CompletionRequest"]["properties"]
    assert fields["model"]["enum"] == ["box"] and fields["n"]["anyOf"][0]["minimum"] == 1
    assert {"echo", "prompt_logprobs", "expected_tokens"} <= fields.keys()
    assert {"tools", "messages"} <= schemas["ChatRequest"]["properties"].keys()
    assert "text/event-stream" in json.dumps(document["paths"]["/v1/completions"]["post"])


def test_the_server_does_as_its_document_says(server: Served) -> None:
    found = fuzz(server.url, examples=3, seed=1, seconds=WAIT_SECONDS)
    assert found.status == 0, found.said
    assert found.num_cases > 500


class Certificates:
    """An authority, and files of what it has signed."""

    def __init__(self, root: Path) -> None:
        self.authority = trustme.CA()
        self.authority.cert_pem.write_to_path(root / "ca.pem")
        self.ca, self.cert, self.key = root / "ca.pem", root / "cert.pem", root / "key.pem"
        server = self.authority.issue_cert("127.0.0.1")
        server.private_key_pem.write_to_path(self.key)
        for part in server.cert_chain_pems:
            part.write_to_path(self.cert, append=True)

    def client(self, *, is_known: bool) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca))
        if is_known:
            self.authority.issue_cert("client@example.org").configure_cert(context)
        return context


def get(url: str, context: ssl.SSLContext | None) -> tuple[int, Any]:
    with urllib.request.urlopen(url, context=context) as answer:
        return answer.status, answer.read()


@pytest.mark.parametrize("has_clients", [False, True])
def test_tls(tmp_path: Path, has_clients: bool) -> None:
    """With a certificate of the server; and of its clients, if it says who signs them."""
    made = Certificates(tmp_path)
    options = ["--ssl-certfile", str(made.cert), "--ssl-keyfile", str(made.key)]
    if has_clients:
        options += ["--ssl-ca-certs", str(made.ca)]
    context = made.client(is_known=has_clients)
    with forked(*OPTIONS, *options, tls=context) as server:
        assert server.url.startswith("https://")
        assert get(f"{server.url}/v1/models", context)[0] == 200
        body = json.dumps({"model": "box", "prompt": "x", "max_tokens": 3, "stream": True}).encode()
        asked = urllib.request.Request(f"{server.url}/v1/completions", body)
        with urllib.request.urlopen(asked, context=context) as answer:
            assert answer.read().endswith(b"data: [DONE]\n\n")
        with pytest.raises(OSError):
            get(f"{server.url.replace('https', 'http')}/health", None)
        with pytest.raises(urllib.error.URLError, match="certificate"):
            get(f"{server.url}/health", ssl.create_default_context())
        if has_clients:
            with pytest.raises(OSError):
                get(f"{server.url}/health", made.client(is_known=False))
        assert server.end() == 0


@pytest.mark.parametrize("wrong", ["missing", "swapped", "key alone"])
def test_files_that_are_no_certificates_are_named(tmp_path: Path, wrong: str) -> None:
    from engine.errors import ConfigError
    from engine.server.run import Tls

    made = Certificates(tmp_path)
    files = {
        "missing": (str(tmp_path / "none.pem"), str(made.key)),
        "swapped": (str(made.key), str(made.cert)),
        "key alone": (None, str(made.key)),
    }[wrong]
    with pytest.raises(ConfigError, match="ssl_"):
        Tls(*files)
