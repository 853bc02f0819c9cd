"""Command-line options and tables that the simulating commands share."""

from __future__ import annotations

import argparse
import csv
import io
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite, isnan
from pathlib import Path
from typing import Any

import msgspec

from engine.config.kv_groups import FULL, Group
from engine.errors import ConfigError
from engine.sched.predict.profile import AdapterCost, Profile, read_profile
from policylab.sim.calibrate import fit, samples_of
from policylab.sim.compare import Cell
from policylab.sim.datasheet import from_datasheet
from policylab.sim.estimate import Estimate
from policylab.sim.kv_groups import EXAMPLE as EXAMPLE_OF_GROUPS
from policylab.sim.kv_groups import groups_with, layout_of, listed, parse_groups, size_of
from policylab.sim.named import call, split
from policylab.sim.recorded import Log, read_log
from policylab.sim.recorded import engine_of as recorded_engine
from policylab.sim.run import Engine, PolicyVariant, Run, capacity_of
from policylab.sim.tiers import read_link, read_tiers
from policylab.sim.worker import StepCost
from policylab.sim.workloads import WORKLOADS, Workload, find_workload
from policylab.sim.workloads.reader import FileWorkload
from policylab.sim.workloads.steps_log import StepsLog

NUM_REQUESTS = 2000  # with fewer, half of them would only fill the empty engine
LOAD = 0.9
LOAD_BY_DEFAULT = f"{LOAD}; for files and closed loops their own arrivals"
PROGRESS_SECONDS = 10.0
EXAMPLE = "edf(default_deadline=5)"


