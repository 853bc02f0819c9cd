"""Measures queries, and a chat, next to a burst of texts to embed, over HTTP.

    python benchmarks/embedding_burst.py MODEL_DIR [--chat CHAT_MODEL_DIR] [--texts 1000]
                                         [--rounds 3] [--nice 19] [--json FILE]

One server embeds with the policy ``priority``. Queries of priority 0 arrive by chance (Poisson), 10
a second; the burst is one request of 1,000 texts of priority 1. Shown: times of queries alone and
next to the burst, the longest step of the burst, and the burst's throughput with and without
queries. With --chat, a second server answers one chat after the other, alone and next to the same
burst in the first, which then runs with niceness --nice; shown are the times between its tokens,
and the share of processor time that the machine gave to others meanwhile (steal).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
from embeddings import texts_of
from figures import keep, print_table
from measure import quantile

RATE, SECONDS = 10.0, 8.0  # queries a second; how long without a burst
QUERY = "What does a step of the engine cost?"
CHAT_TOKENS = 96


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def serving(model: Path, *options: str, niceness: int = 0) -> Iterator[str]:
    """A server in a process of its own, at a lower priority if niceness > 0; yields its address."""
    port = free_port()
    start = "from engine.cli.entry import run; run()"
    command = [sys.executable, "-c", start, "serve", str(model), "--port", str(port)]
    command = ["nice", "-n", str(niceness), *command]
    with subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL) as process:
        base = f"http://127.0.0.1:{port}"
        try:
            for _ in range(1200):
                try:
                    if httpx.get(f"{base}/health", timeout=1.0).status_code == httpx.codes.OK:
                        break
                except httpx.HTTPError:
                    time.sleep(0.1)
            yield base
        finally:
            process.terminate()


def stolen() -> tuple[int, int]:
    """Ticks of processor time given to other machines, and all ticks."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    numbers = [int(field) for field in fields]
    return numbers[7], sum(numbers[:8])


class Load:
    """Queries and bursts to one server."""

    def __init__(self, client: httpx.AsyncClient, base: str, texts: list[str]) -> None:
        self._client = client
        self._url = f"{base}/v1/embeddings"
        self._texts = texts

    async def embed(self, given: str | list[str], priority: int) -> tuple[float, int]:
        """Seconds, and tokens, of one request."""
        began = time.perf_counter()
        body = {"input": given, "priority": priority, "encoding_format": "base64"}
        answer = await self._client.post(self._url, json=body)
        answer.raise_for_status()
        return time.perf_counter() - began, answer.json()["usage"]["total_tokens"]

    async def queries(self, until: asyncio.Event, seed: int) -> list[float]:
        """Seconds of each query, until the event."""
        rng, jobs = random.Random(seed), []
        while not until.is_set():
            jobs.append(asyncio.create_task(self.embed(QUERY, 0)))
            await asyncio.sleep(rng.expovariate(RATE))
        return [seconds for seconds, _ in await asyncio.gather(*jobs)]

    async def alone(self, seed: int) -> list[float]:
        over = asyncio.Event()
        asyncio.get_running_loop().call_later(SECONDS, over.set)
        return await self.queries(over, seed)

    async def both(self, seed: int) -> tuple[list[float], float]:
        """Seconds of queries next to a burst, and tokens per second of the burst."""
        over = asyncio.Event()
        job = asyncio.create_task(self.queries(over, seed))
        await asyncio.sleep(0.2)
        rate = await self.burst()
        over.set()
        return await job, rate

    async def burst(self) -> float:
        """Tokens per second of a burst."""
        seconds, tokens = await self.embed(self._texts, 1)
        return tokens / seconds


async def gaps(client: httpx.AsyncClient, base: str, until: asyncio.Event) -> list[float]:
    """Seconds between the tokens of chats, one after the other, until the event."""
    found: list[float] = []
    models = (await client.get(f"{base}/v1/models")).json()["data"]
    while not until.is_set():
        body = {
            "model": models[0]["id"],
            "messages": [{"role": "user", "content": "Tell me about the sea."}],
            "max_tokens": CHAT_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        last = None
        async with client.stream("POST", f"{base}/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and '"content"' in line:
                    now = time.perf_counter()
                    if last is not None:
                        found.append(now - last)
                    last = now
    return found


@asynccontextmanager
async def chatting(client: httpx.AsyncClient, base: str) -> AsyncIterator[list[float]]:
    """Chats while the block runs; yields the list that then has the times between tokens."""
    found: list[float] = []
    over = asyncio.Event()
    job = asyncio.create_task(gaps(client, base, over))
    await asyncio.sleep(0.5)
    yield found
    over.set()
    found += await job


async def measure(
    model: Path, chat: Path | None, num_texts: int, rounds: int, niceness: int
) -> dict[str, Any]:
    """All figures, lists with one entry for each round."""
    base_texts = texts_of(model)["many"]
    texts = [f"{i} {base_texts[i % len(base_texts)]}" for i in range(num_texts)]
    figures: dict[str, Any] = {}

    def note(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)

    with serving(model, "--scheduling-policy", "priority") as base:
        async with httpx.AsyncClient(timeout=600.0) as client:
            load = Load(client, base, texts)
            await load.burst()
            for seed in range(rounds):
                alone = await load.alone(seed)
                note("alone_p50", statistics.median(alone))
                note("alone_p99", quantile(alone, 0.99))
                note("burst_alone", await load.burst())
                next_to, rate = await load.both(seed)
                note("next_to_p50", statistics.median(next_to))
                note("next_to_p99", quantile(next_to, 0.99))
                note("burst_next_to", rate)
            async with httpx.AsyncClient() as plain:
                figures["metrics"] = (await plain.get(f"{base}/metrics")).text.splitlines()
    if chat is None:
        return figures
    with serving(model, niceness=niceness) as base, serving(chat) as chat_base:
        async with httpx.AsyncClient(timeout=600.0) as client:
            load = Load(client, base, texts)
            await load.burst()
            for _ in range(rounds):
                async with chatting(client, chat_base) as found:
                    await asyncio.sleep(SECONDS)
                note("gap_alone_p50", statistics.median(found))
                note("gap_alone_p99", quantile(found, 0.99))
                before = stolen()
                async with chatting(client, chat_base) as found:
                    rate = await load.burst()
                after = stolen()
                note("burst_next_to_chat", rate)
                note("gap_next_to_p50", statistics.median(found))
                note("gap_next_to_p99", quantile(found, 0.99))
                note("stolen", (after[0] - before[0]) / (after[1] - before[1]))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--chat", type=Path)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nice", type=int, default=19)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = asyncio.run(
        measure(options.model, options.chat, options.texts, options.rounds, options.nice)
    )
    metrics = found.pop("metrics")
    print("\n".join(line for line in metrics if "step" in line and not line.startswith("#")))
    rows = []
    for name, values in found.items():
        shown = [f"{each:,.0f}" if "burst" in name else f"{1e3 * each:.2f}" for each in values]
        if name == "stolen":
            shown = [f"{100 * each:.1f} %" for each in values]
        rows.append((name, str(statistics.median(values)), ", ".join(shown)))
    print_table("milliseconds; tokens/s of bursts", ("figure", "median", "rounds"), rows)
    keep(options.json, figures=found, metrics=json.dumps(metrics[:0]))


if __name__ == "__main__":
    main()
