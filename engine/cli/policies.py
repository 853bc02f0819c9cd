"""Compare scheduling policies on drawn requests, on a virtual clock: no model, no GPU, seconds.

The same seed gives the same table. Policies are named as for the engine: a shipped or an installed
one, or the dotted path of a class of yours in the current directory; with options as in
``--policies "fcfs,edf(default_deadline=5),edf(default_deadline=50)"``.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable, Sequence

from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError
from engine.sched.plugins.find import installed_policies
from engine.sched.policies import POLICIES
from engine.sim.compare import Comparison, Engine, Figures, Variant, compare, mean, percentile
from engine.sim.workload import Workload, dispersion, draw

COLUMNS = (
    *("policy", "TTFT mean", "TTFT p99", "E2E mean", "E2E p99"),
    *("tokens/s", "preempted", "recomputed", "KV peak"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policies",
        default="fcfs,residual-sjf",
        metavar="NAMES",
        help="names or dotted paths, with options if you like, as in "
        "'fcfs,edf(default_deadline=5)'; default: %(default)s",
    )
    parser.add_argument(
        "--list", action="store_true", help="the policies shipped and installed, a line each"
    )
    group = parser.add_argument_group("requests")
    group.add_argument("--requests", type=int, default=300, metavar="N", help="default: 300")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    group.add_argument(
        "--load",
        type=float,
        default=0.9,
        metavar="X",
        help="arrivals as a share of what fcfs can serve; default: 0.9",
    )
    _add_range(group, "--prompt-tokens", Workload.prompt_tokens)
    _add_range(group, "--output-tokens", Workload.output_tokens)
    group.add_argument(
        "--shared-prefix", type=int, default=0, metavar="N", help="tokens half of the prompts share"
    )
    group.add_argument("--users", type=int, default=4, metavar="N", help="default: 4")
    group = parser.add_argument_group("engine")
    _add_number(group, "--max-num-seqs", Engine.max_num_seqs)
    _add_number(group, "--max-num-batched-tokens", Engine.max_num_batched_tokens)
    _add_number(group, "--num-kv-blocks", Engine.num_blocks)
    _add_number(group, "--block-size", Engine.block_size)
    group.add_argument(
        "--length-predictor",
        default="none",
        metavar="NAME",
        help="none, history, oracle, or the dotted path of yours; default: none",
    )


def _add_number(group: argparse._ArgumentGroup, flag: str, default: int) -> None:
    group.add_argument(flag, type=int, default=default, metavar="N", help=f"default: {default}")


def _add_range(group: argparse._ArgumentGroup, flag: str, default: tuple[int, int]) -> None:
    shown = f"shortest and longest; default: {default[0]} {default[1]}"
    group.add_argument(flag, type=int, nargs=2, default=default, metavar=("MIN", "MAX"), help=shown)


def run(parsed: argparse.Namespace) -> int:
    if parsed.list:
        print(*listed(), sep="\n")
        return 0
    workload = Workload(
        num_requests=parsed.requests,
        seed=parsed.seed,
        prompt_tokens=tuple(parsed.prompt_tokens),
        output_tokens=tuple(parsed.output_tokens),
        shared_prefix=parsed.shared_prefix,
        num_users=parsed.users,
    )
    engine = Engine(
        max_num_seqs=parsed.max_num_seqs,
        max_num_batched_tokens=parsed.max_num_batched_tokens,
        num_blocks=parsed.num_kv_blocks,
        block_size=parsed.block_size,
        length_predictor=parsed.length_predictor,
    )
    policies = [variant(text) for text in split(parsed.policies)]
    comparison = compare(policies, workload, engine, parsed.load)
    print(*conditions(comparison, workload, engine), "", sep="\n")
    print(*table(comparison.figures), "", sep="\n")
    print(*remarks(comparison.figures), sep="\n")
    return 0


def split(policies: str) -> list[str]:
    """What commas divide, those within parentheses aside."""
    parts = re.findall(r"(?:[^,(]|\([^)]*\)?)+", policies)
    return [part.strip() for part in parts if part.strip()]


def variant(text: str) -> str | Variant:
    """``name``, or ``name(option=value, ...)`` with values as Python writes them."""
    name, is_call, options = text.partition("(")
    if not is_call:
        return text
    try:
        call = ast.parse(f"_({options}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("not one call with options by name")
        found = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"--policies has {text!r}, must be a name, or one with options as in "
            "edf(default_deadline=5)"
        ) from error
    return Variant(name.strip(), found)


def listed() -> Iterable[str]:
    """Name and summary of each policy, those of other packages last."""
    installed = installed_policies()
    width = max(map(len, [*POLICIES, *installed]))
    for name, policy in sorted(POLICIES.items()):
        yield f"{name:{width}}  {_summary(policy)}"
    for name, found in sorted(installed.items()):
        said = f"{_summary(found)} ({found.__module__})" if isinstance(found, type) else found
        yield f"{name:{width}}  {said}"


def _summary(policy: type) -> str:
    """The first line of its docstring."""
    return next(iter((policy.__doc__ or "").strip().splitlines()), "no docstring")


def conditions(comparison: Comparison, workload: Workload, engine: Engine) -> Iterable[str]:
    """What must be known to judge the figures, and to get them again."""
    prompts, outputs = workload.prompt_tokens, workload.output_tokens
    yield (
        f"{workload.num_requests} requests, seed {workload.seed}: {comparison.rate:.2f} come a "
        f"second; fcfs can serve {comparison.capacity:.2f}"
    )
    yield (
        f"prompts {prompts[0]} to {prompts[1]} tokens, outputs {outputs[0]} to {outputs[1]}, "
        f"dispersion of sizes {dispersion(draw(workload)):.2f}, shared prefix "
        f"{workload.shared_prefix}"
    )
    yield (
        f"{engine.max_num_seqs} seats, {engine.max_num_batched_tokens} tokens a step, "
        f"{engine.num_blocks} KV blocks of {engine.block_size}; length predictor: "
        f"{engine.length_predictor}"
    )
    yield f"a step takes {engine.cost}"


def table(figures: Sequence[Figures]) -> Iterable[str]:
    """The figures in aligned columns; times in seconds."""
    rows = [COLUMNS, *map(_row, figures)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *others = (
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join([first, *others])


def _row(figures: Figures) -> tuple[str, ...]:
    return (
        figures.policy,
        *(f"{of(values):.3f}" for values in (figures.ttft, figures.e2e) for of in (mean, _p99)),
        f"{figures.tokens_per_second:.0f}",
        f"{figures.num_preemptions}",
        f"{100.0 * figures.recompute_share:.1f} %",
        f"{100.0 * figures.kv_peak:.0f} %",
    )


def _p99(values: Sequence[float]) -> float:
    return percentile(values, 0.99)


def remarks(figures: Sequence[Figures]) -> Iterable[str]:
    """What is real, not simulated, and what went wrong."""
    hooks = (f"{f.policy} {1e6 * f.hook_seconds / f.num_steps:.0f}" for f in figures)
    yield f"real time in hooks, us a step (differs from run to run): {', '.join(hooks)}"
    for f in figures:
        if f.num_refused:
            yield f"{f.policy}: {f.num_refused} requests were refused or failed"
        if f.num_faults:
            is_out = f.num_faults > SchedulerConfig.max_policy_faults
            rest = "; it was left out, and the rest ran in order of arrival" if is_out else ""
            yield f"{f.policy}: {f.num_faults} wrong answers were answered by default instead{rest}"
        if f.num_rescued:
            yield f"{f.policy}: {f.num_rescued} steps were planned by default, as it let none run"