def add_requests(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the requests to simulate."""
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--workload",
        default="log-uniform",
        metavar="W",
        help="its name, optionally with options, as in 'azure-conv(num_requests=5000)', or a file "
        "(step log, trace, what `metronome workload --out` wrote); "
        "`metronome workload --list` lists them; default: %(default)s",
    )
    group.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help=f"default: {NUM_REQUESTS}, or as W sets it",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    for flag in ("--prompt-tokens", "--output-tokens"):
        group.add_argument(
            flag, type=int, nargs=2, metavar=("MIN", "MAX"), help="the shortest and the longest"
        )
    group.add_argument(
        "--shared-prefix", type=int, metavar="N", help="tokens that half of the prompts share"
    )
    group.add_argument("--users", type=int, metavar="N", help="number of users")
    group.add_argument(
        "--adapters", type=int, metavar="N", help="number of LoRA adapters, used by Zipf's law"
    )
    group.add_argument(
        "--slo",
        metavar="LIMITS",
        help="latency limits promised to every request, in seconds, as in 'ttft<1,tpot<0.1'; "
        "default: the promises that the workload sets for each request",
    )


def add_rate_and_seeds(
    parser: argparse.ArgumentParser, *, in_place_of: str, num_seeds: int
) -> None:
    """Add --rate, --seeds and --jobs. in_place_of: name of the load option that --rate replaces;
    num_seeds: default of --seeds."""
    rate = f"requests per second, in place of {in_place_of}; own: the workload's rate"
    parser.add_argument("--rate", metavar="R", help=rate)
    seeds = "number of seeds; default: %(default)s"
    parser.add_argument("--seeds", type=int, default=num_seeds, metavar="N", help=seeds)
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="processes; default: 1")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the options that size the simulated engine."""
    group = parser.add_argument_group("engine")
    for flag, default in (
        ("--max-num-seqs", Engine.max_num_seqs),
        ("--max-num-batched-tokens", Engine.max_num_batched_tokens),
        ("--num-kv-blocks", Engine.num_blocks),
        ("--block-size", Engine.block_size),
        ("--depth", Engine.depth),
    ):
        shown = f"default: {default}, or the value in the step log"
        group.add_argument(flag, type=int, metavar="N", help=shown)
    group.add_argument(
        "--kv-groups",
        metavar="G",
        help="sliding windows of the model's groups of layers in tokens (0: full attention, below "
        f"0: chunks), as in {EXAMPLE_OF_GROUPS}; or a model's config.json, or the file of a run; "
        "default: 0, or the groups in the step log",
    )
    group.add_argument(
        "--snapshot-blocks",
        type=int,
        metavar="N",
        help="KV blocks of a snapshot of the model's recurrent states (LFM2 has 1, Qwen3-Next 191, "
        "Mamba-2 512); default: 0, a model without states, or the number in the step log",
    )
    group.add_argument(
        "--snapshot-policy",
        metavar="P",
        help="which snapshots are taken and stay: cost, interval, marconi or a dotted path, "
        "optionally with options, as in 'marconi(alpha=0.5)'; default: cost, or the one in the "
        "step log",
    )
    group.add_argument(
        "--kv-tiers",
        metavar="T",
        help="stores of KV blocks outside the pool, the fastest first: their blocks, seconds to "
        "load one, seconds of latency, and seconds that a step takes longer for each block to "
        "store, as in 'host(blocks=20000, load=2e-5, latency=1e-4, store=0)'; default: none",
    )
    _add_adapters(group)
    _add_cores(group)
    group.add_argument(
        "--kv-cache-memory-bytes",
        type=int,
        metavar="N",
        help="size of the KV pool, in place of --num-kv-blocks; needs a config.json as --kv-groups",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="default: the workload's longest request",
    )
    group.add_argument(
        "--length-predictor",
        metavar="NAME",
        help="none, history, oracle or a dotted path; default: none, or the one in the step log",
    )
    group.add_argument(
        "--profile",
        metavar="F",
        help="how long steps take: a file of `metronome calibrate`, or an estimate from a data "
        "sheet, as in llama-8b@h100 or llama-70b@8xh100",
    )
    group.add_argument(
        "--cost",
        type=Path,
        metavar="F",
        help="how long steps take: a JSON file with fixed, per_seq, per_token, per_context and "
        "per_attention, in seconds",
    )


def _add_adapters(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-loras",
        type=int,
        metavar="N",
        help=f"LoRA adapters among the running requests; default: {Engine.max_loras}",
    )
    group.add_argument(
        "--max-cpu-loras",
        type=int,
        metavar="N",
        help="adapters in the host's memory; default: all that were used",
    )
    loads = AdapterCost()
    group.add_argument(
        "--adapter-seconds",
        type=float,
        nargs=2,
        metavar=("COPY", "READ"),
        help="time to copy an adapter from the host's memory into a slot, and to read it from a "
        f"disk; default: {loads.copy:g} {loads.read:g}, or as the profile says",
    )


def _add_cores(group: argparse._ArgumentGroup) -> None:
    for flag, what in (
        ("--data-parallel-size", "equal cores that share the requests"),
        ("--prefill", "cores that compute only long prompts, for --decode cores"),
        ("--decode", "cores that compute short prompts and all outputs"),
    ):
        group.add_argument(flag, type=int, metavar="N", help=f"{what}; default: one core in all")
    group.add_argument(
        "--prefill-threshold",
        type=int,
        metavar="N",
        help="prompts go to prefill cores if a decode core lacks at least this many tokens; "
        f"default: {Engine.prefill_threshold}",
    )
    group.add_argument(
        "--kv-link",
        metavar="L",
        help="how decode cores get blocks of prefill cores, one transfer after another: blocks "
        "that prefill cores keep, seconds to move one, seconds of latency, and seconds that a step "
        "takes longer for each block to store; default: "
        "'link(blocks=20000, load=2e-5, latency=1e-4, store=0)'",
    )


def workload_of(parsed: argparse.Namespace) -> Workload:
    """Returns the workload of the command line: a named one, or a file given by its path."""
    given = {
        "prompt_tokens": parsed.prompt_tokens and tuple(parsed.prompt_tokens),
        "output_tokens": parsed.output_tokens and tuple(parsed.output_tokens),
        "shared_prefix": parsed.shared_prefix,
        "num_users": parsed.users,
        "num_adapters": parsed.adapters,
        "num_requests": parsed.requests,
    }
    given = {name: value for name, value in given.items() if value is not None}
    text = parsed.workload
    kind = WORKLOADS.get(call(text, "--workload", EXAMPLE)[0])
    if kind is not None and not issubclass(kind, FileWorkload):
        given.setdefault("num_requests", NUM_REQUESTS)
    return find_workload(text, **given)


def rate_of(text: str | None, workload: Workload) -> float | None:
    """Returns the requests per second that --rate gives; ``None`` without it, or if the workload
    has none. Raises ``ConfigError``."""
    if text is None or text == "own":
        return None if text is None else workload.natural_rate
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"--rate is {text!r}, must be a number above 0 or 'own'") from error


def one_of(parsed: argparse.Namespace, first: str, second: str, what: str) -> None:
    """Raise ``ConfigError`` if the options ``first`` and ``second`` are both given. ``what``: what
    both of them set, for the error."""
    if all(getattr(parsed, name) not in (None, False) for name in (first, second)):
        raise ConfigError(f"--{first} and --{second} both set {what}; give only one of them")


def log_of(workload: Workload) -> Log | None:
    """Returns the step log that this workload repeats; ``None`` for workloads of other kinds."""
    if not isinstance(workload, StepsLog):
        return None
    return read_log(workload.path, allow_truncated=workload.allow_truncated)


