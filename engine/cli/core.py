"""Run an engine core for other processes; prints its address when it is ready."""

from __future__ import annotations

import argparse
import logging
import signal

import zmq

from engine.cli.options import add_engine_options, engine_args
from engine.config.args import EngineArgs
from engine.config.engine import EngineConfig
from engine.config.option import FRONT_END, STARTER, options_of
from engine.core.build import build_core
from engine.core.inproc_client import InprocClient
from engine.errors import ConfigError, EngineDeadError
from engine.ipc import sockets
from engine.ipc.address import TCP, Address, Directory, tcp_address
from engine.observe.background import logging_in_background
from engine.observe.logs import set_up_logging
from engine.rpc.host import EngineCoreHost

logger = logging.getLogger("engine.core")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="tcp://HOST:PORT, encrypted with the secret in METRONOME_CORE_SECRET; also uses the "
        "next port. Default: a new socket file that only this user can open",
    )
    add_engine_options(parser)


def run(parsed: argparse.Namespace) -> int:
    for name in options_of(EngineArgs, FRONT_END, STARTER):
        if name in parsed:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for clients of a core: give it to them, and leave "
                "it out here"
            )
    config = engine_args(parsed).create_config()
    listen: str | None = parsed.listen
    if listen is not None and not listen.startswith(TCP):
        raise ConfigError(f"--listen is {listen!r}, must start with {TCP}, or be left out")
    set_up_logging(config.log_level)
    address = None if listen is None else tcp_address(listen, config.core.core_secret)
    if address is not None:
        check_free(address)
    with logging_in_background():  # so that no step waits for a slow reader of the log
        _serve(address, config)
    return 0


def _serve(address: Address | None, config: EngineConfig) -> None:
    core = build_core(config)
    host = _host_at(address, core, config)
    try:
        host.handle_signals(signal.SIGTERM, signal.SIGINT)
        print(f"core address: {host.address.data}", flush=True)
        host.serve()
    except EngineDeadError:
        logger.exception("this core has died")  # clients do not show this error
        raise
    finally:
        host.close()


def check_free(address: Address) -> None:
    """Raise ``ConfigError`` if a core cannot listen at the address. Quick: loads no model."""
    with zmq.Context() as context:
        for each in (address.data, address.control):
            sockets.close(sockets.bind(context, each, address.secret))


def _host_at(address: Address | None, core: InprocClient, config: EngineConfig) -> EngineCoreHost:
    """Make the host that serves ``core`` to other processes at ``address``, or at a new socket file
    if the address is ``None``."""
    if address is not None:
        return EngineCoreHost(core, config, address)
    directory = Directory.create()
    return EngineCoreHost(core, config, directory.address, directory=directory)
