"""The messages between clients and a core in another process, documented in docs/internals/wire.md.

Every message is an array whose first element is the name of its type. New fields are appended, with
defaults. A client sends ``Hello`` first; the core replies ``Welcome``. Each message with a number
is answered by one message with the same number, in order. ``Abort`` is not answered: every accepted
request has one end, which is sent in ``Outputs``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from engine.messages.media import MediaContent
from engine.messages.requests import AddRequest, CoreOutputs

PROTOCOL_VERSION = 3
MAX_HELLO_BYTES = 64 << 10  # size of a client's first message, which any program could send
MAX_CALL_BYTES = 1 << 20  # size of a call, its answer, and all messages without requests
MAX_SUBMIT_REQUESTS = 4096  # requests in one message, so that one answer is enough


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """An error. ``kind`` names its class; ``param`` and ``code`` are those of ``RequestError``."""

    kind: str
    message: str
    retry_after: float | None = None  # seconds, if the request was refused and can be sent again
    param: str | None = None
    code: str | None = None


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """A request that was not accepted. ``index``: its position in ``Submit.requests``."""

    index: int
    failure: Failure


# Client to core, on the data socket.


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello"):
    """The first message of a client. ``token`` is the secret that grants access to the core."""

    version: int
    token: bytes
    name: str = ""  # name of the client, for the core's log


class Submit(msgspec.Struct, array_like=True, frozen=True, tag="submit"):
    """Queue requests, in this order. Answered by ``Submitted``."""

    number: int
    requests: Annotated[list[AddRequest], msgspec.Meta(max_length=MAX_SUBMIT_REQUESTS)]


class Bring(msgspec.Struct, array_like=True, frozen=True, tag="bring"):
    """Bring the content of a media item of these requests, or its error. Ids of requests
    that have ended are ignored. Not answered: an error ends the requests that need the content."""

    request_ids: list[str]
    content: MediaContent


class Abort(msgspec.Struct, array_like=True, frozen=True, tag="abort"):
    """Abort requests; unknown ids are ignored. Not answered: their ends are sent as outputs."""

    request_ids: list[str]


class Call(msgspec.Struct, array_like=True, frozen=True, tag="call"):
    """Call a utility by name (reset_prefix_cache, pause, ...). Answered by ``Answer``."""

    number: int
    name: str
    args: list[Any] = []


class Credit(msgspec.Struct, array_like=True, frozen=True, tag="credit"):
    """Flow control: allows the core to send this many more ``Outputs``."""

    num_batches: int


class Follow(msgspec.Struct, array_like=True, frozen=True, tag="follow"):
    """Send what the prefix cache contains, and from now on what changes in it. For clients that
    choose between several cores. Answered by ``CacheNews`` messages."""


class Bye(msgspec.Struct, array_like=True, frozen=True, tag="bye"):
    """The client disconnects; its unfinished requests are aborted."""


FromClient = Hello | Submit | Bring | Abort | Call | Credit | Follow | Bye


# Core to client, on the data socket.


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag="welcome"):
    """The answer to ``Hello``, with the properties of the core."""

    version: int
    client_index: int
    id_prefix: str  # unique to this client: request ids with this prefix never collide
    num_credits: int  # number of Outputs that may be sent before the first Credit
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    num_kv_blocks: int
    block_size: int
    time: float  # seconds on the core's clock
    model: str = ""  # directory of the model on the core's machine; "" without one
    capabilities: list[str] = []  # supported plan parts, e.g. adapters or masks
    namespace: str = ""  # where it opens handles of pixels in shared memory; "": nowhere
    device: str = ""  # name of the device to whose memory pixels may be copied; "": none


class Submitted(msgspec.Struct, array_like=True, frozen=True, tag="submitted"):
    """The answer to ``Submit``: all requests were accepted except the listed ones."""

    number: int
    time: float  # seconds on the core's clock when it read the message
    refusals: list[Refusal] = []


class Answer(msgspec.Struct, array_like=True, frozen=True, tag="answer"):
    """The answer to ``Call``: the utility's return value or its error."""

    number: int
    value: Any = None
    failure: Failure | None = None


class Outputs(msgspec.Struct, array_like=True, frozen=True, tag="outputs"):
    """The outputs of one step for this client. Each message uses one credit."""

    batch: CoreOutputs


class Fault(msgspec.Struct, array_like=True, frozen=True, tag="fault"):
    """The answer to a message that was invalid or not allowed at that time, and was ignored."""

    message: str


class Dead(msgspec.Struct, array_like=True, frozen=True, tag="dead"):
    """The last message of a core that dies, with the reason."""

    message: str
    traceback: str = ""


class Probe(msgspec.Struct, array_like=True, frozen=True, tag="probe"):
    """An empty message, by which the core checks that the client is still connected."""


class CacheNews(msgspec.Struct, array_like=True, frozen=True, tag="cache"):
    """Changes of the prefix cache, and the work of other clients, for a client that follows them.

    A block's id is the first eight bytes of its hash. Ids are concatenated."""

    sequence: int  # counts the messages to this client since the last one with is_whole
    is_whole: bool  # stored has all cached blocks: forget what was known
    stored: bytes
    removed: bytes
    load: int  # tokens that other clients' requests have yet to compute, at most
    secret: bytes = b""  # key and root of the block hash with is_whole; empty for SHA-256
    has_cache: bool = True  # False: there is no prefix cache, or it cannot be followed
    adapters: dict[str, str] = {}  # digests by name, with is_whole and when they have changed


ToClient = Welcome | Submitted | Answer | Outputs | Fault | Dead | Probe | CacheNews


# On the control socket, where answers never wait for a step.


class Ping(msgspec.Struct, array_like=True, frozen=True, tag="ping"):
    """Request the state of the core. Answered by ``Health``."""

    token: bytes


class Shutdown(msgspec.Struct, array_like=True, frozen=True, tag="shutdown"):
    """Shut down: accept no new requests, and finish the others within ``drain_seconds`` (``None``:
    the core's own setting). Answered by ``Health``."""

    token: bytes
    drain_seconds: float | None = None


ToControl = Ping | Shutdown

CoreState = Literal["ready", "draining"]


class Health(msgspec.Struct, array_like=True, frozen=True, tag="health"):
    """The state of the core. It is alive if its step loop makes progress."""

    state: CoreState
    seconds_in_step: float  # duration of the current step so far; 0.0 while idle
    num_steps: int
    num_unfinished: int
    num_clients: int


FromControl = Health | Fault
