"""Profiles what a command runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from engine.config.args import EngineArgs
from engine.errors import EngineDeadError, EngineError
from engine.llm import LLM
from engine.llm_engine import LLMEngine


@contextmanager
def profiled(engine: LLM | LLMEngine, args: EngineArgs) -> Iterator[None]:
    """Profile the body of the ``with`` if a trace directory is set, and print the trace files."""
    if args.torch_profiler_dir is None:
        yield
        return
    engine.start_profile()
    yield
    try:
        for path in engine.stop_profile():
            print(f"trace: {path}", file=sys.stderr)
    except EngineDeadError:
        raise
    except EngineError as error:  # the work itself is done: keep its result
        print(f"metronome: no trace was written: {error}", file=sys.stderr)
