"""Options of pictures in prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.config.check import check_kind, check_range, check_types
from engine.config.option import BOTH, EXAMPLE, FRONT_END, SEVERAL
from engine.errors import ConfigError

KIND = "image"
POOLED = "cuda_ipc_pool"
MIB = 1 << 20
MOST_GIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class MediaConfig:
    """Pictures in prompts: how many, how they are processed, and how much is encoded and kept."""

    limit_mm_per_prompt: dict[str, Any] | None = field(
        default=None, metadata={**BOTH, EXAMPLE: {"image": 4}}
    )
    """Most pictures in a prompt, under the key image. Default: no limit."""
    mm_processor_kwargs: dict[str, Any] | None = field(
        default=None, metadata={**BOTH, EXAMPLE: {"do_image_splitting": False}}
    )
    """Settings of the model's image processor, in place of those in the model's directory."""
    max_num_encoder_input_tokens: int | None = None
    """Tokens of pictures encoded in a step. Default: max_num_batched_tokens, and at least those of
    the model's largest picture."""
    encoder_cache_size: int | None = None
    """Tokens of pictures whose encoder outputs are kept for later steps and requests. Default: as
    many as are encoded in a step."""
    mm_processor_cache_gb: float = field(default=1.0, metadata=FRONT_END)
    """GiB of processed pictures that the front end keeps after their requests, so that equal
    pictures are not processed again."""
    disable_chunked_mm_input: bool = False
    """Never split a picture over steps. Always so for models whose tokens of a picture see each
    other. A prompt then waits until a step has room for its next picture."""
    allowed_media_domains: list[str] | tuple[str, ...] = field(
        default=(), metadata={**FRONT_END, **SEVERAL}
    )
    """Hosts from which pictures are loaded by http and https URLs: names or addresses, with a port
    or for all ports. A name is used only if its address is public, or is in the list, too. Default:
    nothing is loaded from the network."""
    allowed_local_media_path: str | Path | None = field(default=None, metadata=FRONT_END)
    """Directory whose files may be pictures of requests, by path or file URL. Default: none."""

    mm_tensor_transport: Literal["default", "cuda_ipc", "cuda_ipc_pool"] = field(
        default="default", metadata=BOTH
    )
    """How pixels get to a core in another process. default: shared memory. cuda_ipc: the front end
    also copies them to the core's GPU, into an allocation for each picture; cuda_ipc_pool: into a
    pool. Without a free chunk, a picture is sent as by cuda_ipc; without a GPU as by default."""
    mm_tensor_pool_mib: int = field(default=512, metadata=BOTH)
    """Size of the pool of cuda_ipc_pool in MiB, for each core."""

    def __post_init__(self) -> None:
        check_types(self)
        check_range(
            self, 1, None,
            "max_num_encoder_input_tokens", "encoder_cache_size", "mm_tensor_pool_mib",
        )  # fmt: skip
        check_range(self, 0, MOST_GIB, "mm_processor_cache_gb")
        for host in self.allowed_media_domains:
            check_kind("an entry of allowed_media_domains", host, (str,))
        for kind, most in (self.limit_mm_per_prompt or {}).items():
            if kind != KIND or type(most) is not int or most < 0:
                raise ConfigError(
                    f"limit_mm_per_prompt has {kind!r:.80}: {most!r:.80}, must have only image and "
                    "a whole number that is not negative"
                )

    @property
    def pool_bytes(self) -> int:
        """Size of the pool in a device's memory; 0 without one."""
        return self.mm_tensor_pool_mib * MIB if self.mm_tensor_transport == POOLED else 0

    @property
    def most_pictures(self) -> int | None:
        """Most pictures in a prompt; ``None``: no limit."""
        limits = self.limit_mm_per_prompt or {}
        return limits.get(KIND)
