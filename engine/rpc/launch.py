"""Starts or attaches to the core of a configuration, and returns its client."""

from __future__ import annotations

import logging
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from engine.assets import BOX_MODEL
from engine.config.cache import share_of_cache
from engine.config.engine import EngineConfig, with_shared_blocks
from engine.config.model import ModelConfig
from engine.core.build import build_core
from engine.core.client import CoreClient
from engine.core.inproc_client import InprocClient
from engine.errors import ConfigError, EngineDeadError, EngineError
from engine.ipc.address import Address, Directory, address_of
from engine.ipc.arena import share_arena
from engine.ipc.process import NO_VALUES, Child, Line, ParentWatch, StartReport, report_to_parent
from engine.observe.background import logging_in_background
from engine.observe.logs import set_up_logging
from engine.observe.steplog import core_log
from engine.rpc.apart import Roles, check_shared, roles_of
from engine.rpc.failures import KINDS, death_of
from engine.rpc.gpus import environments_of
from engine.rpc.host import ORPHANED, EngineCoreHost
from engine.rpc.many_client import ManyCoresClient, shut_down
from engine.rpc.restarts import Start, Starting
from engine.rpc.zmq_client import EngineCoreClient

logger = logging.getLogger("engine.core")

Build = Callable[[EngineConfig], InprocClient]

EXIT_SECONDS = 1.0  # time for the process to exit after its core has ended


def open_core(config: EngineConfig) -> CoreClient:
    """Open the configured core or cores: in this process, in new processes, or by connecting to
    running ones. Raises ``ConfigError`` for invalid combinations of options."""
    addresses = config.core.core_addresses
    if len(addresses) > 1:
        return attach_cores(config, addresses)
    if addresses:
        return attach_core(config, addresses[0])
    if config.core.num_cores > 1 or config.core.on_core_death == "restart":
        return start_cores(config, build_core)
    if config.core.multiprocess:
        return start_core(config, build_core)
    return build_core(without_transport(config))


def without_transport(config: EngineConfig) -> EngineConfig:
    """The configuration of a core in this process, to which no pixels are sent."""
    transport = config.media.mm_tensor_transport
    if transport != "default":
        logger.warning(
            "mm_tensor_transport=%s has no effect, because the core is in this process; start it "
            "with multiprocess=True to use it",
            transport,
        )
    return replace(config, media=replace(config.media, mm_tensor_transport="default"))


def start_core(config: EngineConfig, build: Build) -> EngineCoreClient:
    """Start a core in a new process, which ends with the client or with this process.

    ``build`` and all of ``config`` must be importable in the new process. Raises the errors of
    ``build``, and ``EngineDeadError`` if the process ends before it is ready.
    """
    return connect(config, *spawn(config, build))


def start_cores(config: EngineConfig, build: Build) -> ManyCoresClient:
    """Start the cores that the options want, each in a process with its share of the machine or
    its own GPU. Raises ``ConfigError`` if there are too few GPUs or too little memory."""
    num_cores, environments = config.core.num_cores, [NO_VALUES]
    config = with_shared_blocks(config)
    own = share_of(config, num_cores) if num_cores > 1 else config
    if num_cores > 1:
        environments = environments_of(
            config.device, num_cores, config.core.sizes, config.parallel.num_workers
        )
    num_starts = [count() for _ in range(num_cores)]
    arena = share_arena(config.cache, num_cores, config.parallel.num_workers)
    check_shared(config, arena.handle)
    own = replace(own, kv_arena=arena.handle)

    def start(index: int) -> Starting:
        config = started(numbered(own, index, num_cores), next(num_starts[index]))
        child, address = spawn(config, build, environments[index])
        return Starting(child, partial(connect, own, child, address))

    with ExitStack() as failing:
        failing.callback(arena.close)
        starting = []
        for index in range(num_cores):  # all load concurrently
            starting.append(start(index))
            failing.callback(starting[-1].child.close)
        restarts = start if config.core.on_core_death == "restart" else None
        clients = iter(connect_all(starting))
        return many(failing, clients, restarts, arena.close, roles_of(config.core))


def connect_all(starting: Sequence[Starting]) -> list[EngineCoreClient]:
    """Wait for cores that are loading, and return their clients. If one fails, its error is raised
    at once and the other cores are ended."""
    with ThreadPoolExecutor(len(starting)) as threads:
        meetings = [threads.submit(each.connect) for each in starting]
        try:
            for each in as_completed(meetings):
                each.result()
        except BaseException:
            for core in starting:
                core.child.kill()
            wait(meetings)
            shut_down([each.result() for each in meetings if each.exception() is None])
            raise
    return [each.result() for each in meetings]


def many(
    failing: ExitStack,
    clients: Iterator[EngineCoreClient],
    start: Start | None = None,
    at_end: Callable[[], object] = lambda: None,
    roles: Roles | None = None,
) -> ManyCoresClient:
    """Combine the clients of several cores into one, which calls ``at_end`` after its shutdown. If
    this fails, the clients made so far are shut down when ``failing`` is closed. roles: if some
    cores only compute prompts."""
    known: list[EngineCoreClient] = []
    failing.callback(shut_down, known)
    for client in clients:
        known.append(client)
    together = ManyCoresClient(known, start=start, at_end=at_end, roles=roles)
    failing.pop_all()
    return together


