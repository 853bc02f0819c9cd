"""Which hosts pictures may come from, and which of their addresses are connected to.

A host must be in the list of ``--allowed-media-domains``. Its addresses must be public, or be in
the list themselves: a name that an attacker controls may resolve to a machine inside.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import urlsplit

import idna

from engine.errors import ConfigError, RequestError
from engine.pictures.errors import refused

PORTS = {"http": 80, "https": 443}
MOST_URL_CHARS = 8192
OPTION = "--allowed-media-domains"
NAT64 = ip_network("64:ff9b::/96")
Address = IPv4Address | IPv6Address


class Place(NamedTuple):
    """Where a URL points to."""

    scheme: str
    host: str
    port: int
    target: str
    """Path and query."""

    @property
    def shown(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


class AllowedHosts:
    """The hosts of ``allowed_media_domains``. Entries are names or addresses, with a port or for
    all ports. Names inside of a domain are hosts of their own."""

    def __init__(self, entries: Iterable[str]) -> None:
        """Raises ``ConfigError`` for an entry that is no host."""
        self._hosts = {_entry(each) for each in entries}

    def check(self, place: Place) -> None:
        """Raise ``RequestError`` if the host of a URL is not in the list."""
        if not self._has(place.host, place.port):
            raise refused(
                f"a picture's host {place.host!r:.100} (port {place.port}) is not allowed: send "
                f"the picture as a data URL, or add the host to {OPTION} of the server"
            )

    def addresses(self, place: Place) -> list[str]:
        """The addresses of a checked host that may be connected to. Raises ``RequestError`` if it
        has none. Waits for the system's resolver."""
        try:
            found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise refused(
                f"a picture's host {place.host!r:.100} has no address: correct its URL"
            ) from error
        texts = list(dict.fromkeys(str(each[4][0]) for each in found))
        allowed = [text for text in texts if self._may_connect(text, place.port)]
        if not allowed:
            raise refused(
                f"a picture's host {place.host!r:.100} has only addresses that are not public: "
                f"send the picture as a data URL, or add the address to {OPTION} of the server"
            )
        return allowed

    def _has(self, host: str, port: int) -> bool:
        return (host, None) in self._hosts or (host, port) in self._hosts

    def _may_connect(self, text: str, port: int) -> bool:
        address = ip_address(text.partition("%")[0])
        return is_public(address) or self._has(str(address), port)


def place_of(url: str) -> Place:
    """The place of an http or https URL. Raises ``RequestError`` for a malformed one."""
    if len(url) > MOST_URL_CHARS:
        raise refused(
            f"a picture's URL has {len(url)} characters, the limit is {MOST_URL_CHARS}: shorten it"
        )
    if not url.isascii() or not url.isprintable() or any(char in url for char in ' \\"<>'):
        raise _malformed(url, "has characters that must be percent-encoded")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _malformed(url, f"is malformed ({error})") from error
    scheme, host = parts.scheme.lower(), parts.hostname or ""
    if parts.username is not None or parts.password is not None:
        raise refused(
            "a picture's URL has a user name or password: leave them out, they are not sent"
        )
    if not host:
        raise _malformed(url, "has no host")
    target = parts.path or "/"
    return Place(
        scheme,
        _canonical(host),
        PORTS[scheme] if port is None else port,
        f"{target}?{parts.query}" if parts.query else target,
    )


def is_public(address: Address) -> bool:
    """Whether an address is of the public internet, and so is an IPv4 address within it."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in NAT64:
            inner = IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is None and address.teredo is not None:
            inner = address.teredo[1]
        if inner is not None:
            return is_public(inner)
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not address.is_unspecified
    )


def _entry(text: str) -> tuple[str, int | None]:
    """The host and the port of an entry; ``None``: all ports."""
    host, port = text, ""
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    is_host = bool(host) and not any(char in host for char in "/@*? \\") and host.isprintable()
    if not is_host or (port and not (port.isdecimal() and 0 < int(port) < 65_536)):
        raise ConfigError(
            f"allowed_media_domains has {text!r:.100}, must have names of hosts or addresses, with "
            "a port or without, such as images.example.com or 10.0.0.5:8080"
        )
    return _canonical(host), int(port) if port else None


def _canonical(host: str) -> str:
    """One spelling of a host: an address as Python writes it, a name in small ASCII letters."""
    try:
        return str(ip_address(host.partition("%")[0]))
    except ValueError:
        pass
    host = host.lower().rstrip(".")
    if host.isascii():
        return host
    try:
        return idna.encode(host, uts46=True).decode()
    except idna.IDNAError:
        return host


def _malformed(url: str, why: str) -> RequestError:
    return refused(f"a picture's URL {url!r:.100} {why}: correct it")
