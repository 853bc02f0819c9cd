"""Whole engines whose core dies while requests with grammars and with drafts are in flight."""

from __future__ import annotations

import os
import signal
import time
from functools import cache
from typing import Any

from engine import EngineArgs, LLMEngine, SamplingParams, StructuredOutputsParams
from engine.assets import BOX_MODEL
from engine.rpc.zmq_client import EngineCoreClient

HANG_SECONDS = 2.0
FEW = {"num_speculative_tokens": 3, "adaptive": False}
DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", **FEW, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "draft_model": {"method": "draft_model", "model": str(BOX_MODEL), **FEW},
}
PROMPT = "one two three one two three one two"
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 90, "maxItems": 99}
FORMS: tuple[dict[str, Any], ...] = (
    {"regex": "([a-z]{2,7} ){90,99}"},
    {"json": NUMBERS, "disable_any_whitespace": True},
    {"grammar": 'start: "[" start "]" /[0-9]{1,3}/ start | "."\n'},
)


def asked() -> list[SamplingParams]:
    """Requests with grammars, and as many without; none ends before it has said much."""
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 160}
    forms = [StructuredOutputsParams(**form) for form in FORMS]
    return [
        *(SamplingParams(seed=s, structured_outputs=f, **options) for s, f in enumerate(forms)),
        *(SamplingParams(seed=s, ignore_eos=True, **options) for s in range(len(forms))),
    ]


def engine_of(**options: Any) -> LLMEngine:
    args = EngineArgs(
        model=str(BOX_MODEL),
        dtype="float32",
        num_threads=1,
        num_kv_blocks=400,
        max_model_len=256,
        max_num_seqs=8,
        disable_log_stats=True,
        log_level="error",
        **options,
    )
    return LLMEngine.from_engine_args(args)


class Streams:
    """The requests above in an engine whose core is a process, and their texts so far."""

    def __init__(self, method: str) -> None:
        self.engine = engine_of(
            speculative_config=DRAFTS[method], multiprocess=True, core_hang_timeout=HANG_SECONDS
        )
        client = self.engine.session.client
        assert isinstance(client, EngineCoreClient), "the core is no process of its own"
        self.client = client
        self.texts = [""] * len(asked())
        self.num_drafts = 0

    def come_to(self, phase: str) -> None:
        """All have come; all have said something; or they have, and the core is told to end."""
        for number, params in enumerate(asked()):
            self.engine.add_request(str(number), PROMPT, params)
        if phase == "prefill":
            return
        while not all(self.texts):
            self.read()
        stats = self.engine.stats()
        self.num_drafts = stats.counters["drafts.num_draft_tokens"]
        if phase == "draining":
            os.kill(self.client.pids[0], signal.SIGTERM)
            time.sleep(0.05)

    def read(self) -> None:
        for output in self.engine.step():
            self.texts[int(output.request_id)] = output.outputs[0].text

    def read_for_ever(self) -> None:
        while self.engine.has_unfinished_requests():
            self.read()
        while True:
            self.client.step()
            self.client.call("stats")


@cache
def texts_of_nobody_hurt() -> tuple[str, ...]:
    """What these requests say without drafts, in a core that lives."""
    with engine_of() as engine:
        for number, params in enumerate(asked()):
            engine.add_request(str(number), PROMPT, params)
        texts = [""] * len(asked())
        while engine.has_unfinished_requests():
            for output in engine.step():
                texts[int(output.request_id)] = output.outputs[0].text
    return tuple(texts)
