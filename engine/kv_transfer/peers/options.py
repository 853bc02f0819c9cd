"""Options of the connector ``peers``: who serves KV blocks where, and from whom they are read."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network
from typing import Any, NamedTuple

from engine.config.cache import PEERS
from engine.errors import ConfigError
from engine.ipc.address import MIN_SECRET_CHARS, TCP

ROLES = ("kv_both", "kv_producer", "kv_consumer")
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 14579
MOST_PORT = 65534
DEFAULT_SECONDS, MOST_SECONDS = 1.0, 1.5
EXTRA = ("allowed", "timeout", "shares_memory", "transport", "protocol", "device")
TRANSPORTS = ("tcp", "mooncake")
LOOPBACK = IPv4Network("127.0.0.0/8")
OPTION = "kv_transfer_config"


class Allowed(NamedTuple):
    """Addresses from which blocks may be read. ``port``: ``None`` for any."""

    network: IPv4Network
    port: int | None = None


class PeerOptions(NamedTuple):
    """``host``, ``port``: where this engine serves its blocks. ``allowed``: from where it reads
    blocks, besides this machine. ``timeout``: seconds for a connection, until the other engine has
    stored its blocks, and for a transfer besides its bytes. ``shares_memory``: read blocks of
    engines on this machine through shared memory. ``transport``: "tcp" or "mooncake"; ``protocol``,
    ``device``: as Mooncake names them."""

    role: str = "kv_both"
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    engine_id: str = ""
    allowed: tuple[Allowed, ...] = ()
    timeout: float = DEFAULT_SECONDS
    shares_memory: bool = True
    transport: str = "tcp"
    protocol: str = "tcp"
    device: str = ""

    @property
    def sends(self) -> bool:
        """Whether this engine serves the blocks that it has computed."""
        return self.role != "kv_consumer"

    @property
    def receives(self) -> bool:
        """Whether this engine reads blocks of others."""
        return self.role != "kv_producer"

    @property
    def address(self) -> str:
        """Where this engine serves its blocks."""
        return peer_address(self.host, self.port)

    def allows(self, host: str, port: int) -> bool:
        """True if blocks may be read from there."""
        ip = IPv4Address(host)
        return ip in LOOPBACK or any(
            ip in each.network and each.port in (None, port) for each in self.allowed
        )


def peer_address(host: str, port: int) -> str:
    """The address of a server of blocks."""
    return f"{TCP}{host}:{port}"


def peer_options(options: Mapping[str, Any], number: int, num_servers: int) -> PeerOptions:
    """Read the options of ``kv_transfer_config``. Of ``num_servers``, one for each rank of each
    core, this one uses the port ``kv_port + number``. Raises ``ConfigError``."""
    host, port = options.get("kv_ip", DEFAULT_HOST), options.get("kv_port", DEFAULT_PORT)
    ip = as_ip(host)
    if ip is None or ip == IPv4Address(0):
        raise ConfigError(
            f"{OPTION}: kv_ip is {host!r:.80}, must be the IPv4 address by which other engines "
            "reach this machine"
        )
    most = MOST_PORT + 1 - num_servers
    if not is_port(port) or port > most:
        raise ConfigError(
            f"{OPTION}: kv_port is {port!r:.80}, must be in 1..{most}; each rank of each core "
            "uses the next port"
        )
    engine_id = options.get("engine_id") or f"{ip}:{port + number}"
    if not isinstance(engine_id, str):
        raise ConfigError(f"{OPTION}: engine_id is {engine_id!r:.80}, must be a string")
    own = PeerOptions(options.get("kv_role", "kv_both"), str(ip), port + number, engine_id)
    return _with_extra(own, options.get("kv_connector_extra_config") or {})


def _with_extra(own: PeerOptions, extra: Mapping[str, Any]) -> PeerOptions:
    """The options with those of ``kv_connector_extra_config``. Raises ``ConfigError``."""
    if unknown := [name for name in extra if name not in EXTRA]:
        raise ConfigError(
            f"{OPTION}: kv_connector_extra_config has {', '.join(map(repr, unknown))}, which "
            f"{PEERS!r} does not know; it takes {', '.join(EXTRA)}"
        )
    timeout = extra.get("timeout", own.timeout)
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not is_number or not 0.0 < timeout <= MOST_SECONDS:
        raise ConfigError(
            f"{OPTION}: timeout is {timeout!r:.80}, must be a number of seconds above 0 and at "
            f"most {MOST_SECONDS:g}"
        )
    if not isinstance(shares_memory := extra.get("shares_memory", True), bool):
        raise ConfigError(
            f"{OPTION}: shares_memory is {shares_memory!r:.80}, must be True or False"
        )
    transport = extra.get("transport", own.transport)
    if transport not in TRANSPORTS:
        raise ConfigError(
            f"{OPTION}: transport is {transport!r:.80}, must be one of {', '.join(TRANSPORTS)}"
        )
    return own._replace(
        allowed=_allowed(extra.get("allowed", [])),
        timeout=float(timeout),
        shares_memory=shares_memory,
        transport=transport,
        protocol=str(extra.get("protocol", own.protocol)),
        device=str(extra.get("device", own.device)),
    )


def check_secret(secret: str | None) -> str:
    """Raise ``ConfigError`` if there is no secret with which connections are encrypted."""
    if secret is None or len(secret) < MIN_SECRET_CHARS:
        raise ConfigError(
            f"{OPTION}: kv_connector is {PEERS!r}, whose connections are encrypted with a secret "
            f"of at least {MIN_SECRET_CHARS} characters: set METRONOME_CORE_SECRET to the same "
            "value for all these engines"
        )
    return secret


def as_ip(host: object) -> IPv4Address | None:
    """An IPv4 address, or ``localhost``; ``None`` for anything else."""
    if host == "localhost":
        return IPv4Address(DEFAULT_HOST)
    try:
        return IPv4Address(host) if isinstance(host, str) else None
    except ValueError:
        return None


def is_port(port: object) -> bool:
    """True for the number of a TCP port."""
    return isinstance(port, int) and not isinstance(port, bool) and 0 < port <= MOST_PORT


def _allowed(given: object) -> tuple[Allowed, ...]:
    if not isinstance(given, list | tuple):
        raise ConfigError(f"{OPTION}: allowed is {given!r:.80}, must be a list of addresses")
    return tuple(_one_allowed(each) for each in given)


def _one_allowed(given: object) -> Allowed:
    host, colon, port = str(given).partition(":")
    try:
        network = IPv4Network("127.0.0.1" if host == "localhost" else host)
        if not colon:
            return Allowed(network)
        if port.isdecimal() and is_port(int(port)):
            return Allowed(network, int(port))
    except ValueError:
        pass
    raise ConfigError(
        f"{OPTION}: allowed has {given!r:.80}, must be an IPv4 address or network, such as "
        "'10.0.0.5', '10.0.0.5:14579' or '10.0.0.0/24'"
    )
