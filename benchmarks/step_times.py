"""Writes a step log of decodes among long prompts, for `metronome calibrate`, on a busy machine.

    python benchmarks/step_times.py MODEL_DIR --step-log FILE [--threads 2] [--seconds 20]
                                    [--only streams|prompts] [--pause 1.5]

Each step has the processors for itself (real-time priority, which needs its permission), and is
followed by a pause of ``--pause`` times its duration for other programs. So the times of steps are
those of a quiet machine, but the host's times between them are not. Two of these at once, one with
each ``--only``, give the times of a decode core and a prefill core that share a machine.
"""

from __future__ import annotations

import argparse
import os
import random
import time

from engine import EngineArgs, LLMEngine, SamplingParams

NUM_STREAMS, SHORT, SHORT_OUT, LONG, LONG_OUT = 8, 64, 64, (2000, 4000), 16
STEPS_BETWEEN = 90  # from a long prompt to the next, among streams
PHASES = 8  # in turn streams with long prompts, and long prompts alone
MAX_PAUSE = 1.0


class Load:
    """Adds requests so that an engine always has the next step of its kind."""

    def __init__(self, engine: LLMEngine, only: str | None) -> None:
        self._engine = engine
        self._only = only
        self._rng = random.Random(0)
        self._open: dict[str, int] = {}  # prompt tokens by id
        self._num_added = 0

    def fill(self, done: float, num_steps: int) -> None:
        """Add what is missing. done: the share of the run that has passed."""
        has_long = any(num != SHORT for num in self._open.values())
        if self._only == "prompts" or (self._only is None and int(done * PHASES) % 2):
            if not has_long:
                self._add(self._rng.randint(*LONG), LONG_OUT)
            return
        while sum(num == SHORT for num in self._open.values()) < NUM_STREAMS:
            self._add(SHORT, SHORT_OUT)
        if self._only is None and not has_long and num_steps % STEPS_BETWEEN == 0:
            self._add(self._rng.randint(*LONG), LONG_OUT)

    def step(self) -> None:
        """Run a step."""
        for output in self._engine.step():
            if output.finished:
                del self._open[output.request_id]

    def _add(self, num_prompt: int, num_new: int) -> None:
        name = str(self._num_added)
        self._num_added += 1
        self._open[name] = num_prompt
        prompt = self._rng.choices(range(100, 2000), k=num_prompt)
        params = SamplingParams(
            temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(name, prompt, params)


def set_priority(is_high: bool) -> None:
    """Give all threads of this process real-time priority, or the usual one."""
    policy = os.SCHED_FIFO if is_high else os.SCHED_OTHER
    for thread in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(thread), policy, os.sched_param(int(is_high)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--step-log", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of steps, without pauses")
    parser.add_argument("--only", choices=("streams", "prompts"))
    parser.add_argument("--pause", type=float, default=1.5)
    args = parser.parse_args()
    engine_args = EngineArgs(
        model=args.model,
        skip_tokenizer_init=True,
        log_level="error",
        num_threads=args.threads,
        max_model_len=LONG[1] + 64,
        num_kv_blocks=4000,
        step_log=args.step_log,
    )
    busy, num_steps = 0.0, 0
    with LLMEngine.from_engine_args(engine_args) as engine:
        load = Load(engine, args.only)
        while busy < args.seconds:
            load.fill(busy / args.seconds, num_steps)
            set_priority(True)
            began = time.perf_counter()
            load.step()
            seconds = time.perf_counter() - began
            set_priority(False)
            busy, num_steps = busy + seconds, num_steps + 1
            time.sleep(min(MAX_PAUSE, args.pause * seconds))
    print(f"{num_steps} steps in {busy:.1f} s, written to {args.step_log}")


if __name__ == "__main__":
    main()