def engine_of(parsed: argparse.Namespace, log: Log | None = None) -> Engine:
    """Returns the simulated engine of the command line. With a step log, options that are not given
    default to the log's engine and to step times fitted to the log."""
    given = {
        "max_num_seqs": parsed.max_num_seqs,
        "max_num_batched_tokens": parsed.max_num_batched_tokens,
        "num_blocks": parsed.num_kv_blocks,
        "block_size": parsed.block_size,
        "depth": parsed.depth,
        "length_predictor": parsed.length_predictor,
        "snapshot_blocks": parsed.snapshot_blocks,
        "snapshot_policy": parsed.snapshot_policy,
        "kv_tiers": None if parsed.kv_tiers is None else read_tiers(parsed.kv_tiers),
        "data_parallel_size": parsed.data_parallel_size,
        "prefill_cores": parsed.prefill,
        "decode_cores": parsed.decode,
        "prefill_threshold": parsed.prefill_threshold,
        "kv_link": None if parsed.kv_link is None else read_link(parsed.kv_link),
        "cost": _cost(parsed.profile, parsed.cost),
        "max_loras": parsed.max_loras,
        "max_cpu_loras": parsed.max_cpu_loras,
        "adapter_cost": _adapter_cost(parsed.adapter_seconds),
    }
    base = Engine() if log is None else recorded_engine(log.header)
    if log is not None and given["cost"] is None:
        given["cost"] = fit(samples_of(log.path), f"fitted to {log.path}")
    scheduler = dict(base.scheduler)
    if parsed.max_model_len is not None:
        scheduler["max_model_len"] = parsed.max_model_len
    given = {name: value for name, value in given.items() if value is not None}
    return _with_groups(replace(base, **given, scheduler=scheduler), parsed)


def _with_groups(engine: Engine, parsed: argparse.Namespace) -> Engine:
    """The engine with the KV groups, and the size of the KV pool, that the options give."""
    text, num_bytes = parsed.kv_groups, parsed.kv_cache_memory_bytes
    if num_bytes is not None and parsed.num_kv_blocks is not None:
        raise ConfigError(
            "--kv-cache-memory-bytes and --num-kv-blocks both set the size of the KV pool; give "
            "only one of them"
        )
    path = None if text is None else Path(text)
    if path is None or not path.exists() or _is_run(path):
        if num_bytes is not None:
            raise ConfigError(
                f"--kv-cache-memory-bytes is {num_bytes}, which needs the size of a block: give "
                "a model's config.json as --kv-groups, or --num-kv-blocks"
            )
        if path is None or text is None:
            return engine
        groups = parse_groups(text) if not path.exists() else groups_of_run(Run.read(path))
        return replace(engine, kv_groups=groups)
    layout = layout_of(
        path,
        block_size=engine.block_size,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=parsed.max_model_len,
    )
    if num_bytes is None:
        return replace(engine, kv_groups=layout.groups)
    num_blocks = num_bytes // layout.block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"--kv-cache-memory-bytes is {num_bytes}, must be at least {2 * layout.block_bytes}: a "
            f"block takes {layout.block_bytes} bytes"
        )
    return replace(engine, kv_groups=layout.groups, num_blocks=num_blocks)


def _is_run(path: Path) -> bool:
    return path.is_file() and path.suffix != ".json"


def groups_of_run(run: Run) -> tuple[Group, ...]:
    """The KV groups of the engine of a run, as its file has them."""
    return groups_with((run.head.get("engine") or {}).get("kv_groups") or [0])


def _cost(profile: str | None, cost: Path | None) -> StepCost | Profile | None:
    if profile is not None and cost is not None:
        raise ConfigError("--profile and --cost both set the step cost; give only one of them")
    if profile is not None:
        by_name = "@" in profile and not Path(profile).exists()
        return from_datasheet(profile) if by_name else read_profile(profile)
    return None if cost is None else read_cost(cost)


def _adapter_cost(seconds: Sequence[float] | None) -> AdapterCost | None:
    if seconds is None:
        return None
    if not all(0.0 <= each < inf for each in seconds):
        raise ConfigError(f"--adapter-seconds is {seconds}, must be two times of 0 s or more")
    return AdapterCost(*seconds)


