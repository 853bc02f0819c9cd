"""Serve the model over HTTP, with OpenAI's API."""

from __future__ import annotations

import argparse

from engine.cli.options import add_engine_options, engine_args
from engine.config.env import API_KEY, api_keys
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
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="as clients call the model, repeatable; the first is in answers",
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
        parsed.host, parsed.port, parsed.uds, tuple(keys), tuple(parsed.served_model_name)
    )
    serve(engine_args(parsed), options)
    return 0
