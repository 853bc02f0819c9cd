"""Measures what LoRA adapters cost, next to an engine without them.

    python benchmarks/adapters.py MODEL_DIR [--cases none,one,8,zipf] [--rank 16] [--slots 16]
                                  [--zipf 256] [--rounds 7] [--threads N] [--json FILE]

Adapters have random weights for all linear layers, and are read from disk before the first round.
Two engines in one process compute the same prompts in turn, one with ``enable_lora``. Shown is the
share of the other engine's throughput, by the clock and by processor time (which other programs
disturb less; with --threads 1 no thread spins). Cases: ``none``: no request uses an adapter;
``one``: one of 32 does; a number: 32 requests share that many; ``zipf``: each of 96 requests draws
one of many by Zipf's law; ``decode``, ``prompt``: a lone request with an adapter.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import machine
import torch
from figures import keep, print_table
from measure import median_interval
from safetensors.torch import save_file

from engine import LLM, LoRARequest, SamplingParams
from engine.config.model import read_model_info
from engine.models.load import native_spec
from engine.models.targets import targets

BATCH, FIRST, LAST = 32, 5, 20_000  # requests of a batch, range of the prompts' tokens
LINEARS = ("qkv", "out", "gate_up", "down")


class Load(NamedTuple):
    """Requests of equal lengths, and the adapter of each."""

    prompt: int
    output: int
    adapters: Sequence[LoRARequest | None]


def write_adapter(model: str, root: Path, rank: int, seed: int) -> None:
    """Write a random adapter of the attention and MLP of all layers."""
    spec = native_spec(read_model_info(model))
    assert spec is not None, f"{model} is not of a native family"
    rng, made = torch.Generator().manual_seed(seed), {}
    for target in targets(spec):
        if target.name.rpartition(".")[2] not in LINEARS:
            continue
        for part in target.ways[0]:
            (outputs, inputs), path = part.shape, part.name.removesuffix(".weight")
            a, b = torch.randn(rank, inputs, generator=rng), torch.randn(outputs, rank)
            made[f"base_model.model.{path}.lora_A.weight"] = (a / inputs**0.5).bfloat16()
            made[f"base_model.model.{path}.lora_B.weight"] = (0.01 * b).bfloat16()
    root.mkdir(parents=True)
    save_file(made, root / "adapter_model.safetensors")
    config = f'{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {rank}, "target_modules": '
    (root / "adapter_config.json").write_text(config + '"all-linear"}')


def load_of(name: str, adapters: Sequence[LoRARequest], rng: random.Random) -> Load:
    """The load of a case."""
    if name == "none":
        return Load(64, 64, [None] * BATCH)
    if name == "one":
        return Load(64, 64, [adapters[0], *[None] * (BATCH - 1)])
    if name == "decode":
        return Load(8, 128, adapters[:1])
    if name == "prompt":
        return Load(1024, 1, adapters[:1])
    if name == "zipf":
        weights = [1 / rank for rank in range(1, len(adapters) + 1)]
        return Load(64, 64, rng.choices(adapters, weights, k=3 * BATCH))
    return Load(64, 64, [adapters[index % int(name)] for index in range(BATCH)])


def num_adapters(name: str, num_zipf: int) -> int:
    """How many adapters a case uses."""
    if name == "zipf":
        return num_zipf
    return int(name) if name.isdigit() else 1


def seconds(llm: LLM, load: Load, rng: random.Random, *, is_adapted: bool) -> tuple[float, float]:
    """Compute a load; returns seconds by the clock and of the processor."""
    prompts: list[Any] = [
        {"prompt_token_ids": rng.choices(range(FIRST, LAST), k=load.prompt)} for _ in load.adapters
    ]
    params = SamplingParams(
        temperature=0, max_tokens=load.output, ignore_eos=True, detokenize=False
    )
    used = list(load.adapters) if is_adapted else None
    began, busy = time.perf_counter(), time.process_time()
    llm.generate(prompts, params, use_tqdm=False, lora_request=used)
    return time.perf_counter() - began, time.process_time() - busy


def measured(plain: LLM, adapted: LLM, load: Load, rounds: int) -> dict[str, Any]:
    """Both engines in turn, after two rounds in which steps are recorded."""
    rng, pairs = random.Random(0), []
    for turn in range(2 + rounds):
        sides = {False: plain, True: adapted}
        order = sides if turn % 2 else dict(reversed(sides.items()))
        found = {key: seconds(llm, load, rng, is_adapted=key) for key, llm in order.items()}
        pairs.append((found[False], found[True]))
    clock, busy = ([other[place] / own[place] for other, own in pairs[2:]] for place in range(2))
    return {
        "share": statistics.median(clock),
        "interval": median_interval(clock),
        "processor": statistics.median(busy),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="model directory")
    parser.add_argument("--cases", default="none,one,8,zipf")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--zipf", type=int, default=256, help="adapters of the case zipf")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="keep the figures here")
    args = parser.parse_args()
    names, rows = args.cases.split(","), []
    options: dict[str, Any] = {
        "log_level": "error",
        "max_model_len": 2048,
        "num_kv_blocks": 1024,
        "enable_prefix_caching": False,
        "num_threads": args.threads,
        "skip_tokenizer_init": True,
    }
    with tempfile.TemporaryDirectory() as root:
        adapters = []
        for number in range(max(num_adapters(name, args.zipf) for name in names)):
            path = Path(root) / str(number)
            write_adapter(args.model, path, args.rank, number)
            adapters.append(LoRARequest(f"adapter-{number}", number + 1, str(path)))
        plain = LLM(args.model, **options)
        adapted = LLM(args.model, enable_lora=True, max_loras=args.slots, **options)
        for name in names:
            load = load_of(name, adapters, random.Random(1))
            for one in {one.lora_int_id: one for one in load.adapters if one}.values():
                adapted.llm_engine.add_lora(one)
            rows.append({"case": name, **measured(plain, adapted, load, args.rounds)})
    shown = [
        (
            row["case"],
            f"{row['share']:.3f}",
            "{:.3f} to {:.3f}".format(*row["interval"]),
            f"{row['processor']:.3f}",
        )
        for row in rows
    ]
    title = f"{Path(args.model).name}, rank {args.rank}, {machine.describe()['cpu']}"
    print_table(title, ("adapters", "share of throughput", "95 %", "by processor time"), shown)
    keep(args.json, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
