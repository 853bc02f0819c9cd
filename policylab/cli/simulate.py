"""Serve a workload on a virtual clock and print all figures, or print those of a stored run.

    metronome simulate --policy vtc --workload two-users --load 0.9 --out run.jsonl
    metronome simulate --read run.jsonl --slo "ttft<1,tpot<0.1"
    metronome simulate --workload steps.log --policy vtc
    metronome simulate --workload steps.log --durations recorded
    metronome simulate --policy vtc --workload log-uniform --rate 20 --real --out real.jsonl

A step log (written by an engine with --step-log) is a workload, too: the requests that were
served, on an engine of the same size, with step costs fitted to the log. It shows what another
policy would have done. With --durations recorded the log's own policy is replayed at the recorded
times and every plan is compared. --real serves the same requests in real time with a model; they
end at the drawn lengths.

The file of --out holds versions, seed, options, a row for each request and, with --steps, one for
each step. The same seed writes the same bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from math import inf, isnan
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.kv.prefix_ends import NEVER_SEEN
from policylab.cli import lab, seeing
from policylab.cli.policies import loads_of
from policylab.sim.estimate import Estimate
from policylab.sim.experiment import check_rate
from policylab.sim.figures import KINDS, MAX_RECOMPUTED, STATISTICS, Figures, figures, period_of
from policylab.sim.kv_groups import listed
from policylab.sim.promises import slo
from policylab.sim.real import run_real
from policylab.sim.recorded import Log, resimulate
from policylab.sim.run import PolicyVariant, Run, capacity_of, check, rate_at
from policylab.sim.run import run as simulate
from policylab.sim.steady import AT_ONCE, BACKLOG, STEADY

MOST_SHOWN = 20  # users


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="a name or dotted path, optionally with options; default: fcfs, or the log's policy",
    )
    lab.add_requests(parser)
    parser.add_argument(
        "--load",
        type=float,
        metavar="X",
        help=f"arrival rate as a share of the rate fcfs can serve; default: {lab.LOAD_BY_DEFAULT}",
    )
    parser.add_argument("--rate", metavar="R", help="requests per second; own: the workload's rate")
    parser.add_argument(
        "--durations",
        choices=("cost", "recorded"),
        default="cost",
        help="recorded: steps take as long as in the step log; default: as the step cost says",
    )
    group = parser.add_argument_group("in real time")
    group.add_argument("--real", action="store_true", help="serve the requests with a model")
    group.add_argument("--model", metavar="DIR", help="default: the small model in the package")
    group.add_argument("--num-threads", type=int, metavar="N", help="default: one per core")
    group.add_argument("--step-log", type=Path, metavar="FILE", help="write a step log here")
    parser.add_argument("--steps", action="store_true", help="keep a row for each step")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the run here (JSONL)")
    parser.add_argument(
        "--read", type=Path, metavar="FILE", help="print the figures of this file; simulate nothing"
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="count all requests, including warm-up and overloaded runs",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    seeing.add_arguments(parser, has_one_run=True)
    lab.add_engine(parser)


def run(parsed: argparse.Namespace) -> int:
    parsed.steps = (seeing.is_requested(parsed) and not parsed.real) or parsed.steps
    whole = _simulated(parsed) if parsed.read is None else Run.read(parsed.read)
    if parsed.out is not None:
        whole.write(parsed.out)
    others = [Run.read(path) for path in parsed.beside]
    if whole.not_own:
        return _without_figures(parsed, whole, others)
    period = period_of(whole).whole() if parsed.whole else None
    found = figures(whole, slo=slo(parsed.slo) if parsed.slo else [], period=period)
    shown = seeing.show_run(parsed, whole, others)
    status = 1 if any(each.not_own for each in others) else 0
    if parsed.json:
        print(lab.as_json(as_data(whole, found)))
        return status
    print(*described(whole, found), sep="\n")
    if parsed.out is not None:
        print(f"\nwritten to {parsed.out}")
    if shown:
        print("", *shown, sep="\n")
    return status


def _without_figures(parsed: argparse.Namespace, run: Run, others: Sequence[Run]) -> int:
    """Write why the run has no figures to every requested output. Returns exit status 1."""
    left_out = {run.policy: run.not_own}
    shown = seeing.show_run(parsed, run, others)
    if parsed.json:
        print(lab.as_json({"run": run.head, "left_out": lab.left_out_text(left_out)}))
        return 1
    print(*_of_which(run), *lab.left_out_lines(left_out), *shown, sep="\n")
    if parsed.out is not None:
        print(f"written to {parsed.out}")
    return 1


def _simulated(parsed: argparse.Namespace) -> Run:
    _check(parsed)
    workload = lab.workload_of(parsed)
    log = lab.log_of(workload)
    if parsed.durations == "recorded":
        return _recorded(parsed, log)
    engine = lab.engine_of(parsed, log)
    policy = _policy(parsed.policy, log)
    check([policy], workload, engine)
    rate = lab.rate_of(parsed.rate, workload)
    check_rate(rate)
    loads = loads_of(parsed.load, rate, workload) if parsed.rate is None else None
    load = loads[0] if loads else None
    if load is not None:
        rate = rate_at(load, workload, engine)
    if parsed.real:
        options = {"model": parsed.model, "num_threads": parsed.num_threads}
        given = {name: value for name, value in options.items() if value is not None}
        return run_real(
            policy,
            workload,
            engine,
            seed=parsed.seed,
            rate=rate,
            step_log=parsed.step_log,
            **given,
        )
    given = {"rate": rate} if load is None else {"load": load}
    made = simulate(policy, workload, engine, seed=parsed.seed, steps=parsed.steps, **given)
    is_own = parsed.rate in (None, "own") and load is None
    if is_own and workload.natural_rate is not None:
        made.head["capacity"] = capacity_of(workload, engine)
    return made


def _check(parsed: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for options that cannot be combined or paths that cannot be written."""
    if parsed.load is not None and parsed.rate is not None:
        raise ConfigError("--load and --rate both set the arrival rate; give only one of them")
    if parsed.out is not None and not parsed.out.parent.is_dir():
        raise ConfigError(f"--out {str(parsed.out)!r}: create its directory first")
    if parsed.out is not None and parsed.out.is_dir():
        raise ConfigError(f"--out {str(parsed.out)!r} is a directory, must be a file")
    if parsed.real:
        _check_real(parsed)
        return
    for name in ("model", "num_threads", "step_log"):
        if getattr(parsed, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} needs a run in real time; add --real")


