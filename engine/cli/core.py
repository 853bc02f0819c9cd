"""Run an engine core that other processes use; prints its address when it is ready."""

from __future__ import annotations

import argparse
import signal

from engine.cli.options import add_engine_options, engine_args
from engine.config.engine import EngineConfig
from engine.core.build import build_core
from engine.core.client import InprocClient
from engine.core.host import EngineCoreHost
from engine.errors import ConfigError
from engine.ipc.place import TCP, Address, Directory, tcp_address
from engine.observe.logs import set_up_logging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="tcp://HOST:PORT, encrypted with the secret in METRONOME_CORE_SECRET; the next port "
        "is taken too. Without it, a new socket file that only this user can open",
    )
    add_engine_options(parser)


def run(parsed: argparse.Namespace) -> int:
    config = engine_args(parsed).create_config()
    if config.core.core_address is not None or config.core.multiprocess:
        raise ConfigError("a core is started here: leave out --core-address and --multiprocess")
    listen: str | None = parsed.listen
    if listen is not None and not listen.startswith(TCP):
        raise ConfigError(f"--listen is {listen!r}, must begin with {TCP}, or be left out")
    set_up_logging(config.log_level)
    address = None if listen is None else tcp_address(listen, config.core.core_secret)
    core = build_core(config)
    host = _host_at(address, core, config)
    try:
        host.handle_signals(signal.SIGTERM, signal.SIGINT)
        print(f"core address: {host.address.data}", flush=True)
        host.serve()
    finally:
        host.close()
    return 0


def _host_at(address: Address | None, core: InprocClient, config: EngineConfig) -> EngineCoreHost:
    """A host at this address, or at a new socket file."""
    if address is not None:
        return EngineCoreHost(core, config, address)
    directory = Directory.create()
    return EngineCoreHost(core, config, directory.address, directory=directory)
