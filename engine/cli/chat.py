"""Chat with a model in the terminal; answers are streamed, the conversation is remembered."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator

from engine.cli.options import (
    add_adapter_option,
    add_engine_options,
    add_sampling_options,
    engine_args,
    load_adapter,
    sampling_params,
    with_adapter,
)
from engine.cli.profiling import profiled
from engine.cli.streaming import stream
from engine.errors import RequestError
from engine.llm_engine import LLMEngine

RESET = "/reset"
HINT = f"Ctrl-C ends an answer, Ctrl-D the chat; {RESET} forgets the conversation."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--system", metavar="TEXT", help="the system message, before your first one"
    )
    add_adapter_option(parser)
    add_sampling_options(parser, max_tokens=512)
    add_engine_options(parser)


def run(parsed: argparse.Namespace) -> int:
    sampling_params(parsed)  # reports errors before anything is loaded
    opening = [{"role": "system", "content": parsed.system}] if parsed.system else []
    messages = list(opening)
    args = with_adapter(engine_args(parsed, finds_model=True), parsed)
    with LLMEngine.from_engine_args(args) as engine, profiled(engine, args):
        params = sampling_params(parsed, engine.session.recommended)
        adapter = load_adapter(engine, parsed)
        tokenizer = engine.get_tokenizer()
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}]
        )  # fails early if there is no template
        print(HINT)
        for number, line in zip(itertools.count(), _lines()):
            if line == RESET:
                messages = list(opening)
                continue
            messages.append({"role": "user", "content": line})
            try:
                text = tokenizer.apply_chat_template(messages)
                ids = tokenizer.encode(text, add_special_tokens=False)
                engine.add_request(str(number), ids, params, lora_request=adapter)
            except RequestError as error:  # for example too long: keep the earlier messages
                messages.pop()
                print(f"[{error}; {RESET} forgets the conversation]")
                continue
            answer = stream(engine, str(number))
            messages.append({"role": "assistant", "content": answer.text})
            print(f"\n[{answer.figures}]")
    return 0


def _lines() -> Iterator[str]:
    """Yield the lines that the user types, or those of standard input if it is not a terminal."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line:
            yield line
