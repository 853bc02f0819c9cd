"""Metronome: a step-based inference engine core for language models, with pluggable schedulers.

Public names are imported when they are first used, so that clients and schedulers do not load
torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from engine.moved import find_moved_modules

if TYPE_CHECKING:
    from engine.async_engine import AsyncLLMEngine as AsyncLLMEngine
    from engine.config.args import EngineArgs as EngineArgs
    from engine.errors import ConfigError as ConfigError
    from engine.errors import EngineDeadError as EngineDeadError
    from engine.errors import EngineError as EngineError
    from engine.errors import ModelError as ModelError
    from engine.errors import PolicyError as PolicyError
    from engine.errors import RefusedError as RefusedError
    from engine.errors import RequestError as RequestError
    from engine.errors import RequestTypeError as RequestTypeError
    from engine.errors import WireError as WireError
    from engine.llm import LLM as LLM
    from engine.llm_engine import LLMEngine as LLMEngine
    from engine.messages.adapters import LoRARequest as LoRARequest
    from engine.messages.params import SamplingParams as SamplingParams
    from engine.messages.pooling import ClassificationRequestOutput as ClassificationRequestOutput
    from engine.messages.pooling import EmbeddingRequestOutput as EmbeddingRequestOutput
    from engine.messages.pooling import PoolingParams as PoolingParams
    from engine.messages.pooling import PoolingRequestOutput as PoolingRequestOutput
    from engine.messages.pooling import ScoringRequestOutput as ScoringRequestOutput
    from engine.messages.requests import CompletionOutput as CompletionOutput
    from engine.messages.requests import FinishedRequest as FinishedRequest
    from engine.messages.requests import Logprob as Logprob
    from engine.messages.requests import RequestMetrics as RequestMetrics
    from engine.messages.requests import RequestOutput as RequestOutput
    from engine.messages.structured import StructuredOutputsParams as StructuredOutputsParams
    from engine.rpc.zmq_client import EngineCoreClient as EngineCoreClient
    from engine.sched.interface import SchedulerInterface as SchedulerInterface
    from engine.sched.policy import Policy as Policy
    from engine.sched.request import Request as Request
    from engine.sched.resource import Resource as Resource
    from engine.sched.scheduler import Scheduler as Scheduler

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLMEngine": "engine.async_engine",
    "ClassificationRequestOutput": "engine.messages.pooling",
    "CompletionOutput": "engine.messages.requests",
    "ConfigError": "engine.errors",
    "EmbeddingRequestOutput": "engine.messages.pooling",
    "EngineArgs": "engine.config.args",
    "EngineCoreClient": "engine.rpc.zmq_client",
    "EngineDeadError": "engine.errors",
    "EngineError": "engine.errors",
    "FinishedRequest": "engine.messages.requests",
    "LLM": "engine.llm",
    "LLMEngine": "engine.llm_engine",
    "LoRARequest": "engine.messages.adapters",
    "Logprob": "engine.messages.requests",
    "ModelError": "engine.errors",
    "Policy": "engine.sched.policy",
    "PolicyError": "engine.errors",
    "PoolingParams": "engine.messages.pooling",
    "PoolingRequestOutput": "engine.messages.pooling",
    "RefusedError": "engine.errors",
    "Request": "engine.sched.request",
    "RequestError": "engine.errors",
    "RequestMetrics": "engine.messages.requests",
    "RequestOutput": "engine.messages.requests",
    "RequestTypeError": "engine.errors",
    "Resource": "engine.sched.resource",
    "SamplingParams": "engine.messages.params",
    "Scheduler": "engine.sched.scheduler",
    "SchedulerInterface": "engine.sched.interface",
    "ScoringRequestOutput": "engine.messages.pooling",
    "StructuredOutputsParams": "engine.messages.structured",
    "WireError": "engine.errors",
}

__all__ = [*_HOMES, "__version__"]

find_moved_modules()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
