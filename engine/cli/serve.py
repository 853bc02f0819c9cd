"""Serve the model over HTTP, with OpenAI's API."""

from __future__ import annotations

import argparse
from dataclasses import replace

from engine.cli.options import add_engine_options, engine_args
from engine.config.args import EngineArgs
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
    group.add_argument(
        "--reader-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="requests of clients that read nothing for so long are aborted; default: 30",
    )
    group.add_argument(
        "--max-queue-seconds",
        type=float,
        metavar="SECONDS",
        help="refuse requests that would wait longer for their first token, by the pace of late "
        "ones; default: only their number is limited, as max-waiting-requests says or to 8 for "
        "each of max-num-seqs",
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
        reader_timeout=parsed.reader_timeout,
        max_queue_seconds=parsed.max_queue_seconds,
    )
    serve(core_apart(engine_args(parsed), parsed), options)
    return 0


def core_apart(args: EngineArgs, parsed: argparse.Namespace) -> EngineArgs:
    """Unless told otherwise the core has a process of its own: it would share Python's lock with
    the streams. One of several that dies takes none of the others with it."""
    chosen: dict[str, bool] = {}
    if "multiprocess" not in parsed and args.core_address is None:
        chosen["multiprocess"] = True
    if "survive_core_death" not in parsed:
        chosen["survive_core_death"] = True
    return replace(args, **chosen)  # type: ignore[arg-type]
