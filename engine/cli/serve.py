"""Serve the model over HTTP: text, or embeddings and scores, with OpenAI's API and others."""

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

ROLES = {
    "prefill": "cores that compute long prompts, the same as --prefill-cores",
    "decode": "cores that compute the rest, the same as --decode-cores",
}
TLS = {
    "certfile": "the server's certificate; enables HTTPS",
    "keyfile": "the certificate's key, if it is in another file",
    "ca-certs": "clients must present a certificate signed by one of these",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    add_often_used(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000")
    group.add_argument("--uds", metavar="PATH", help="socket file to listen on, not host and port")
    for name, about in ROLES.items():
        group.add_argument(
            f"--{name}",
            dest=f"{name}_cores",
            type=int,
            metavar="N",
            default=argparse.SUPPRESS,
            help=about,
        )
    group.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="model name for clients, repeatable; answers have the first one",
    )
    group.add_argument(
        "--chat-template", metavar="PATH", help="file with a template that replaces the model's"
    )
    group.add_argument(
        "--refuse-server-tools",
        action="store_true",
        help="refuse requests with tools that a server would run (web_search and the like) instead "
        "of ignoring these tools",
    )
    group.add_argument(
        "--no-page",
        dest="page",
        action="store_false",
        help="serve no page for browsers at /; by default it is open, its data need a key",
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
        help=f"API key that clients must send, repeatable. Other users see command lines: "
        f"{API_KEY} or --api-key-file hides it. Default: no key is required",
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="file with further keys, one per line; read again when it changes",
    )
    group.add_argument(
        "--user-from-key",
        action="store_true",
        help="the API key, not the field user of a request, is the user among whom fair policies "
        "share",
    )
    group.add_argument(
        "--admin-api-key",
        metavar="KEY",
        help="key required to pause the engine and the like; "
        f"{ADMIN_API_KEY} hides it from other users",
    )
    for name, about in TLS.items():
        group.add_argument(f"--ssl-{name}", metavar="FILE", help=about)
    _add_origins(group)


def _add_origins(group: argparse._ArgumentGroup) -> None:
    lists = {
        "allowed-origins": (
            "ORIGIN",
            "web pages that may use the server from a browser, as "
            "http://localhost:5173, or *; default: none",
        ),
        "allowed-methods": ("METHOD", "methods that these pages may use; default: all"),
        "allowed-headers": ("HEADER", "headers that these pages may send; default: all"),
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
        "--allow-credentials", action="store_true", help="let these pages send cookies"
    )


def _add_watching(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--health-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="time limit for the core's answer to health checks, between two steps; default: 10",
    )
    group.add_argument(
        "--request-log",
        choices=("text", "json", "off"),
        help="log one line per request, without its text; json: one object per line. "
        "Default: text, if the log level is info",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="address for spans of finished requests, as http://127.0.0.1:4318/v1/traces",
    )
    group.add_argument(
        "--reader-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="abort requests whose client reads nothing for this long; default: 30",
    )
    group.add_argument(
        "--max-queue-seconds",
        type=float,
        metavar="SECONDS",
        help="refuse requests whose estimated wait for the first token is longer, judged by recent "
        "requests. Default: only the queue's length is limited, by max-waiting-requests or else 8 "
        "times max-num-seqs",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    """Add the options that limit requests. They have no defaults here: ``ServerLimits`` and
    ``HttpLimits`` set them."""
    wholes = {
        "max-body-bytes": "size of a request; default: 33554432",
        "max-n": "completions per prompt; default: 128",
        "max-logprobs": "log-probabilities per token, -1 for no limit; default: 20",
        "max-requests-per-key": "open requests of a key, running or waiting; more get 429; "
        "default: no limit",
    }
    for name, about in wholes.items():
        group.add_argument(f"--{name}", type=int, metavar="N", help=about)
    reals = {
        "header-timeout": "time limit for the headers of a request; default: 10",
        "body-timeout": "time limit for the body of a request; default: 60",
    }
    for name, about in reals.items():
        group.add_argument(f"--{name}", type=float, metavar="SECONDS", help=about)


def run(parsed: argparse.Namespace) -> int:
    try:
        from engine.server.private_parts import UVICORN, check_private_parts

        check_private_parts(UVICORN)
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
        user_from_key=parsed.user_from_key,
        health_timeout=parsed.health_timeout,
        otlp_traces_endpoint=parsed.otlp_traces_endpoint,
        reader_timeout=parsed.reader_timeout,
        has_page=parsed.page,
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
    args = engine_args(parsed, "info", finds_model=True)
    return serve(core_apart(args, parsed), options)


def _template(path: str | None) -> str | None:
    """Read a chat template. Raises ``ConfigError`` if it cannot be read."""
    if path is None:
        return None
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"--chat-template is {path!r}, which cannot be read: {reason_of(error)}"
        raise ConfigError(message) from error


def _given(parsed: argparse.Namespace, names: dict[str, str]) -> dict[str, Any]:
    """Return the options that the user set, as field values. ``names`` maps each option to the
    field that it sets."""
    given = {field: getattr(parsed, name) for name, field in names.items()}
    return {field: value for field, value in given.items() if value is not None}


def core_apart(args: EngineArgs, parsed: argparse.Namespace) -> EngineArgs:
    """Run the core in its own process unless the user chose otherwise: in the server's process, the
    core and the HTTP streams would compete for Python's global lock."""
    if "multiprocess" in parsed or args.core_address is not None:
        return args
    return replace(args, multiprocess=True)
