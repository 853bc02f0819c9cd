"""Drafts from the request's own text, on prompts that ask to copy or to edit a text.

    python benchmarks/copying.py MODEL_DIR [--method ngram] [--drafts 4] [--tokens 192] [--rounds 5]
                                 [--json FILE]

One stream, greedy, a chat template if the model has one, the type of the checkpoint. Two engines in
one process take turns, so that a machine that changes its speed changes it for both. Of a prompt
count the tokens that stand in a run of three or more of the prompt: where the model's own text
repeats less than --share of its tokens, there was nothing to draft, and the prompt is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import machine
from measure import median_interval
from rich.console import Console
from rich.table import Table

from engine import LLM, SamplingParams

TEXTS = {
    "notice": (
        "The library will be closed on Monday for repairs. Books that are due on that day may be "
        "returned on Tuesday without a fee. The reading room opens again at nine o'clock."
    ),
    "recipe": (
        "Mix two cups of flour with one cup of sugar. Add three eggs and half a cup of butter. "
        "Stir until the dough is smooth, pour it into a pan and bake it for forty minutes."
    ),
    "letter": (
        "Dear Mr. Brown, thank you for your order of the third of May. We have sent the lamps and "
        "the two chairs today. The table will follow next week. Kind regards, Anna Smith."
    ),
    "code": (
        "def total(prices, tax):\n    result = 0\n    for price in prices:\n"
        "        result = result + price * (1 + tax)\n    return result\n\n"
        "def mean(prices):\n    return total(prices, 0) / len(prices)"
    ),
    "json": (
        '{"name": "lamp", "price": 12, "colours": ["red", "green"], "stock": 4}\n'
        '{"name": "chair", "price": 40, "colours": ["white"], "stock": 9}\n'
        '{"name": "table", "price": 95, "colours": ["brown", "white"], "stock": 1}'
    ),
}
TASKS = {
    "copy": "Repeat the following text exactly, word for word, and write nothing else:\n\n{}",
    "twice": "Write the following text two times:\n\n{}",
    "capitals": "Correct the spelling of the following text and return the whole text:\n\n{}",
    "quote": "Quote the following text in full, then say in one sentence what it is:\n\n{}",
}


class Found(NamedTuple):
    """Of one prompt."""

    name: str
    share: float  # of the model's tokens that stand in a run of the prompt's
    num_tokens: int
    speed_up: float
    interval: tuple[float, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--method", default="ngram", choices=("ngram", "suffix"))
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    spec = {"method": asked.method, "num_speculative_tokens": asked.drafts}
    if asked.method == "ngram":
        spec |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    sizes = {"max_model_len": 1024, "max_num_seqs": 8, "log_level": "error"}
    with (
        LLM(asked.model, **sizes) as plain,
        LLM(asked.model, speculative_config=spec, **sizes) as own,
    ):
        found = [measure(name, plain, own, asked) for name in names()]
    repeating = [one for one in found if one.share >= asked.share]
    show(found, repeating, asked)
    if asked.json:
        rows = [one._asdict() for one in found]
        asked.json.write_text(
            json.dumps({"machine": machine.describe(), "prompts": rows}, indent=1)
        )
    return 0


def names() -> list[str]:
    return [f"{task}, {text}" for task in TASKS for text in TEXTS]


def prompt_of(name: str, llm: LLM) -> list[int]:
    task, text = name.split(", ")
    tokenizer = llm.get_tokenizer()
    asked = TASKS[task].format(TEXTS[text])
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": asked}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        return list(tokenizer.encode(text, add_special_tokens=False))
    return list(tokenizer.encode(asked))


def measure(name: str, plain: LLM, own: LLM, asked: argparse.Namespace) -> Found:
    prompt = prompt_of(name, plain)
    said, _ = run(plain, prompt, asked.tokens)
    ratios = []
    for turn in range(asked.rounds + 1):
        both = [plain, own] if turn % 2 else [own, plain]
        rates = {id(llm): run(llm, prompt, asked.tokens)[1] for llm in both}
        if turn:
            ratios.append(rates[id(own)] / rates[id(plain)])
    low, high = median_interval(ratios)
    return Found(name, repeated(prompt, said), len(said), statistics.median(ratios), (low, high))


def run(llm: LLM, prompt: list[int], num_tokens: int) -> tuple[list[int], float]:
    """Tokens, and tokens a second, the prompt's time among them."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens)
    engine = llm.llm_engine
    engine.add_request("one", prompt, params)
    began, last = time.perf_counter(), []
    while engine.has_unfinished_requests():
        for output in engine.step():
            last = list(output.outputs[0].token_ids)
    return last, len(last) / max(time.perf_counter() - began, 1e-9)


def repeated(prompt: list[int], said: list[int], run_length: int = 3) -> float:
    """The share of tokens that stand in a run of so many of the prompt's."""
    runs = {tuple(prompt[i : i + run_length]) for i in range(len(prompt) - run_length + 1)}
    stands = [False] * len(said)
    for i in range(len(said) - run_length + 1):
        if tuple(said[i : i + run_length]) in runs:
            stands[i : i + run_length] = [True] * run_length
    return sum(stands) / max(len(said), 1)


def show(found: list[Found], repeating: list[Found], asked: argparse.Namespace) -> None:
    table = Table(title=f"{Path(asked.model).name}, {asked.method}, {asked.drafts} drafts")
    for column in ("prompt", "tokens", "repeated", "speed-up", "95 %"):
        table.add_column(column)
    for one in found:
        low, high = one.interval
        cells = (str(one.num_tokens), f"{one.share:.0%}", f"{one.speed_up:.2f}")
        table.add_row(one.name, *cells, f"{low:.2f} to {high:.2f}")
    Console(width=110).print(table)
    if repeating:
        middle = statistics.median(one.speed_up for one in repeating)
        print(f"{len(repeating)} of {len(found)} repeat {asked.share:.0%} or more: {middle:.2f} x")


if __name__ == "__main__":
    sys.exit(main())
