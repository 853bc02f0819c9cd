"""Where the core runs: in this process, in one of its own, or somewhere already."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.config.check import check_range, check_types
from engine.errors import ConfigError

MAX_CORES = 64


@dataclass(frozen=True, kw_only=True)
class CoreConfig:
    """Options of a core that does not run in its user's process."""

    multiprocess: bool = False
    """Run the core in a process of its own, which ends with this one."""
    data_parallel_size: int = 1
    """Cores that share the work, each in a process of its own with the whole model."""
    core_address: str | None = None
    """Use the core that runs at this address, or those at several, divided by commas; None: start
    one."""
    core_secret: str | None = field(default=None, repr=False)
    """What core and clients share, for TCP addresses."""
    core_ready_timeout: float = 600.0
    """Seconds the core's process may take to load the model."""
    core_hang_timeout: float = 300.0
    """Seconds one step may take; a core that needs longer is given up, and ended if it is ours."""
    drain_timeout: float = 30.0
    """Seconds for unfinished requests after SIGTERM."""

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
        if self.multiprocess and self.core_address is not None:
            raise ConfigError(
                f"core_address is {self.core_address!r} and multiprocess is True: use the core "
                "that runs there, or start one; leave one of both out"
            )
        addresses = self.core_addresses
        if not all(addresses) or len(set(addresses)) < len(addresses) or len(addresses) > MAX_CORES:
            raise ConfigError(
                f"core_address is {self.core_address!r}, must be one address, or up to {MAX_CORES} "
                "different ones divided by commas"
            )

    @property
    def core_addresses(self) -> list[str]:
        """Those of ``core_address``; [] if a core is to be started."""
        if self.core_address is None:
            return []
        return [address.strip() for address in self.core_address.split(",")]