def share_of(config: EngineConfig, num_cores: int) -> EngineConfig:
    """The configuration of each of ``num_cores`` cores on one machine, with an equal share of its
    memory and threads."""
    cores = len(os.sched_getaffinity(0)) if config.num_threads is None else config.num_threads
    cache = share_of_cache(config.cache, num_cores)
    return replace(config, cache=cache, num_threads=max(1, cores // num_cores))


def numbered(config: EngineConfig, index: int, num_cores: int) -> EngineConfig:
    """Return the configuration of one of several cores, which publishes events at an address of
    its own and has its number in the name of its step log."""
    log = config.step_log
    if log is not None and num_cores > 1:
        log = core_log(log, index)
    return replace(config, step_log=log, core_index=index, num_cores=num_cores)


def started(config: EngineConfig, num_before: int) -> EngineConfig:
    """Return the configuration for a core that was started ``num_before`` times before. This number
    is appended to the name of its step log, so that the earlier logs are kept."""
    if not num_before or config.step_log is None:
        return config
    return replace(config, step_log=f"{config.step_log}.{num_before}")


def spawn(
    config: EngineConfig, build: Build, environment: Mapping[str, str] = NO_VALUES
) -> tuple[Child, Address]:
    """Start a process that builds a core. Returns the process and the core's address."""
    directory = Directory.create()
    address = directory.address
    child = Child(
        "engine core",
        serve_child,
        build,
        config,
        str(directory.path),
        at_end=directory.remove,
        environment=environment,
    )
    return child, address


def connect(config: EngineConfig, child: Child, address: Address) -> EngineCoreClient:
    """Wait for the core of a process; returns its client. On failure the process is ended."""
    with ExitStack() as failing:
        failing.callback(child.close)
        report = child.wait_until_ready(config.core.core_ready_timeout)
        if not report.is_ready:
            raise start_error(report)
        client = EngineCoreClient(
            address,
            child=child,
            hang_timeout=config.core.core_hang_timeout,
            media=config.media,
        )
        failing.pop_all()
    logger.info("the engine core at %s is ready (process %d)", address.data, child.pid)
    return client


def attach_core(config: EngineConfig, address: str) -> EngineCoreClient:
    """A client of a running core, which continues after the client disconnects."""
    with ExitStack() as failing:
        client = EngineCoreClient(
            address_of(address, config.core.core_secret),
            hang_timeout=config.core.core_hang_timeout,
            media=config.media,
        )
        failing.callback(client.shutdown)
        check_model(config.model, address, client.decided.model)
        failing.pop_all()
    return client


def check_model(ours: ModelConfig, address: str, theirs: str) -> None:
    """Check that the default tokenizer fits the model ``theirs`` of the core at ``address``, if the
    user named no model. Raises ``ConfigError`` if it does not."""
    is_named = ours.model != str(BOX_MODEL) or ours.tokenizer is not None
    if is_named or ours.skip_tokenizer_init or Path(theirs).name in ("", BOX_MODEL.name):
        return
    raise ConfigError(
        f"the core at {address} runs {theirs}, but this engine has no model for the tokenizer: set "
        "model to the same model, or set skip_tokenizer_init"
    )


def attach_cores(config: EngineConfig, addresses: Sequence[str]) -> ManyCoresClient:
    """A client of several running cores, which continue after the client disconnects."""
    with ExitStack() as failing:
        return many(failing, (attach_core(config, address) for address in addresses))


def start_error(report: StartReport) -> EngineError:
    """The reported error of a core that did not start; ``EngineDeadError`` if it crashed."""
    kind = KINDS.get(report.kind)
    if kind is not None:
        return kind(report.message)
    return death_of(
        f"Engine core initialization failed: {report.kind}: {report.message}", report.traceback
    )


def serve_child(line: Line, build: Build, config: EngineConfig, path: str) -> None:
    """The main function of a core's process, which listens at a socket file in ``path``."""
    directory = Directory(Path(path))

    def make_host() -> EngineCoreHost:
        return EngineCoreHost(build(config), config, directory.address, directory=directory)

    serve_for_parent(line, config, make_host, at_loss=directory.remove)


def serve_for_parent(
    line: Line,
    config: EngineConfig,
    make_host: Callable[[], EngineCoreHost],
    *,
    at_loss: Callable[[], object] = lambda: None,
    serves_others: bool = False,
) -> None:
    """Make a core's host in this process, report its address to the parent, and serve until the
    parent ends or requests the end. The log is written in a thread, so that no step waits for it.

    at_loss: called before this process ends if the parent has died while the core was made.
    serves_others: the clients are not the parent, and must learn of its death as of the core's."""
    watch = ParentWatch(line, lambda: _leave(at_loss))  # also while the model is being loaded
    set_up_logging(config.log_level, f"core {config.core_index}" if config.num_cores > 1 else "")
    with logging_in_background():
        _serve_core(line, make_host, watch, serves_others)


def _serve_core(
    line: Line, make_host: Callable[[], EngineCoreHost], watch: ParentWatch, serves_others: bool
) -> None:
    try:
        host = make_host()
    except Exception as error:
        report_to_parent(
            line, StartReport(False, type(error).__name__, str(error), traceback.format_exc())
        )
        return
    watch.on_death = lambda: _end_orphaned(host, at_once=serves_others and not watch.is_requested)
    host.handle_signals(signal.SIGTERM)
    report_to_parent(line, StartReport(True, address=host.address.data))
    try:
        host.serve()
    except EngineDeadError:  # clients have received the error; the parent sees the exit status
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        host.close()


def _end_orphaned(host: EngineCoreHost, at_once: bool) -> None:
    """End the core and then this process, because the parent process has died or requested it."""
    if at_once:  # no last messages: to clients the core has died
        os._exit(ORPHANED)
    host.end_orphaned()
    time.sleep(EXIT_SECONDS)
    os._exit(ORPHANED)


def _leave(at_loss: Callable[[], object]) -> None:
    at_loss()
    os._exit(ORPHANED)
