"""Engines in processes of their own that compute prompts for each other over TCP."""

from __future__ import annotations

import time
from typing import Any

from engine import LLMEngine, RequestOutput, SamplingParams
from engine.kv_transfer.peers.options import MOST_SECONDS
from support.patience import WAIT_SECONDS

SECRET = "a secret that these engines share"
TO_PRODUCER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)


def peers(role: str, port: int = 14579, **extra: Any) -> dict[str, Any]:
    """The option ``kv_transfer_config`` of an engine with this role, which is patient."""
    return {
        "kv_connector": "peers",
        "kv_role": f"kv_{role}",
        "kv_ip": "127.0.0.1",
        "kv_port": port,
        "kv_connector_extra_config": {"timeout": MOST_SECONDS, **extra},
    }


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    """The last outputs of all requests, by id."""
    last: dict[str, RequestOutput] = {}
    until = time.monotonic() + WAIT_SECONDS
    while engine.has_unfinished_requests():
        assert time.monotonic() < until
        last |= {out.request_id: out for out in engine.step()}
    return last


def prefill(engine: LLMEngine, prompts: list[Any], **options: Any) -> list[dict[str, Any]]:
    """Have a producer compute prompts. Returns the parameters for the consumer."""
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, ONE, kv_transfer_params=TO_PRODUCER, **options)
    outs = finish(engine)
    found = [outs[str(number)].kv_transfer_params for number in range(len(prompts))]
    return [{} if each is None else each for each in found]


def decode(
    engine: LLMEngine,
    prompts: list[Any],
    given: list[dict[str, Any]],
    params: SamplingParams,
    **options: Any,
) -> list[RequestOutput]:
    """Have a consumer continue requests."""
    for number, (prompt, each) in enumerate(zip(prompts, given, strict=True)):
        engine.add_request(str(number), prompt, params, kv_transfer_params=each, **options)
    outs = finish(engine)
    return [outs[str(number)] for number in range(len(prompts))]


def counters(engine: LLMEngine, prefix: str = "kv load.") -> dict[str, int]:
    """Counters of loads, and of the stores."""
    stats = engine.stats()
    assert stats is not None
    found = stats.counters.items()
    return {name[len(prefix) :]: int(n) for name, n in found if name.startswith(prefix)}


def is_idle(engine: LLMEngine) -> bool:
    """True if no request holds anything."""
    stats = engine.stats()
    assert stats is not None
    return not (stats.num_running or stats.num_waiting or stats.num_parked or stats.kv_usage)
