"""The messages between clients and a core in another process: see docs/internals/wire.md.

Every message is one array whose first element names its type. Fields are only ever appended, with
defaults. A client sends ``Hello`` first and is answered ``Welcome``; a message with a number is
answered once with the same number, in order. Aborts are not answered: every request
that was taken ends once, with a row of ``Outputs``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from engine.messages.requests import AddRequest, CoreOutputs

PROTOCOL_VERSION = 3
MAX_HELLO_BYTES = 64 << 10  # of a client's first message, which any program may send
MAX_CALL_BYTES = 1 << 20  # of a call, its answer, and whatever carries no requests
MAX_SUBMIT_REQUESTS = 4096  # in one message, so that all can be answered in one


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """Why something was not done. ``kind`` is the class of the error; ``param`` and ``code`` are
    those of ``RequestError``."""

    kind: str
    message: str
    retry_after: float | None = None  # seconds, of refusals that may be retried
    param: str | None = None
    code: str | None = None


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """A request that was not taken. ``index``: its place among those that were submitted."""

    index: int
    failure: Failure


# Client to core, on the data socket.


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello"):
    """The first message of a client. ``token`` proves that it may use this core."""

    version: int
    token: bytes
    name: str = ""  # of the client, for the core's log


class Submit(msgspec.Struct, array_like=True, frozen=True, tag="submit"):
    """Queue these requests, in this order. Answered by ``Submitted``."""

    number: int
    requests: Annotated[list[AddRequest], msgspec.Meta(max_length=MAX_SUBMIT_REQUESTS)]


class Abort(msgspec.Struct, array_like=True, frozen=True, tag="abort"):
    """Stop these requests; unknown ids do nothing. Not answered: their ends come as outputs."""

    request_ids: list[str]


class Call(msgspec.Struct, array_like=True, frozen=True, tag="call"):
    """Call a utility by name (reset_prefix_cache, pause, ...). Answered by ``Answer``."""

    number: int
    name: str
    args: list[Any] = []


class Credit(msgspec.Struct, array_like=True, frozen=True, tag="credit"):
    """This many more ``Outputs`` may be sent: the client has read as many."""

    num_batches: int


class Bye(msgspec.Struct, array_like=True, frozen=True, tag="bye"):
    """The client leaves; what it still has at the core is aborted."""


FromClient = Hello | Submit | Abort | Call | Credit | Bye


# Core to client, on the data socket.


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag="welcome"):
    """The answer to ``Hello``: what a client must know to use this core."""

    version: int
    client_index: int
    id_prefix: str  # unique to this client: ids that begin with it never clash
    num_credits: int  # Outputs that are sent before the first Credit
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    num_kv_blocks: int
    block_size: int
    time: float  # clock of the core, seconds
    model: str = ""  # directory it was loaded from, on the core's machine; "" if there is none
    capabilities: list[str] = []  # parts of a plan that are served, as adapters or masks


class Submitted(msgspec.Struct, array_like=True, frozen=True, tag="submitted"):
    """What became of ``Submit``: all were taken but these."""

    number: int
    time: float  # clock of the core when it was read, seconds
    refusals: list[Refusal] = []


class Answer(msgspec.Struct, array_like=True, frozen=True, tag="answer"):
    """What a utility returned, or why it did not."""

    number: int
    value: Any = None
    failure: Failure | None = None


class Outputs(msgspec.Struct, array_like=True, frozen=True, tag="outputs"):
    """What one step brought for this client. Each costs a credit."""

    batch: CoreOutputs


class Fault(msgspec.Struct, array_like=True, frozen=True, tag="fault"):
    """A message could not be read, or was not to be sent then; it did nothing."""

    message: str


class Dead(msgspec.Struct, array_like=True, frozen=True, tag="dead"):
    """The core's last message: why there will be no other."""

    message: str
    traceback: str = ""


class Probe(msgspec.Struct, array_like=True, frozen=True, tag="probe"):
    """Has no content: whether it can be sent shows the core if the client is still there."""


ToClient = Welcome | Submitted | Answer | Outputs | Fault | Dead | Probe


# On the control socket, where an answer never waits for a step.


class Ping(msgspec.Struct, array_like=True, frozen=True, tag="ping"):
    """Ask for the state of the core. Answered by ``Health``."""

    token: bytes


class Shutdown(msgspec.Struct, array_like=True, frozen=True, tag="shutdown"):
    """Take nothing new, finish what there is within this many seconds, end. Answered by ``Health``.

    ``None`` is the core's own ``drain_timeout``.
    """

    token: bytes
    drain_seconds: float | None = None


ToControl = Ping | Shutdown

CoreState = Literal["ready", "draining"]


class Health(msgspec.Struct, array_like=True, frozen=True, tag="health"):
    """Made from the heartbeat of the step loop: being alive means making progress."""

    state: CoreState
    seconds_in_step: float  # how long the present step has taken; 0.0 while idle
    num_steps: int
    num_unfinished: int
    num_clients: int


FromControl = Health | Fault
