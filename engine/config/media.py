"""Options of pictures in prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config.check import check_range, check_types
from engine.config.option import BOTH, EXAMPLE, FRONT_END, SEVERAL
from engine.errors import ConfigError

KINDS = ("image",)


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

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, 1, None, "max_num_encoder_input_tokens", "encoder_cache_size")
        for kind, most in (self.limit_mm_per_prompt or {}).items():
            if kind not in KINDS or type(most) is not int or most < 0:
                raise ConfigError(
                    f"limit_mm_per_prompt has {kind!r:.80}: {most!r:.80}, must have only image and "
                    "a whole number that is not negative"
                )

    @property
    def most_pictures(self) -> int | None:
        """Most pictures in a prompt; ``None``: no limit."""
        limits = self.limit_mm_per_prompt or {}
        return limits.get(KINDS[0])
