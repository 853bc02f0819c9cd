"""The flat options of an engine, as users set them. Options that vLLM has too keep vLLM's names."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.assets import BOX_MODEL
from engine.config.cache import CacheConfig
from engine.config.check import check_types
from engine.config.core import (
    CoreConfig,
    CoreOptions,
    PollConfig,
    PollOptions,
    requested_decode_poll_timeout_ms,
)
from engine.config.dotted import load_logits_processor
from engine.config.engine import EngineConfig, EngineOptions
from engine.config.env import core_secret, default_log_level, warn_of_typos
from engine.config.foreign import refusal
from engine.config.gpu import GPUConfig
from engine.config.lora import LoRAConfig
from engine.config.media import MediaConfig
from engine.config.model import ModelConfig, ModelOptions, is_hub_name
from engine.config.near import near_options, suggestion
from engine.config.option import BOTH, FRONT_END, STARTER, options_of, part
from engine.config.parallel import ParallelConfig
from engine.config.sched import SchedulerOptions
from engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EngineArgs(  # fields come from the last base first
    PollOptions,
    CoreOptions,
    EngineOptions,
    ParallelConfig,
    GPUConfig,
    MediaConfig,
    LoRAConfig,
    CacheConfig,
    SchedulerOptions,
    ModelOptions,
):
    """All options of an engine, as users set them. Raises ``ConfigError`` for an unknown name.

    ``create_config`` checks the values and raises ``ConfigError``."""

    if not TYPE_CHECKING:  # type checkers read the dataclass's own signature

        def __new__(cls, *values: Any, **options: Any) -> EngineArgs:
            """Raise ``ConfigError`` for an unknown option, with names that are close to it."""
            if values:
                raise ConfigError(
                    f"{values[0]!r:.80} is given without a name: write the name of each option, as "
                    f"in EngineArgs(model={values[0]!r:.80})"
                )
            known = [option.name for option in fields(cls)]
            for name in options:
                if name not in known:
                    raise ConfigError(refusal(name) or _unknown_option(name, known))
            return super().__new__(cls)

    def __post_init__(self) -> None:
        """Skip the checks of the base classes: ``create_config`` checks each group."""

    def create_config(self) -> EngineConfig:
        """Check all options and make the configuration. Raises ``ConfigError`` with the bad
        value."""
        check_types(self)
        self._check_attached()
        warn_of_typos()
        poll_timeout = requested_decode_poll_timeout_ms(self.decode_poll_timeout_ms)
        return part(
            EngineConfig,
            self,
            model=part(
                ModelConfig,
                self,
                model=str(BOX_MODEL) if self.model is None else _spelled(self.model),
                tokenizer=None if self.tokenizer is None else _spelled(self.tokenizer),
                download_dir=_absolute("download_dir", self.download_dir),
            ),
            cache=part(
                CacheConfig, self, kv_offload_dir=_absolute("kv_offload_dir", self.kv_offload_dir)
            ),
            scheduler=part(SchedulerOptions, self),
            gpu=part(GPUConfig, self),
            lora=part(LoRAConfig, self, adapter_dir=_absolute("adapter_dir", self.adapter_dir)),
            media=part(MediaConfig, self),
            parallel=part(ParallelConfig, self),
            core=part(CoreConfig, self, core_secret=core_secret()),
            polling=part(PollConfig, self, decode_poll_timeout_ms=poll_timeout),
            log_level=default_log_level() if self.log_level is None else self.log_level,
            torch_profiler_dir=_absolute("torch_profiler_dir", self.torch_profiler_dir),
            kernel_cache=_absolute("kernel_cache", self.kernel_cache),
            logits_processors=tuple(map(load_logits_processor, self.logits_processors)),
            core_index=0,  # whoever starts several cores numbers them
            num_cores=1,
            kv_arena=None,
        )

    def _check_attached(self) -> None:
        """Raise ``ConfigError`` if the core runs already and an option only affects its start."""
        if self.core_address is None:
            return
        for option in fields(self):
            make, value = option.default_factory, getattr(self, option.name)
            default = option.default if make is MISSING else make()
            if value == default or option.name in options_of(EngineArgs, BOTH, FRONT_END):
                continue
            is_starters = option.name in options_of(EngineArgs, STARTER)
            takes = "" if is_starters else "give it to metronome core, or "
            raise ConfigError(
                f"{option.name} is {value!r:.80}, but the core at {self.core_address} runs "
                f"already; {takes}leave it out"
            )


def _spelled(model: str | Path) -> str:
    """Return the model as text. A ``Path`` is always a local path, never a name on a hub."""
    text = str(model)
    return f"./{text}" if isinstance(model, Path) and is_hub_name(text) else text


def _absolute(name: str, path: str | Path | None) -> str | None:
    """Make a path absolute, so that a process with another current directory can use it."""
    if path is None:
        return None
    if not str(path):
        raise ConfigError(f"{name} is '', must be a path, or be left out")
    return str(Path(path).expanduser().absolute())


def _unknown_option(name: str, known: list[str]) -> str:
    hint = suggestion(near_options(name, known)) or f"; known are: {', '.join(known)}"
    return f"unknown option {name!r}{hint}"
