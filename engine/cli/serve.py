"""Serve the model over HTTP, with OpenAI's API."""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.cli.options import add_engine_options, engine_args
from engine.config.env import ADMIN_API_KEY, API_KEY, admin_api_key, api_keys
from engine.errors import ConfigError


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
        "--api-key-file",
        metavar="FILE",
        help="further keys, one a line; read again when it has changed",
    )
    group.add_argument(
        "--admin-api-key",
        metavar="KEY",
        help=f"of those who may pause the engine and the like; or {ADMIN_API_KEY}",
    )
    group.add_argument(
        "--health-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="in which the core must answer to be well, between two steps; default: 10",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="where spans of finished requests are sent, as http://127.0.0.1:4318/v1/traces",
    )
    group.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="as clients call the model, repeatable; the first is in answers",
    )
    group.add_argument(
        "--chat-template", metavar="PATH", help="a file with one, instead of the model's own"
    )
    add_engine_options(parser)


def run(parsed: argparse.Namespace) -> int:
    try:
        from engine.server.run import ServerOptions, serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed: pip install metronome-engine[server]"
        ) from error
    keys = [*parsed.api_key, *api_keys()]
    options = ServerOptions(
        host=parsed.host,
        port=parsed.port,
        uds=parsed.uds,
        api_keys=tuple(keys),
        served_model_name=tuple(parsed.served_model_name),
        chat_template=_template(parsed.chat_template),
        api_key_file=parsed.api_key_file,
        admin_api_key=parsed.admin_api_key or admin_api_key(),
        health_timeout=parsed.health_timeout,
        otlp_traces_endpoint=parsed.otlp_traces_endpoint,
    )
    serve(engine_args(parsed), options)
    return 0


def _template(path: str | None) -> str | None:
    """Raises ``ConfigError`` if it cannot be read."""
    if path is None:
        return None
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template is {path!r}, which cannot be read: {error}") from error