def read_cost(path: Path) -> StepCost:
    """Read the step costs in a JSON file. Raises ``ConfigError`` if that is impossible."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, float])
        cost = StepCost(**found)
    except OSError as error:
        raise ConfigError(f"--cost {str(path)!r} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, TypeError) as error:
        raise ConfigError(
            f"--cost {str(path)!r} is not a valid cost: {error}; it must be a JSON object with "
            "fixed, per_seq, per_token, per_context and per_attention, in seconds"
        ) from error
    if min(found.values(), default=0.0) < 0.0 or not all(map(isfinite, found.values())):
        raise ConfigError(f"--cost {str(path)!r} has {found}; costs must be finite and 0 or more")
    return cost


def variants(text: str, flag: str = "--policies") -> list[str | PolicyVariant]:
    """Parse a comma-separated list of policies. ``flag``: name of the option, for errors."""
    return [variant(part, flag) for part in split(text)]


def variant(text: str, flag: str = "--policies") -> str | PolicyVariant:
    """Parse a policy given as ``name`` or ``name(option=value, ...)``; values are Python literals.
    ``flag``: name of the option, for errors."""
    name, options = call(text, flag, EXAMPLE)
    return PolicyVariant(name, options) if options else name


def engine_line(engine: Engine, workload: Workload | None = None) -> str:
    """Returns a line with the sizes of the engine, to print above a table. ``workload``: what it
    serves; its adapters are part of the line."""
    ahead = "" if engine.depth == 1 else f"{engine.depth} steps in flight; "
    windows = [{"window": size_of(group)} for group in engine.kv_groups]
    groups = "" if engine.kv_groups == (FULL,) else f"KV groups: {listed(windows)}; "
    if engine.snapshot_blocks:
        groups += f"{engine.snapshot_blocks} blocks a snapshot, policy {engine.snapshot_policy}; "
    if engine.kv_tiers:
        groups += f"KV tiers: {', '.join(map(str, engine.kv_tiers))}; "
    if engine.data_parallel_size > 1:
        groups += f"{engine.data_parallel_size} such cores; "
    if engine.prefill_cores:
        groups += (
            f"{engine.prefill_cores} prefill and {engine.decode_cores} such decode cores, "
            f"{engine.kv_link}; "
        )
    if workload is not None and workload.num_adapters:
        groups += (
            f"{engine.max_loras} adapter slots, {1e3 * engine.loads.copy:g} ms a copy into one, "
            f"{1e3 * engine.loads.read:g} ms a read; "
        )
    return (
        f"{engine.max_num_seqs} seats, {engine.max_num_batched_tokens} tokens a step, "
        f"{engine.num_blocks} KV blocks of {engine.block_size}; {groups}{ahead}length predictor: "
        f"{engine.length_predictor}"
    )


def own_arrivals(workload: Workload, engine: Engine) -> str:
    """Returns the rate of a workload with arrivals of its own, and the rate that fcfs can serve;
    "" for a closed loop, which has no rate."""
    rate = workload.natural_rate
    if rate is None:
        return ""
    return f"{rate:.2f} requests per second; fcfs can serve {capacity_of(workload, engine):.2f}"


def cost_line(engine: Engine) -> str:
    return f"a step takes {engine.cost}"


class Progress:
    """Prints to stderr how much is done, at most once in ten seconds; stdout is for results."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = self._last = clock()

    def __call__(self, num_done: int, num_all: int) -> None:
        now = self._clock()
        if num_done < num_all and now - self._last >= PROGRESS_SECONDS:
            self._last = now
            seconds = (now - self._start) * (num_all - num_done) / num_done
            print(
                f"{num_done} of {num_all} settings and seeds; about {seconds:.0f} s left",
                file=sys.stderr,
                flush=True,
            )


def left_out_lines(left_out: Mapping[str, str]) -> Iterable[str]:
    """Returns a line for each policy without figures. ``left_out``: the reason for each name."""
    return [f"{name} is left out, since it has no figures: {why}" for name, why in left_out.items()]


def left_out_text(left_out: Mapping[str, str]) -> str:
    """Returns the policies without figures and the reasons as text for one cell of a table."""
    return "; ".join(f"{name}: {why}" for name, why in left_out.items())


def aligned(lines: Iterable[Sequence[str]]) -> Iterable[str]:
    """Format rows as lines with aligned columns: the first to the left, the others to the right."""
    rows = list(lines)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *cells])


def number(value: float, digits: int = 3) -> str:
    """Format a number for a table; NaN is a dash."""
    return "-" if isnan(value) else f"{value:.{digits}f}"


def mean(cell: Cell, place: int, figure: str, digits: int = 3) -> str:
    """Format a figure's mean over the seeds ± half the width of its confidence interval, for the
    policy at index ``place``; "N of M" if only N of M seeds have the figure, "-" if none has."""
    count, seeds = cell.num_with(place, figure), len(cell.figures[place])
    if 0 < count < seeds:
        return f"{count} of {seeds}"
    return interval(cell.over_seeds(place, figure), digits)


def interval(estimate: Estimate, digits: int = 3) -> str:
    """Format a value with ± half the width of its confidence interval."""
    half = (estimate.high - estimate.low) / 2
    shown = number(estimate.value, digits)
    return f"{shown} ±{half:.{digits}f}" if isfinite(half) else shown


def as_json(value: Any) -> str:
    """Format a value as indented JSON; NaN and infinity become null."""
    return msgspec.json.format(msgspec.json.encode(_plain(value), enc_hook=str), indent=1).decode()


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows with equal keys as CSV with a header; NaN becomes an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: "" if isinstance(v, float) and isnan(v) else v for k, v in row.items()})
    return text.getvalue().rstrip("\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
