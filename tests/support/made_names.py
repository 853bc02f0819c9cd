"""A resolver whose names have made-up addresses, for servers that tests start."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any


def resolve_names(names: Mapping[str, Sequence[str]]) -> None:
    """Let these names have these addresses in this process; [] is for a name without any."""
    original = socket.getaddrinfo

    def getaddrinfo(host: str, port: Any, *args: Any, **options: Any) -> list[Any]:
        if host not in names:
            return original(host, port, *args, **options)
        if not names[host]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0))
            if ":" in address
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in names[host]
        ]

    socket.getaddrinfo = getaddrinfo
