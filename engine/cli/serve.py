"""Serve the model over HTTP, with OpenAI's API."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.cli.options import add_further_options, add_often_used, engine_args, take_model
from engine.config.args import EngineArgs
from engine.config.env import ADMIN_API_KEY, API_KEY, admin_api_key, api_keys
from engine.errors import ConfigError, reason_of

LIMITED = (
    "max_body_bytes", "max_n", "max_logprobs", "max_requests_per_key", "refuse_server_tools",
)  # fmt: skip
LIMITS = {name: name for name in LIMITED}
HTTP_LIMITS = {"header_timeout": "header_seconds", "body_timeout": "body_seconds"}

TLS = {
    "certfile": "the server's certificate: HTTPS instead of HTTP",
    "keyfile": "its key, unless it is in the same file",
    "ca-certs": "clients must show a certificate that one of these has signed",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    add_often_used(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000")
    group.add_argument("--uds", metavar="PATH", help="a socket file instead of host and port")
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
    group.add_argument(
        "--refuse-server-tools",
        action="store_true",
        help="refuse requests with tools that a server would run (web_search and the like), "
        "instead of leaving these out",
    )
    _add_watching(group)
    _add_access(parser.add_argument_group("access to the server"))
    _add_limits(parser.add_argument_group("limits of the server"))
    add_further_options(parser)


def _add_access(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"API key that clients must send, repeatable; {API_KEY} adds one. "
        "Without any, no key is needed",
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
    for name, about in TLS.items():
        group.add_argument(f"--ssl-{name}", metavar="FILE", help=about)
    _add_origins(group)


def _add_origins(group: argparse._ArgumentGroup) -> None:
    lists = {
        "allowed-origins": (
            "ORIGIN",
            "pages that may use the server from a browser, as "
            "http://localhost:5173, or *; default: none",
        ),
        "allowed-methods": ("METHOD", "that these pages may use; default: all"),
        "allowed-headers": ("HEADER", "that these pages may send; default: all"),
    }
    for name, (metavar, about) in lists.items():
        group.add_argument(
            f"--{name}",
            action="append",
            default=[],
            metavar=metavar,
            help=f"{about}; repeatable, or a JSON list",
        )
    group.add_argument(
        "--allow-credentials", action="store_true", help="these pages may send cookies"
    )


def _add_watching(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--health-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="in which the core must answer to be well, between two steps; default: 10",
    )
    group.add_argument(
        "--request-log",
        choices=("text", "json", "off"),
        help="a line in the log for each request, without its text; json: an object a line. "
        "Default: text, if the log level is info",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="where spans of finished requests are sent, as http://127.0.0.1:4318/v1/traces",
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


def _add_limits(group: argparse._ArgumentGroup) -> None:
    """Defaults are those of ``ServerLimits`` and ``HttpLimits``, which are imported only to
    serve."""
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
        from engine.server.http.origins import AllowedOrigins, listed
        from engine.server.http.protocol import HttpLimits
        from engine.server.limits import ServerLimits
        from engine.server.run import ServerOptions, Tls, serve
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
        reader_timeout=parsed.reader_timeout,
        request_log=parsed.request_log,
        max_queue_seconds=parsed.max_queue_seconds,
        limits=ServerLimits(**_given(parsed, LIMITS)),
        http=HttpLimits(**_given(parsed, HTTP_LIMITS)),
        tls=Tls(parsed.ssl_certfile, parsed.ssl_keyfile, parsed.ssl_ca_certs),
        origins=AllowedOrigins(
            listed("allowed-origins", parsed.allowed_origins),
            listed("allowed-methods", parsed.allowed_methods) or ("*",),
            listed("allowed-headers", parsed.allowed_headers) or ("*",),
            parsed.allow_credentials,
        ),
    )
    take_model(parsed)
    return serve(core_apart(engine_args(parsed, "info"), parsed), options)


def _template(path: str | None) -> str | None:
    """Raises ``ConfigError`` if it cannot be read."""
    if path is None:
        return None
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"--chat-template is {path!r}, which cannot be read: {reason_of(error)}"
        raise ConfigError(message) from error


def _given(parsed: argparse.Namespace, names: dict[str, str]) -> dict[str, Any]:
    """Options that were given, by the names of the fields that they set."""
    given = {field: getattr(parsed, name) for name, field in names.items()}
    return {field: value for field, value in given.items() if value is not None}


def core_apart(args: EngineArgs, parsed: argparse.Namespace) -> EngineArgs:
    """The core has a process of its own unless an option says otherwise: it would share Python's
    lock with the streams."""
    if "multiprocess" in parsed or args.core_address is not None:
        return args
    return replace(args, multiprocess=True)
