"""Cores on the nodes of a Ray cluster, and the server as a deployment of Ray Serve.

Nothing here is imported unless a user asks for it; it needs the extra ``ray``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.cluster.serving import deployment as deployment

__all__ = ["deployment"]


def __getattr__(name: str) -> object:
    if name != "deployment":
        raise AttributeError(f"module 'engine.cluster' has no attribute {name!r}")
    from engine.cluster.serving import deployment

    return deployment
