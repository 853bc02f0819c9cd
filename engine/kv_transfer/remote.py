"""RemotePrefill: requests whose prompts one engine computes, and another continues.

    {"do_remote_decode": true}, one token ──> the prompt is computed, its blocks are served
        <── the output's kv_transfer_params: do_remote_prefill and this engine's address
    these as the parameters of the same request to another engine ──> its blocks are read from there

The names are vLLM's, so its proxies can pass them on. Blocks are found by the hashes of the prompt,
so the parameters need only say where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from engine.config.cache import PEERS
from engine.kv_transfer.peers.options import PeerOptions, as_ip, is_port

FOREIGN = ("do_remote_", "remote_", "transfer_id", "tp_size")
"""How the names of such parameters begin. Those that are not used here are accepted."""
TYPES: dict[str, type | tuple[type, ...]] = {
    "do_remote_prefill": bool,
    "do_remote_decode": bool,
    "remote_engine_id": str,
    "remote_block_ids": (list, tuple),
    "remote_host": str,
    "remote_port": int,
    "tp_size": int,
}
WORDS: dict[type | tuple[type, ...], str] = {
    bool: "true or false",
    str: "a string",
    int: "a whole number",
    (list, tuple): "a list",
}


class RemoteParams(NamedTuple):
    """``sends``: another engine will continue the request. ``source``: host and port of the engine
    that has computed its prompt."""

    sends: bool = False
    source: tuple[str, int] | None = None


def read_remote(given: Mapping[str, Any]) -> RemoteParams:
    """Check these parameters of a request. Raises ``ValueError`` with a message for its user."""
    for name, kind in TYPES.items():
        value = given.get(name)
        is_wrong = isinstance(value, bool) and kind is not bool
        if value is not None and (is_wrong or not isinstance(value, kind)):
            raise ValueError(
                f"{name} in kv_transfer_params is {value!r:.80}, must be {WORDS[kind]}"
            )
    sends, receives = bool(given.get("do_remote_decode")), bool(given.get("do_remote_prefill"))
    if sends and receives:
        raise ValueError(
            "do_remote_prefill and do_remote_decode in kv_transfer_params are both true: set "
            "do_remote_decode for the engine that computes the prompt, then pass on the parameters "
            "of its answer"
        )
    if not receives:
        return RemoteParams(sends)
    host, port = as_ip(given.get("remote_host")), given.get("remote_port")
    if host is None:
        raise ValueError(
            f"remote_host in kv_transfer_params is {given.get('remote_host')!r:.80}, must be the "
            "IPv4 address of the engine that has computed the prompt"
        )
    if not is_port(port):
        raise ValueError(f"remote_port in kv_transfer_params is {port!r:.80}, must be a port")
    assert isinstance(port, int)
    return RemoteParams(sends, (str(host), port))


def without_peers(params: RemoteParams) -> str | None:
    """Why an engine that neither serves nor reads blocks of others cannot do what a request wants;
    ``None`` if it can."""
    if not params.sends and params.source is None:
        return None
    name = "do_remote_decode" if params.sends else "do_remote_prefill"
    return (
        f"{name} in kv_transfer_params is true, but this engine has no connection to others: leave "
        f"it out, or start the engine with kv_connector {PEERS!r} in kv_transfer_config"
    )


class RemotePrefill:
    """The scheduler's part: checks such requests, says where their blocks are, and writes the
    parameters for the engine that continues. ``announce(host, port, keys)``: blocks are
    expected there. ``num_ranks``: that compute the model together."""

    def __init__(
        self,
        options: PeerOptions,
        announce: Callable[[str, int, Sequence[bytes]], None],
        num_ranks: int = 1,
    ) -> None:
        self._options = options
        self._announce = announce
        self._num_ranks = num_ranks
        self._announced: dict[int, str | None] = {}  # by arrival number: its adapter at that time

    def objection(self, params: RemoteParams) -> str | None:
        """Why this engine cannot do what a request wants; ``None`` if it can."""
        options = self._options
        if params.sends and not options.sends:
            return (
                "do_remote_decode in kv_transfer_params is true, but kv_role of this engine is "
                "'kv_consumer': send the request to a producer"
            )
        if params.source is None:
            return None
        if not options.receives:
            return (
                "do_remote_prefill in kv_transfer_params is true, but kv_role of this engine is "
                "'kv_producer': send the request to a consumer"
            )
        if not options.allows(*params.source):
            host, port = params.source
            return (
                f"remote_host in kv_transfer_params is {host!r} (port {port}), from which this "
                "engine may not read KV: add it to 'allowed' in kv_connector_extra_config of its "
                "kv_transfer_config"
            )
        return None

    def expect(
        self,
        arrival: int,
        adapter: str | None,
        params: RemoteParams,
        keys: Callable[[], Sequence[bytes]],
    ) -> None:
        """Expect the blocks of a request where its parameters say, once. ``keys``: returns those of
        all that it could use; they depend on its ``adapter``, which may become known later."""
        if params.source is None or self._announced.get(arrival, "") == adapter:
            return
        self._announced[arrival] = adapter
        self._announce(*params.source, keys())

    def end(self, arrival: int) -> None:
        """Forget a request."""
        self._announced.pop(arrival, None)

    def answer(self, request_id: str, num_blocks: int) -> dict[str, Any]:
        """Parameters for the engine that continues a request. ``num_blocks``: full blocks of its
        prompt."""
        options = self._options
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [*range(num_blocks)],
            "remote_engine_id": options.engine_id,
            "remote_request_id": request_id,
            "remote_host": options.host,
            "remote_port": options.port,
            "tp_size": self._num_ranks,
        }
