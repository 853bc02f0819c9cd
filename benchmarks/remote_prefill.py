"""Measures how a prompt that another engine has computed gets to the one that continues it.

    python benchmarks/remote_prefill.py MODEL_DIR [--tokens 2000] [--rounds 7] [--threads 1]

Two engines on this machine, each in a process of its own, are joined by shared memory, by encrypted
TCP, and, if it is installed, by Mooncake (TCP, not encrypted). Printed for each: milliseconds to
the first token of a prompt whose KV comes from the other engine, of the same prompt from the
engine's own cache, and their difference, which is the transfer with all that belongs to it; the
time to compute the prompt; and how much KV it has. Each the median, and the least.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import secrets
import socket
import statistics
import time
from typing import Any

from engine import EngineArgs, LLMEngine, SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "shared memory": {},
    "tcp": {"shares_memory": False},
    "mooncake": {"shares_memory": False, "transport": "mooncake"},
}
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def engine(args: argparse.Namespace, role: str, port: int, extra: dict[str, Any]) -> LLMEngine:
    options = {
        "kv_connector": "peers",
        "kv_role": role,
        "kv_port": port,
        "kv_connector_extra_config": extra,
    }
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=args.model,
            skip_tokenizer_init=True,
            log_level="error",
            multiprocess=True,
            num_threads=args.threads,
            max_model_len=args.tokens + 64,
            num_kv_blocks=args.tokens // 4,
            kv_transfer_config=options,
        )
    )


def first_token(engine: LLMEngine, prompt: list[int], given: Any = None) -> tuple[float, Any]:
    """Milliseconds to the output, and its parameters for another engine."""
    began = time.perf_counter()
    engine.add_request("0", prompt, ONE, kv_transfer_params=given)
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return 1e3 * (time.perf_counter() - began), outputs[-1].kv_transfer_params


def measure(args: argparse.Namespace, extra: dict[str, Any]) -> None:
    port = free_port()
    times: dict[str, list[float]] = {"from there": [], "cached": [], "transfer": [], "computed": []}
    with (
        engine(args, "kv_producer", port, extra) as producer,
        engine(args, "kv_consumer", port, extra) as consumer,
    ):
        for nth in range(args.rounds + 2):
            prompt = random.choices(range(100, 2000), k=args.tokens)
            computed, given = first_token(producer, prompt, {"do_remote_decode": True})
            time.sleep(0.05)  # in which a proxy would pass this on
            fetched, _ = first_token(consumer, prompt, given)
            cached, _ = first_token(consumer, prompt)
            if nth >= 2:
                row = (fetched, cached, fetched - cached, computed)
                for name, value in zip(times, row, strict=True):
                    times[name].append(value)
        stats = consumer.stats()
        assert stats is not None
        counters = stats.counters
        print({name: n for name, n in counters.items() if "peer." in name and n})
    for name, found in times.items():
        print(f"  {name:10} {statistics.median(found):8.1f} ms, least {min(found):8.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    os.environ["METRONOME_CORE_SECRET"] = secrets.token_hex()
    for kind, extra in KINDS.items():
        if kind == "mooncake" and importlib.util.find_spec("mooncake") is None:
            continue
        print(kind)
        measure(args, extra)


if __name__ == "__main__":
    main()
