"""Options for where the core runs (in this process, its own, or at an address) and how it waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.config.check import check_range, check_types
from engine.config.env import DECODE_POLL_TIMEOUT, decode_poll_timeout
from engine.config.option import FRONT_END, SHORT, STARTER
from engine.errors import ConfigError

OnCoreDeath = Literal["exit", "restart", "stay"]
DataParallelBackend = Literal["mp", "ray"]
MAX_CORES = 64
MAX_POLL_MS = 2**31 - 1  # the limit of a poll
MAX_DIGITS = 20  # Python refuses to convert texts with far more


@dataclass(frozen=True, kw_only=True)
class CoreOptions:
    """Where the core runs, and its timeouts."""

    multiprocess: bool = field(default=False, metadata=FRONT_END)
    """Run the core in its own process, which ends with this one."""
    data_parallel_size: int = field(default=1, metadata={**STARTER, SHORT: "-dp"})
    """Cores that share the requests, each in its own process with the whole model (and its own GPU,
    where there are GPUs). A request goes where its prompt is cached, or where the load is
    lowest."""
    prefill_cores: int = field(default=0, metadata=STARTER)
    """Cores that compute only long prompts, for decode_cores, so that a long prompt delays no
    output. KV blocks come through kv_offloading_size (default: 1 GiB). 0: all cores do both."""
    decode_cores: int = field(default=0, metadata=STARTER)
    """Cores that compute short prompts and all outputs, in addition to prefill_cores."""
    prefill_threshold: int = field(default=256, metadata=STARTER)
    """Prompts go to prefill_cores if a decode core lacks at least this many of their tokens."""
    data_parallel_backend: DataParallelBackend = field(default="mp", metadata=STARTER)
    """Where these cores run. mp: on this machine. ray: on the nodes of the Ray cluster that this
    machine belongs to, each core with num_threads CPUs or a GPU."""
    core_address: str | None = field(default=None, metadata=FRONT_END)
    """Use the core at this address, as metronome core printed it; also set its model, for the
    tokenizer. Several addresses, separated by commas, share the requests."""
    on_core_death: OnCoreDeath = field(default="exit", metadata=FRONT_END)
    """What happens when a core dies. Its requests end with an error, other cores go on. exit: when
    the last has died, the engine is dead, and metronome serve ends with status 1. restart: a dead
    core is started again, at most 5 times in 10 minutes, then as exit. stay: as exit, but metronome
    serve goes on and answers 503."""
    core_ready_timeout: float = field(default=600.0, metadata=STARTER)
    """Seconds that a core may take to load the model."""
    core_hang_timeout: float = field(default=300.0, metadata=FRONT_END)
    """Seconds that a core may take for a step; after that it counts as dead, and is killed if this
    engine started it."""
    drain_timeout: float = 30.0
    """Seconds that unfinished requests may go on after SIGTERM."""

    @property
    def num_cores(self) -> int:
        """How many cores this engine starts."""
        return self.prefill_cores + self.decode_cores or self.data_parallel_size

    @property
    def sizes(self) -> str:
        """The options that say how many cores there are, for messages."""
        if self.prefill_cores or self.decode_cores:
            return f"prefill_cores is {self.prefill_cores} and decode_cores is {self.decode_cores}"
        return f"data_parallel_size is {self.data_parallel_size}"


@dataclass(frozen=True, kw_only=True)
class CoreConfig(CoreOptions):
    """Where the core runs, its timeouts, and the secret that its clients need."""

    core_secret: str | None = field(default=None, repr=False)
    """Secret shared by core and clients, for TCP addresses."""

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, 1.0, 1e6, "core_ready_timeout", "core_hang_timeout")
        check_range(self, 0.0, 1e6, "drain_timeout")
        check_range(self, 1, MAX_CORES, "data_parallel_size")
        if self.data_parallel_size > 1 and not self.multiprocess:
            raise ConfigError(
                f"data_parallel_size is {self.data_parallel_size} and multiprocess is False: "
                "several cores need processes of their own; set multiprocess=True"
            )
        self._check_roles()
        if self.data_parallel_backend == "ray" and not self.multiprocess:
            raise ConfigError(
                "data_parallel_backend is 'ray' and multiprocess is False: cores on a Ray cluster "
                "are processes of their own; set multiprocess=True"
            )
        if self.multiprocess and self.core_address is not None:
            raise ConfigError(
                f"core_address is {self.core_address!r} and multiprocess is True: use the core "
                "that runs there, or start one; set only one of them"
            )
        if self.on_core_death == "restart" and not self.multiprocess:
            raise ConfigError(
                "on_core_death is 'restart', which needs cores in processes that this engine "
                "starts: set multiprocess=True without core_address, or choose 'exit' or 'stay'"
            )
        addresses = self.core_addresses
        if not all(addresses) or len(set(addresses)) < len(addresses) or len(addresses) > MAX_CORES:
            raise ConfigError(
                f"core_address is {self.core_address!r}, must be one address, or up to {MAX_CORES} "
                "different ones separated by commas"
            )

    def _check_roles(self) -> None:
        """Raise ``ConfigError`` for numbers of prefill and decode cores that make no sense."""
        check_range(self, 0, MAX_CORES - 1, "prefill_cores", "decode_cores")
        check_range(self, 1, None, "prefill_threshold")
        if not (self.prefill_cores or self.decode_cores):
            return
        what = self.sizes
        if not (self.prefill_cores and self.decode_cores) or self.num_cores > MAX_CORES:
            raise ConfigError(
                f"{what}: set both to 1 or more, together at most {MAX_CORES}, or leave both out"
            )
        if self.data_parallel_size > 1:
            raise ConfigError(
                f"{what}, and data_parallel_size is {self.data_parallel_size}: leave "
                "data_parallel_size out, or the two others"
            )
        if not self.multiprocess:
            raise ConfigError(
                f"{what}, and multiprocess is False: several cores need processes of their own; "
                "set multiprocess=True"
            )
        if self.data_parallel_backend == "ray":
            raise ConfigError(
                f"{what}, and data_parallel_backend is 'ray': these cores share memory, so they "
                "run on one machine; leave data_parallel_backend out"
            )

    @property
    def core_addresses(self) -> list[str]:
        """The addresses in ``core_address``; [] if the engine starts its own core."""
        if self.core_address is None:
            return []
        return [address.strip() for address in self.core_address.split(",")]


@dataclass(frozen=True, kw_only=True)
class PollOptions:
    """How a core in its own process waits for messages."""

    decode_poll_timeout_ms: int | None = None
    """Milliseconds to wait for messages between decode steps. Default:
    METRONOME_DECODE_POLL_TIMEOUT_MS, else 0."""
    idle_wait_ms: int = 1000
    """Longest sleep of an idle core, in milliseconds; any message ends it."""


@dataclass(frozen=True, kw_only=True)
class PollConfig(PollOptions):
    """How long the step loop waits for messages, in milliseconds."""

    decode_poll_timeout_ms: int = 0
    """Longest wait for messages between decode steps; 0 does not wait."""

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, 0, MAX_POLL_MS, "decode_poll_timeout_ms")
        check_range(self, 1, MAX_POLL_MS, "idle_wait_ms")


def requested_decode_poll_timeout_ms(option: int | None) -> int:
    """Return the value of the option, or of the environment's variable, or 0 if neither is set.

    Raises ``ConfigError`` for a variable that is not a number of milliseconds.
    """
    if option is not None:
        return option
    value = decode_poll_timeout()
    if value is None:
        return 0
    is_number = value.isascii() and value.isdecimal() and len(value) <= MAX_DIGITS
    if not is_number or int(value) > MAX_POLL_MS:
        raise ConfigError(
            f"{DECODE_POLL_TIMEOUT} is {value!r:.80}, must be a whole number in 0..{MAX_POLL_MS}, "
            "in milliseconds (0: do not wait)"
        )
    return int(value)
