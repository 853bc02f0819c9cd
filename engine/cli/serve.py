"""Serve the model over HTTP, with OpenAI's API."""

from __future__ import annotations

import argparse
from typing import Any

from engine.cli.options import add_engine_options, engine_args
from engine.config.env import API_KEY, api_keys
from engine.errors import ConfigError

LIMITS = {
    name: name for name in ("max_body_bytes", "max_n", "max_logprobs", "max_requests_per_key")
}
HTTP_LIMITS = {"header_timeout": "header_seconds", "body_timeout": "body_seconds"}

TLS = {
    "certfile": "the server's certificate: HTTPS instead of HTTP",
    "keyfile": "its key, unless it is in the same file",
    "ca-certs": "clients must show a certificate that one of these has signed",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000")
    group.add_argument("--uds", metavar="PATH", help="a socket file instead of host and port")
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"asked of clients, repeatable; {API_KEY} is one more. Without any, nobody is asked",
    )
    group.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="as clients call the model, repeatable; the first is in answers",
    )
    for name, about in TLS.items():
        group.add_argument(f"--ssl-{name}", metavar="FILE", help=about)
    _add_limits(parser.add_argument_group("limits of the server"))
    add_engine_options(parser)


def _add_limits(group: argparse._ArgumentGroup) -> None:
    """Defaults are those of ``Limits`` and ``HttpLimits``, which are imported only to serve."""
    wholes = {
        "max-body-bytes": "of a request; default: 33554432",
        "max-n": "texts for each prompt; default: 128",
        "max-logprobs": "at each position, -1: as many as there are; default: 20",
        "max-requests-per-key": "at a time; default: as many as come",
    }
    for name, about in wholes.items():
        group.add_argument(f"--{name}", type=int, metavar="N", help=about)
    reals = {
        "header-timeout": "for the headers of a request; default: 10",
        "body-timeout": "for the body of a request; default: 60",
    }
    for name, about in reals.items():
        group.add_argument(f"--{name}", type=float, metavar="SECONDS", help=about)


def run(parsed: argparse.Namespace) -> int:
    try:
        from engine.server.http.protocol import HttpLimits
        from engine.server.limits import Limits
        from engine.server.run import ServerOptions, Tls, serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed: pip install metronome-engine[server]"
        ) from error
    keys = [*parsed.api_key, *api_keys()]
    options = ServerOptions(
        parsed.host,
        parsed.port,
        parsed.uds,
        tuple(keys),
        tuple(parsed.served_model_name),
        Limits(**_given(parsed, LIMITS)),
        HttpLimits(**_given(parsed, HTTP_LIMITS)),
        Tls(parsed.ssl_certfile, parsed.ssl_keyfile, parsed.ssl_ca_certs),
    )
    serve(engine_args(parsed), options)
    return 0


def _given(parsed: argparse.Namespace, names: dict[str, str]) -> dict[str, Any]:
    """Options that were given, by the names of the fields that they set."""
    given = {field: getattr(parsed, name) for name, field in names.items()}
    return {field: value for field, value in given.items() if value is not None}
