"""Complete prompts: one prompt is streamed, several are computed together."""

from __future__ import annotations

import argparse
import sys
import time

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
from engine.cli.streaming import RunFigures, stream, write_out
from engine.config.args import EngineArgs
from engine.errors import RequestError
from engine.llm import LLM
from engine.llm_engine import LLMEngine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="standard input, if none is given"
    )
    add_adapter_option(parser)
    add_sampling_options(parser, max_tokens=128)
    add_engine_options(parser)


def run(parsed: argparse.Namespace) -> int:
    prompts = parsed.prompts or [_standard_input()]
    sampling_params(parsed)  # reports errors before anything is loaded
    complete = _stream_one if len(prompts) == 1 else _complete_many
    args = with_adapter(engine_args(parsed, finds_model=True), parsed)
    figures = complete(prompts, parsed, args)
    print(f"\n[{figures}]")
    return 0


def _stream_one(prompts: list[str], parsed: argparse.Namespace, args: EngineArgs) -> RunFigures:
    with LLMEngine.from_engine_args(args) as engine, profiled(engine, args):
        params = sampling_params(parsed, engine.session.recommended)
        adapter = load_adapter(engine, parsed)
        engine.add_request("0", prompts[0], params, lora_request=adapter)
        write_out(prompts[0])
        answer = stream(engine, "0")
    print()
    if answer.is_interrupted:
        print(f"\n[{answer.figures}]")
        raise KeyboardInterrupt
    return answer.figures


def _complete_many(prompts: list[str], parsed: argparse.Namespace, args: EngineArgs) -> RunFigures:
    with LLM(**vars(args)) as llm:
        params = sampling_params(parsed, llm.llm_engine.session.recommended)
        adapter = load_adapter(llm.llm_engine, parsed)
        start = time.perf_counter()
        with profiled(llm, args):
            outputs = llm.generate(prompts, params, lora_request=adapter)
        seconds = time.perf_counter() - start
    for output in outputs:
        print(f"{output.prompt}{output.outputs[0].text}\n")
    return RunFigures(
        num_prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        num_output_tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        seconds=seconds,
    )


def _standard_input() -> str:
    text = "" if sys.stdin.isatty() else sys.stdin.read()
    if not text:
        raise RequestError('no prompt: give one, as in metronome generate "Once upon a time"')
    return text.rstrip("\n")
