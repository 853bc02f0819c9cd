"""The flat options of an engine, as users write them; names are vLLM's where they mean the same."""

from __future__ import annotations

import difflib
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
    asked_decode_poll_timeout_ms,
)
from engine.config.dotted import load_logits_processor
from engine.config.engine import EngineConfig, EngineOptions
from engine.config.env import core_secret, default_log_level, warn_of_typos
from engine.config.gpu import GPUConfig
from engine.config.model import ModelConfig, ModelOptions, is_hub_name
from engine.config.option import BOTH, FRONT_END, STARTER, options_of, part
from engine.config.sched import SchedulerOptions
from engine.errors import ConfigError

MAX_NEAR = 3  # names that are proposed in place of an unknown one

# Options of vLLM that have another name here, or do not exist, with the way out: in Python and, as
# JSON, on the command line.
_NGRAM = 'speculative_config={{"method": "ngram", "num_speculative_tokens": 4{}}}'
_DRAFT_MODEL = (
    'speculative_config={"method": "draft_model", "model": "...", "num_speculative_tokens": 4}'
)

FOREIGN: dict[str, str] = {
    "max_num_queued_reqs": "set max_waiting_requests, which counts those that wait and not those "
    "that run",
    "max_num_queued_tokens": "set max_waiting_tokens, which counts the prompt tokens of those that "
    "wait",
    "max_num_active_seqs": "lower max_num_seqs, or let a policy say how many may run "
    "(Limits(max_seqs=...), as sarathi does)",
    "log_stats": "statistics are made when they are asked for; disable_log_stats=True leaves the "
    "line about them out of the log",
    "survive_core_death": "set on_core_death: other cores always go on without one that has died",
    "num_gpu_blocks_override": "set num_kv_blocks",
    "scheduler_reserve_full_isl": "a request starts only if its whole prompt fits, always; "
    "watermark says how many blocks it is to leave free",
    "num_speculative_tokens": f"it is a key of speculative_config: {_NGRAM.format('')}",
    "speculative_model": f"it is the key 'model' of speculative_config: {_DRAFT_MODEL}",
    "ngram_prompt_lookup_max": "it is the key 'prompt_lookup_max' of speculative_config: "
    + _NGRAM.format(', "prompt_lookup_max": 4'),
    "ngram_prompt_lookup_min": "it is the key 'prompt_lookup_min' of speculative_config: "
    + _NGRAM.format(', "prompt_lookup_min": 2'),
    "prompt_lookup_max": "it is a key of speculative_config: "
    + _NGRAM.format(', "prompt_lookup_max": 4'),
    "prompt_lookup_min": "it is a key of speculative_config: "
    + _NGRAM.format(', "prompt_lookup_min": 2'),
    "speculative_disable_by_batch_size": "drafts are verified in batches of any size; leave it "
    "out, or leave out speculative_config where batches are large",
    "num_lookahead_slots": "room for drafts follows from num_speculative_tokens of "
    "speculative_config; leave it out",
    "speculative_draft_tensor_parallel_size": "a draft model is computed where the model is; "
    "leave it out",
}


@dataclass(frozen=True, kw_only=True)
class EngineArgs(  # a dataclass has the fields of its last base first
    PollOptions,
    CoreOptions,
    EngineOptions,
    GPUConfig,
    CacheConfig,
    SchedulerOptions,
    ModelOptions,
):
    """Options of an engine: those of all groups. ``ConfigError`` for an unknown name.

    ``create_config`` checks the values and raises ``ConfigError``.
    """

    if not TYPE_CHECKING:  # type checkers know the names by the dataclass

        def __new__(cls, *values: Any, **options: Any) -> EngineArgs:
            """Raises ``ConfigError`` for an unknown option, with those that are named nearly so."""
            if values:
                raise ConfigError(
                    f"options are given by name, and {values[0]!r:.80} has none: write "
                    f"EngineArgs(model={values[0]!r:.80}) if it is the model"
                )
            known = [option.name for option in fields(cls)]
            for name in options:
                if name not in known:
                    raise ConfigError(refusal(name) or _unknown_option(name, known))
            return super().__new__(cls)

    def __post_init__(self) -> None:
        """Checks nothing: each group is checked when ``create_config`` makes it."""

    def create_config(self) -> EngineConfig:
        """The checked configuration. Raises ``ConfigError`` naming value, limit and way out."""
        check_types(self)
        self._check_attached()
        warn_of_typos()
        poll_timeout = asked_decode_poll_timeout_ms(self.decode_poll_timeout_ms)
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
            cache=part(CacheConfig, self),
            scheduler=part(SchedulerOptions, self),
            gpu=part(GPUConfig, self),
            core=part(CoreConfig, self, core_secret=core_secret()),
            polling=part(PollConfig, self, decode_poll_timeout_ms=poll_timeout),
            log_level=default_log_level() if self.log_level is None else self.log_level,
            torch_profiler_dir=_absolute("torch_profiler_dir", self.torch_profiler_dir),
            logits_processors=tuple(map(load_logits_processor, self.logits_processors)),
        )

    def _check_attached(self) -> None:
        """A core that runs already was given its options when it was started."""
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
    """What was given as text. A ``Path`` is a place on this machine, never a name on a hub."""
    text = str(model)
    return f"./{text}" if isinstance(model, Path) and is_hub_name(text) else text


def _absolute(name: str, path: str | Path | None) -> str | None:
    """The path as a process with another current directory can use it."""
    if path is None:
        return None
    if not str(path):
        raise ConfigError(f"{name} is '', must be a path; leave it out if there is none")
    return str(Path(path).expanduser().absolute())


def refusal(name: str) -> str | None:
    """Why there is no such option, and what to do; ``None`` for a name that is not known."""
    way_out = FOREIGN.get(name)
    return None if way_out is None else f"there is no option {name!r} here: {way_out}"


def _unknown_option(name: str, known: list[str]) -> str:
    ends = [option for option in known if option.endswith(f"_{name}")]  # as policy, predictor
    near = ends[:1] or difflib.get_close_matches(name, known, MAX_NEAR)
    if near:
        return f"unknown option {name!r}; did you mean {' or '.join(map(repr, near))}?"
    return f"unknown option {name!r}; known are: {', '.join(known)}"
