"""Writes `docs/policies.md`: each shipped policy, its source, its options.

    python tools/policies_table.py [--check]

All of it is read from the policies: the source from the first line of the module, what it does from
that of the class, options and defaults from the constructor. `--check` only says whether the file
is up to date.
"""

import argparse
import inspect
import json
import sys
from pathlib import Path
from typing import Any

from engine.sched.policies import POLICIES
from engine.sim.figures import MAX_RECOMPUTED, MIN_THROUGHPUT

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.policies_claims import CLAIMS

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "policies.md"
RESULTS = ROOT / "benchmarks" / "results" / "policies.json"
HEAD = """# Policies that ship

Written by `python tools/policies_table.py` from their docstrings.

`LLM(scheduling_policy="edf", policy_options={"default_deadline": 5.0})`; one file each in
`engine/sched/policies/`, where the docstring says more. Times are seconds, lengths are tokens.
`metronome policies --policies fcfs,edf,...` puts them side by side on a virtual clock, and
[policy-guide.md](policy-guide.md) is how to write another.

| name | what it does | where it is from | options and defaults |
|---|---|---|---|
"""


TITLES = {
    "TTFT mean": "ttft.mean",
    "TTFT p99": "ttft.p99",
    "ITL p99": "itl.p99",
    "E2E mean": "e2e.mean",
    "tokens/s": "tokens_per_second",
    "recomputed": "recomputed",
}
MEASURED = """
## Measured

Written by `python tools/policies_measure.py`: {seeds} seeds of {requests} requests at 0.9 of what
`fcfs` can serve, on the engine that `metronome compare` has by default, lengths learnt
(`--length-predictor history`). The first row of each table has figures (seconds, tokens a second,
a share), the others how much more theirs are, on the same requests; behind ± is half of an interval
that holds the true difference 19 times in 20, in brackets what may be chance, `=` the same to the
last digit."""
CLAIMED = """
### What their sources claim

On the same requests as `fcfs`; load and options are those that the claim is about.

| policy | claim | where | found | | what it lacks here |
|---|---|---|---|---|---|"""


def table() -> str:
    rows = "".join(_row(name, policy) for name, policy in sorted(POLICIES.items()))
    return HEAD + rows + (measured(json.loads(RESULTS.read_text())) if RESULTS.exists() else "")


def measured(found: dict[str, Any]) -> str:
    """What was measured: a table for each workload, and what each source claims."""
    lines = [MEASURED.format(seeds=found["seeds"], requests=found["requests"])]
    for workload, of in found["workloads"].items():
        rate = "" if of["rate"] is None else f", {of['rate']:.2f} requests a second"
        lines += [f"\n### `{workload}`{rate}\n\n| policy | {' | '.join(TITLES)} | |"]
        lines += ["|---" * (len(TITLES) + 2) + "|"]
        lines += [_figures(name, row, found) for name, row in of["rows"].items()]
    lines += [CLAIMED]
    lines += [_claim(name, row) for name, row in found["claims"].items()]
    return "\n".join(lines) + "\n"


def _figures(name: str, row: dict[str, Any], found: dict[str, Any]) -> str:
    cells = [_beside_fcfs(row, figure, name) for figure in TITLES.values()]
    said = f"overloaded with {row['overloaded']} of {found['seeds']} seeds" * bool(
        row["overloaded"]
    )
    return (
        f"| `{name}` | {' | '.join(cells)} | {'; '.join(filter(None, [said, _why(name, row)]))} |"
    )


def _beside_fcfs(row: dict[str, Any], figure: str, name: str) -> str:
    """A mean for fcfs, for others the difference from it in percent."""
    value, by, half, verdict = row[figure]
    if value is None:
        return "-"
    digits = 0 if value >= 1000 else 3
    if name == "fcfs" or verdict == "equal":
        return f"{value:.{digits}f}" if name == "fcfs" else "="
    base = value - (by or 0.0)
    if verdict == "no means" or not base:
        return f"{value:.{digits}f}"
    width = "" if half is None else f" ±{100 * half / abs(base):.1f}"
    shown = f"{100 * by / abs(base):+.1f}{width} %"
    return f"({shown})" if verdict == "undecided" else shown


def _why(name: str, row: dict[str, Any]) -> str:
    """Why a policy serves much less than fcfs, or computes much again."""
    value, by = row["tokens_per_second"][:2]
    share = 1.0 if by is None or not value else value / (value - by)
    again = row["recomputed"][0] or 0.0
    if share >= MIN_THROUGHPUT and again <= MAX_RECOMPUTED:
        return ""
    lacks = CLAIMS[name].lacks if name in CLAIMS else ""
    said = f"{share:.2f} of fcfs's tokens a second, {100 * again:.0f} % computed again"
    return f"{said}: {lacks or 'it refuses or holds back what it cannot serve in time'}"


def _claim(name: str, row: dict[str, Any]) -> str:
    claim = CLAIMS[name]
    where = f"`{claim.workload}`, load {claim.load:g}"
    options = {**claim.options, **claim.engine}
    where += "".join(f", `{key}={value!r}`" for key, value in options.items())
    shown = _beside_fcfs(row, claim.figure, name)
    lacks = "" if row["verdict"] == "holds" else claim.lacks
    cells = (
        f"`{name}`",
        f"{claim.direction} `{claim.figure}`",
        where,
        shown,
        row["verdict"],
        lacks,
    )
    return f"| {' | '.join(cells)} |"


def _row(name: str, policy: type) -> str:
    module = sys.modules[policy.__module__]
    source = _first_line(module).rstrip(".")
    options = ", ".join(
        f"`{each.name}={each.default!r}`"
        for each in inspect.signature(policy).parameters.values()
        if each.default is not each.empty
    )
    cells = (f"`{name}`", _first_line(policy), source, options or "none")
    return "| " + " | ".join(cell.replace("``", "`").replace("|", "\\|") for cell in cells) + " |\n"


def _first_line(of: object) -> str:
    return (inspect.getdoc(of) or "").split("\n", 1)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="say whether the file is up to date")
    if parser.parse_args().check:
        sys.exit(0 if TARGET.read_text() == table() else f"{TARGET.name} is out of date")
    TARGET.write_text(table())


if __name__ == "__main__":
    main()