def _check_real(parsed: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for options that cannot be combined with --real."""
    if parsed.steps:
        raise ConfigError("--steps needs a simulated run; with --real use --step-log")
    if parsed.data_parallel_size or parsed.prefill or parsed.decode:
        raise ConfigError(
            "--data-parallel-size, --prefill and --decode need a simulated run; leave --real out"
        )
    if parsed.rate is None and parsed.profile is None:
        raise ConfigError(
            "--real needs an arrival rate: give --rate, or --profile so that the rate of a "
            "--load can be computed"
        )
    if (parsed.kv_groups or parsed.kv_cache_memory_bytes) is not None:
        raise ConfigError(
            "--kv-groups and --kv-cache-memory-bytes need a simulated run; leave "
            "--real out: a real model has its own groups, and --num-kv-blocks sizes its pool"
        )


def _policy(text: str | None, log: Log | None) -> Any:
    """Returns the policy named by ``text``. Without ``text``: the policy that served the log, or
    fcfs if there is no log."""
    if text is not None:
        return lab.variant(text, "--policy")
    if log is None:
        return "fcfs"
    name, options = (log.header.scheduler[n] for n in ("scheduling_policy", "policy_options"))
    return PolicyVariant(name, options) if options else name


def _recorded(parsed: argparse.Namespace, log: Log | None) -> Run:
    """Replay a step log with its own policy at the recorded times, and compare every plan."""
    if log is None:
        raise ConfigError(
            f"--durations recorded needs a step log as --workload, got {parsed.workload!r}"
        )
    for name in (
        "policy",
        "load",
        "rate",
        "requests",
        "profile",
        "cost",
        "max_num_seqs",
        "kv_groups",
        "data_parallel_size",
        "prefill",
        "decode",
    ):
        if getattr(parsed, name) is not None:
            raise ConfigError(
                f"--durations recorded and --{name.replace('_', '-')} cannot be combined: recorded "
                "durations belong to the log's own plans; leave one of them out"
            )
    outcome, again = resimulate(log.path, log)
    print(outcome)
    return again


def as_data(run: Run, found: Figures) -> dict[str, Any]:
    """Returns all figures as plain data for JSON, with [low, high] intervals of latencies."""
    return {
        "run": run.head,
        "period": found.window._asdict(),
        "outcomes": found.outcomes,
        "figures": found.values(),
        "intervals": {name: [e.low, e.high] for name, e in found.latency.items()},
        "slowdown": [vars(each) for each in found.slowdown],
        "tiers": found.kept.by_tier,
        "users": [vars(user) for user in found.service.users] if found.service else [],
        "counters": found.counters,
        "kv_groups": found.kv_groups,
        "prefix_missed": found.prefix_missed,
        "bounds": vars(found.bounds) if found.bounds else None,
        "decisions": run.totals.get("decisions"),
    }


def described(run: Run, found: Figures) -> Iterable[str]:
    """The figures, line by line."""
    yield from _of_which(run)
    yield _period(found)
    if found.latency:
        yield ""
        yield from lab.aligned([("seconds", *STATISTICS), *_latencies(found)])
    yield ""
    yield from _lines(found)
    if found.slowdown:
        yield ""
        yield from lab.aligned(_sizes(found))
    if found.service is not None:
        yield ""
        yield from lab.aligned(_users(found))
    yield from _remarks(run, found)


def _of_which(run: Run) -> Iterable[str]:
    """Yields one line with the run's policy, workload, seed and arrival rate."""
    head = run.head
    rate, load = head.get("rate"), head.get("load")
    comes = "" if rate is None else f", {rate:.4g} per second" if rate < 1e300 else ", all at once"
    if load is not None and rate is not None:
        comes += f" (load {load:g}; fcfs can serve {rate / load:.4g})"
    elif capacity := head.get("capacity"):
        comes += f" (fcfs can serve {capacity:.4g})"
    yield f"{run.policy} on {head.get('workload')}, seed {head.get('seed')}{comes}"


def _period(found: Figures) -> str:
    period, done = found.window, found.outcomes.get("done", 0)
    summary = f"{found.num_requests} requests, {done} done"
    if period.state == AT_ONCE:
        return f"{summary}; all arrived at once, and all count"
    if period.is_whole:
        why = " because they are a backlog" if period.state == BACKLOG else ""
        return (
            f"{summary}; all count{why}, and the period ends with the last token, "
            f"{period.end:.1f} s"
        )
    if period.state != STEADY:
        return (
            f"{summary}; overloaded: {period.growing} grows to the end, so there are no means; "
            "--whole counts all requests"
        )
    short = " (about half: give more --requests; of a file, --whole counts all)"
    short = short if period.is_short else ""
    return (
        f"{summary}; {found.num_counted} count: the first {period.num_warmup} are warm-up{short}, "
        f"and the period ends with the last arrival, {period.end:.1f} s"
    )


def _latencies(found: Figures) -> Iterable[tuple[str, ...]]:
    """Yields table rows of the latencies, each value with its confidence interval in brackets."""
    for kind in KINDS:
        cells = [found.latency.get(f"{kind}.{name}") for name in STATISTICS]
        if any(cells):
            digits = 4 if kind in ("tpot", "itl", "normalised") else 3
            shown = [_bracketed(each, digits) if each else "-" for each in cells]
            yield (f"{kind} (times)" if kind == "slowdown" else kind, *shown)


def _bracketed(estimate: Estimate, digits: int) -> str:
    if isnan(estimate.value):
        return "-"
    low, high = ("?" if abs(end) == inf else f"{end:.{digits}f}" for end in estimate[1:])
    return f"{estimate.value:.{digits}f} [{low}, {high}]"


def _lines(found: Figures) -> Iterable[str]:
    yield (
        f"{found.requests_per_second:.2f} requests and {found.tokens_per_second:.0f} output tokens "
        f"per second; {found.num_steps} steps"
    )
    yield (
        f"preempted {found.num_preemptions} times, {100 * found.recomputed:.1f} % of tokens "
        f"recomputed; KV peak {100 * found.kv_peak:.0f} %; {found.prefix_hits} tokens from the "
        "prefix cache"
    )
    if not isnan(found.snapshot_peak):
        yield (
            f"{found.prompt_tokens} prompt tokens computed, {found.prompt_tokens_dense:.3f} x as "
            f"many as without states; snapshots took at most {100 * found.snapshot_peak:.1f} % of "
            "the KV pool"
        )
    yield from _of_cache(found)
    if not isnan(found.adapter_loads):
        yield (
            f"adapters: {found.adapter_loads:.3f} loads into slots and {found.adapter_reads:.3f} "
            "reads from a disk per request with an adapter"
        )
    kept = found.kept
    if kept.num_promised:
        yield (
            f"promises: {kept.num_kept} of {kept.num_promised} kept ({100 * kept.attainment:.1f} %)"
            f", goodput {kept.goodput:.2f} requests per second"
        )
        for tier, (promised, good) in kept.by_tier.items():
            yield f"  {tier}: {good} of {promised} ({100 * good / promised:.1f} %)"
    if found.bounds is not None:
        least = found.bounds
        yield (
            f"the whole run took {found.makespan:.1f} s, {found.makespan / least.makespan:.2f} x "
            f"the lower bound; mean E2E {found.mean_e2e:.3f} s, "
            f"{found.mean_e2e / least.mean_e2e:.2f} times its lower bound; at least {least.steps} "
            f"steps are needed ({least.by})"
        )
    if found.counters:
        yield "counters: " + ", ".join(f"{name} {n}" for name, n in sorted(found.counters.items()))


def _of_cache(found: Figures) -> Iterable[str]:
    """A line of KV groups if the model has windows, and one of missed prefixes if not all of them
    were new."""
    if any(group["window"] for group in found.kv_groups):
        yield f"KV blocks in use at most: {listed(found.kv_groups, 'peak_blocks')}"
    if found.prefix_missed.keys() - {NEVER_SEEN}:
        each = sorted(found.prefix_missed.items(), key=lambda item: (-item[1], item[0]))
        missed = ", ".join(f"{reason} {num:,}" for reason, num in each)
        yield f"prompt tokens not in the prefix cache: {missed}"


def _sizes(found: Figures) -> Iterable[tuple[str, ...]]:
    yield ("slowdown by size: prompt", "output", "requests", "mean", "p99")
    for each in found.slowdown:
        ends = (_range(*each.prompt), _range(*each.output), str(each.num_requests))
        yield (*ends, f"{each.mean:.2f}", f"{each.p99:.2f}")


def _range(first: int, end: int | None) -> str:
    return f"{first} or more" if end is None else f"{first} to {end - 1}"


def _users(found: Figures) -> Iterable[tuple[str, ...]]:
    assert found.service is not None
    yield ("user", "requests", "prompt tokens", "output tokens", "TTFT mean", "E2E mean")
    for user in found.service.users[:MOST_SHOWN]:
        counts = (user.num_requests, user.prompt_tokens, user.output_tokens)
        times = (lab.number(user.ttft), lab.number(user.e2e))
        yield (user.name, *map(str, counts), *times)


def _remarks(run: Run, found: Figures) -> Iterable[str]:
    rate, capacity = run.head.get("rate") or 0.0, run.head.get("capacity") or inf
    if rate > capacity and found.window.state == STEADY:
        yield (
            f"requests come {rate / capacity:.2f} times as fast as fcfs can serve them: the queue "
            "grows, so latencies depend on the length of the run; a lower --rate or --load has "
            "means, --whole counts all requests"
        )
    if found.service is not None:
        even = lab.number(found.service.jain)
        gap, bound = found.service.gap, found.service.bound
        apart = "no two waited together" if isnan(gap) else f"largest gap {gap:.0f}"
        yield (
            f"service while users waited: Jain's index {even}; {apart} (VTC promises {bound:.0f} "
            "or less; prompt tokens count 1, output tokens 2)"
        )
    if found.recomputed > MAX_RECOMPUTED:
        yield f"{run.policy} recomputes {100 * found.recomputed:.0f} % of its tokens"
    if found.num_refused:
        shown = ", ".join(f"{name} {n}" for name, n in found.outcomes.items() if name != "done")
        yield f"requests that did not finish normally: {shown}"
    if run.hook_seconds:
        mean = 1e6 * run.hook_seconds / max(1, found.num_steps)
        yield f"real time in hooks: {mean:.0f} us per step (differs from run to run)"
