"""Greedy tokens of trained LoRA adapters, compared with those that peft gives.

    python tools/trained_adapters.py MODEL_DIR ADAPTERS_DIR [--dtype float32] [--option NAME=VALUE]

ADAPTERS_DIR has directories `lora-NAME` in peft's format, and `lora-expected.json`: for each NAME,
and for "none", a list of prompts and greedy tokens, each with `prompt_token_ids`, `token_ids` and
`text`. Each adapter answers alone, then all of them and the base in one batch. The exit status is 1
if any token differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine import LLM, LoRARequest, SamplingParams  # noqa: E402


class Case(NamedTuple):
    """A prompt, the adapter that answers it (``None``: the base), and the expected answer."""

    name: str
    adapter: LoRARequest | None
    prompt: list[int]
    tokens: list[int]
    text: str


def read(adapters: Path) -> list[Case]:
    expected = json.loads((adapters / "lora-expected.json").read_text(encoding="utf-8"))
    cases = []
    for number, (name, answers) in enumerate(expected.items(), 1):
        path = adapters / f"lora-{name}"
        adapter = None if name == "none" else LoRARequest(name, number, str(path))
        for one in answers:
            ids, tokens = one["prompt_token_ids"], one["token_ids"]
            cases.append(Case(name, adapter, ids, tokens, one["text"]))
    return cases


def num_wrong(llm: LLM, cases: list[Case], how: str) -> int:
    """Answer all prompts in one batch, and print and count answers with other tokens."""
    params = [
        SamplingParams(temperature=0, max_tokens=len(case.tokens), skip_special_tokens=False)
        for case in cases
    ]
    prompts = [{"prompt_token_ids": case.prompt} for case in cases]
    outs = llm.generate(
        prompts, params, use_tqdm=False, lora_request=[case.adapter for case in cases]
    )
    wrong = 0
    for case, out in zip(cases, outs, strict=True):
        found = out.outputs[0].token_ids
        if list(found) != case.tokens[: len(found)] or len(found) < len(case.tokens) - 1:
            wrong += 1
            print(f"{how}: {case.name}: {out.outputs[0].text!r}, peft's {case.text!r}")
    print(f"{how}: {len(cases) - wrong} of {len(cases)} answers are peft's")
    return wrong


def given(options: Iterable[str]) -> dict[str, Any]:
    """Options of the engine from NAME=VALUE, with values in JSON where they are."""
    made = {}
    for option in options:
        name, _, value = option.partition("=")
        try:
            made[name] = json.loads(value)
        except ValueError:
            made[name] = value
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("adapters", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    cases = read(args.adapters)
    names = list(dict.fromkeys(case.name for case in cases))
    options = {"enable_lora": True, "log_level": "error", **given(args.option)}
    llm = LLM(args.model, dtype=args.dtype, max_loras=len(names), **options)
    wrong = 0
    for name in names:
        wrong += num_wrong(llm, [case for case in cases if case.name == name], name)
    wrong += num_wrong(llm, cases, "all in one batch")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
