"""What clients ask of a core, carried out between two steps and answered in order."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass

import msgspec

from engine.core.client import InprocClient
from engine.core.failures import failure_of
from engine.core.peers import NUM_CREDITS, Peer, Peers
from engine.errors import EngineDeadError, RefusedError, RequestError, WireError
from engine.ipc.codec import Decoder
from engine.ipc.sockets import MAX_CONNECTIONS
from engine.messages.requests import AddRequest
from engine.messages.wire import (
    PROTOCOL_VERSION,
    Abort,
    Aborted,
    Answer,
    Bye,
    Call,
    Credit,
    Failure,
    Fault,
    FromClient,
    Hello,
    Refusal,
    Submit,
    Submitted,
    Welcome,
)

logger = logging.getLogger("engine.core")


@dataclass
class Ending:
    """When the core is to end: set from outside, by the control thread or a signal."""

    at: float | None = None
    """Take nothing new, finish what there is, and end by this time at the latest."""

    def no_later_than(self, when: float) -> None:
        self.at = when if self.at is None else min(self.at, when)


class Desk:
    """Reads messages of clients. Whatever they are, only their sender is concerned."""

    def __init__(self, core: InprocClient, peers: Peers, token: bytes, ending: Ending) -> None:
        self._core = core
        self._peers = peers
        self._token = token
        self.ending = ending
        self._decoder: Decoder[FromClient] = Decoder(FromClient)

    def take(self, identity: bytes, frames: list[bytes], now: float) -> None:
        """Carry out one message. Raises nothing but ``EngineDeadError``."""
        peer = self._peers.get(identity)
        try:
            message = self._decoder.decode(frames)
            if isinstance(message, Hello):
                self._greet(identity, peer, message, now)
            elif peer is None:
                raise WireError("the first message of a client must be hello")
            else:
                self._serve(peer, message)
        except WireError as error:
            logger.warning("a message of %s was refused: %s", peer or "a stranger", error)
            self._peers.send(identity, Fault(str(error)))

    def _greet(self, identity: bytes, peer: Peer | None, hello: Hello, now: float) -> None:
        if peer is not None:
            raise WireError("hello was said already")
        if not secrets.compare_digest(hello.token, self._token):
            raise WireError("the token is not that of this core")
        if hello.version != PROTOCOL_VERSION:
            raise WireError(
                f"the client speaks version {hello.version} of the protocol, this core speaks "
                f"version {PROTOCOL_VERSION}; install the same release on both sides"
            )
        if len(self._peers) >= MAX_CONNECTIONS:
            raise WireError(f"{MAX_CONNECTIONS} clients are there already")
        peer = self._peers.welcome(identity, hello.name)
        logger.info("%s has come", peer)
        decided = self._core.decided
        welcome = Welcome(
            version=PROTOCOL_VERSION,
            client_index=peer.index,
            id_prefix=f"client-{peer.index}/" if peer.index else "",
            num_credits=NUM_CREDITS,
            max_model_len=decided.max_model_len,
            vocab_size=decided.vocab_size,
            eos_token_ids=list(decided.eos_token_ids),
            num_kv_blocks=decided.num_kv_blocks,
            block_size=decided.block_size,
            time=now,
        )
        self._peers.send(identity, welcome)

    def _serve(self, peer: Peer, message: FromClient) -> None:
        match message:
            case Submit():
                refusals = [
                    Refusal(index, failure)
                    for index, request in enumerate(message.requests)
                    if (failure := self._add(peer, request)) is not None
                ]
                self._peers.send(peer.identity, Submitted(message.number, refusals))
            case Abort():
                self._abort(peer, message)
            case Call():
                self._peers.send(peer.identity, self._call(message))
            case Credit():
                if message.num_batches < 1:
                    raise WireError(f"credit for {message.num_batches} batches, must be at least 1")
                self._peers.grant(peer, message.num_batches)
            case Bye():
                self._peers.leave(peer)

    def _add(self, peer: Peer, request: AddRequest) -> Failure | None:
        """Queue a request of this client; why not, if it was not taken."""
        try:
            if self.ending.at is not None:
                raise RefusedError("the engine core is shutting down and takes no more requests")
            self._core.add(msgspec.structs.replace(request, client_index=peer.index))
        except EngineDeadError:
            raise
        except Exception as error:  # a request its policy chokes on fails alone
            return failure_of(error, default=RequestError)
        times = (request.queue_deadline, request.end_deadline)
        peer.live[request.request_id] = tuple(time for time in times if time is not None)
        return None

    def _abort(self, peer: Peer, message: Abort) -> None:
        """Stop what is this client's; ids of others are as unknown to it."""
        places = {name: i for i, name in enumerate(message.request_ids) if name in peer.live}
        own = list(places)
        finished = self._core.abort(own)
        for name in own:
            del peer.live[name]
        for end in finished:
            end.index = places[own[end.index]]
        self._peers.send(peer.identity, Aborted(message.number, finished))

    def _call(self, call: Call) -> Answer:
        try:
            return Answer(call.number, self._core.call(call.name, *call.args))
        except EngineDeadError:
            raise
        except Exception as error:
            return Answer(call.number, failure=failure_of(error))
