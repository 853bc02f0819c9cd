"""Measures prompts with pictures: first tokens next to peers, and what pictures cost others.

    python benchmarks/pictures.py MODEL_DIR [--parts first,again,prepare,burst] [--rounds 3]
                                  [--counts 1 8] [--vllm-python V] [--transformers]
                                  [--json FILE]

Models of `mid`'s size are written by `make_models.py --shapes idefics3-mid,llava-mid --forms bf16`.

* `first`: time to the first token with 1 and 8 pictures of 1,280 x 720, in fresh processes that
  take turns.
* `again`: a second request with the same picture after another text, next to a request of the same
  number of text tokens.
* `prepare`: processor time from the files to the request and its pixels, also in shared memory,
  next to decoding and the image processor alone.
* `burst`: eight requests decode while 32 requests with one picture each arrive. Counted in the
  replayed step log: encoder runs between two tokens of a stream, and tokens encoded in a step.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from figures import keep, print_table
from measure import median_interval, quantile
from pairs import in_order
from PIL import Image

from engine import LLM, EngineArgs, LLMEngine, SamplingParams
from engine.core.replay import Replay
from engine.ipc.pixel_segments import share
from engine.messages.step import StepPlan
from engine.observe.steplog import PlanRecord, StepLog

HERE = Path(__file__).parent
SIZE = (1280, 720)
IMAGE = "<image>"
MAX_LEN = 16384
STREAMS, BURST = 8, 32
PARTS = ("first", "again", "prepare", "burst")


def picture(seed: int) -> bytes:
    """A JPEG file of coloured areas with some noise, about as large as a screenshot."""
    rng = np.random.default_rng(seed)
    areas = rng.integers(0, 256, (18, 32, 3)).repeat(40, axis=0).repeat(40, axis=1)
    noisy = areas + rng.normal(0, 8, areas.shape)
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def seen(engine: str, python: str, model: Path, task: dict[str, Any]) -> list[dict[str, Any]]:
    """Figures of one fresh process of an engine; why it has failed, if it has."""
    command = [python, str(HERE / "peers" / "seer.py"), engine, str(model)]
    done = subprocess.run(
        command, input=json.dumps(task), capture_output=True, text=True, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("FIGURES "):
            return list(json.loads(line.removeprefix("FIGURES ")))
    raise SystemExit(f"{engine} has failed:\n{done.stderr[-3000:]}")


def first(options: argparse.Namespace) -> dict[str, Any]:
    pythons = {"metronome": sys.executable}
    if options.vllm_python:
        pythons["vllm"] = options.vllm_python
    if options.transformers:
        pythons["transformers"] = sys.executable
    task = {
        "files": [base64.b64encode(picture(seed)).decode() for seed in range(12)],
        "prompts": [(0, 1), (1, 1), (2, 1), (3, 1)] + [(4, 8)] * (8 in options.counts),
        "image": IMAGE,
        "max_len": MAX_LEN,
    }
    runs: dict[str, list[dict[int, float]]] = {engine: [] for engine in pythons}
    tokens: dict[int, int] = {}
    for turn in range(options.rounds):
        for engine in list(pythons) if turn % 2 == 0 else list(reversed(pythons)):
            found = seen(engine, pythons[engine], options.model, task)[1:]  # the first one warms up
            runs[engine].append(
                {
                    count: statistics.median(e["seconds"] for e in found if e["count"] == count)
                    for count in options.counts
                }
            )
            tokens |= {each["count"]: each["tokens"] for each in found}
    kept: dict[str, Any] = {}
    rows = []
    for engine, turns in runs.items():
        kept[engine] = {}
        for count in options.counts:
            ratios = [
                theirs[count] / ours[count]
                for theirs, ours in zip(turns, runs["metronome"], strict=True)
            ]
            middle = statistics.median(each[count] for each in turns)
            shown = ", ".join(f"{each:.2f}" for each in median_interval(ratios))
            cells = f"{1e3 * middle:,.0f}", f"{statistics.median(ratios):.2f} [{shown}]"
            rows.append((engine, f"{count}", f"{tokens[count]:,}", *cells))
            kept[engine][count] = {"seconds": middle, "times_ours": ratios}
    print_table("first token", ("engine", "pictures", "tokens", "ms", "its time / ours"), rows)
    return kept


def again(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first token, with a picture that has been encoded and with text instead."""
    llm = LLM(
        str(options.model), max_model_len=MAX_LEN, log_level="warning", encoder_cache_size=MAX_LEN
    )
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    tokenizer = llm.get_tokenizer()
    draw = random.Random(1)

    def timed(prompt: Any) -> tuple[float, int]:
        start = time.perf_counter()
        (found,) = llm.generate(prompt, params, use_tqdm=False)
        return time.perf_counter() - start, len(found.prompt_token_ids or ())

    file = picture(1)
    shown, plain = [], []
    for turn in range(10 * options.rounds + 2):
        words = tokenizer.decode([draw.randrange(300, 3000) for _ in range(16)])
        given = {"prompt": f"{words}{IMAGE} {turn}", "multi_modal_data": {"image": file}}
        seconds, count = timed(given)
        text = [draw.randrange(300, 3000) for _ in range(count)]
        if turn > 1:  # the first ones encode and warm up
            shown.append(seconds)
            plain.append(timed({"prompt_token_ids": text})[0])
    ratios = [a / b for a, b in zip(shown, plain, strict=True)]
    kept = {
        "tokens": count,
        "picture_ms": 1e3 * statistics.median(shown),
        "text_ms": 1e3 * statistics.median(plain),
        "ratio": statistics.median(ratios),
        "interval": median_interval(ratios),
    }
    print_table("the same picture again", tuple(kept), [tuple(str(each) for each in kept.values())])
    return kept


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Processor seconds from files to pixels: ours, and the image processor alone."""
    import transformers

    engine = LLMEngine.from_engine_args(
        EngineArgs(model=str(options.model), max_model_len=MAX_LEN, log_level="warning")
    )
    inputs = engine.session.inputs
    assert inputs.pictures is not None
    processor = transformers.AutoImageProcessor.from_pretrained(options.model, backend="pil")
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    pictures = inputs.pictures
    ours, sent, alone = [], [], []

    def by_itself(file: bytes, _: int) -> None:
        start = time.process_time()
        with Image.open(io.BytesIO(file)) as image:
            processor(image.convert("RGB"), return_tensors="np")
        alone.append(time.process_time() - start)

    def by_us(file: bytes, turn: int) -> None:
        start = time.process_time()
        given: Any = {"prompt": f"{IMAGE} {turn}", "multi_modal_data": {"image": file}}
        submission = inputs.process(str(turn), given, params, {})
        (opened,) = submission.pictures.values()
        pixels = pictures.pixels(opened)
        ours.append(time.process_time() - start)
        share(pixels).close()
        sent.append(time.process_time() - start)

    files = [picture(seed) for seed in range(10 * options.rounds + 2)]
    for turn, file in enumerate(files):
        for side in in_order({"alone": by_itself, "ours": by_us}, turn).values():
            side(file, turn)
    ratios, shared = (
        [a / b for a, b in zip(found[2:], alone[2:], strict=True)] for found in (ours, sent)
    )
    kept = {
        "ours_ms": 1e3 * statistics.median(ours[2:]),
        "alone_ms": 1e3 * statistics.median(alone[2:]),
        "ratio": statistics.median(ratios),
        "interval": median_interval(ratios),
        "with_transport": statistics.median(shared),
    }
    print_table("processor time of preparing", tuple(kept), [tuple(map(str, kept.values()))])
    return kept


class Counted(Replay):
    """Counts encoder runs in a replayed step log."""

    def __init__(self, log: StepLog) -> None:
        super().__init__(log.header, {})
        self.budget = log.header.encoder_sizes[0]
        self.tokens: list[int] = []  # encoded in a step, for each step that encodes
        self.most_between = 0  # encoder runs between two tokens of a stream
        self._runs = 0
        self._since: dict[int, int] = {}  # by row: encoder runs before its last token
        self._items: dict[int, Any] = {}

    def _plan(self, planned: PlanRecord) -> Any:
        difference = super()._plan(planned)
        self._count(self.last_plan)
        return difference

    def _count(self, plan: StepPlan) -> None:
        if plan.media is not None:
            self._items |= plan.media.media
            if plan.media.encode:
                self._runs += 1
                sizes = [self._items[slot][index].length for slot, index in plan.media.encode]
                self.tokens.append(sum(sizes))
        for row, count in zip(plan.rows.tolist(), plan.counts.tolist(), strict=True):
            if count == 1 and row in self._since:
                self.most_between = max(self.most_between, self._runs - self._since[row])
            self._since[row] = self._runs


def burst(options: argparse.Namespace) -> dict[str, Any]:
    """Streams next to a burst of pictures."""
    with tempfile.TemporaryDirectory() as root:
        log = Path(root) / "steps"
        engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(options.model), max_model_len=MAX_LEN, log_level="warning",
                step_log=str(log), multiprocess=True,
            )
        )  # fmt: skip
        running = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        for index in range(STREAMS):
            engine.add_request(f"stream {index}", f"Stream {index} begins: ", running)
        last: dict[str, float] = {}
        alone: list[float] = []
        next_to: list[float] = []
        one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        waiting = BURST
        added, done, steps = False, 0, 0
        while done < BURST:
            for output in engine.step():
                now = time.perf_counter()
                name = output.request_id
                if name.startswith("picture"):
                    done += output.finished
                    continue
                if name in last:
                    (next_to if added else alone).append(now - last[name])
                last[name] = now
            steps += 1
            if not added and len(alone) >= 60 * STREAMS:
                added = True
                for index in range(waiting):
                    given = {
                        "prompt": f"{IMAGE} {index}",
                        "multi_modal_data": {"image": picture(100 + index)},
                    }
                    engine.add_request(f"picture {index}", given, one)
        engine.abort_request([f"stream {index}" for index in range(STREAMS)])
        engine.shutdown()
        counted = Counted(StepLog(log))
        replayed = counted.run(StepLog(log))
    kept = {
        "encoder_runs": len(counted.tokens),
        "most_runs_between_two_tokens": counted.most_between,
        "most_tokens_in_a_run": max(counted.tokens),
        "budget": counted.budget,
        "interval_alone_ms": 1e3 * statistics.median(alone),
        "interval_p99_ms": 1e3 * quantile(next_to, 0.99),
        "replay": str(replayed),
    }
    print_table("streams next to a burst", tuple(kept), [tuple(map(str, kept.values()))])
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--counts", type=int, nargs="+", default=(1, 8), choices=(1, 8))
    parser.add_argument("--vllm-python")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    parts = {"first": first, "again": again, "prepare": prepare, "burst": burst}
    found = {name: parts[name](options) for name in options.parts.split(",")}
    keep(options.json, model=options.model.name, **found)


if __name__ == "__main__":
    main()
