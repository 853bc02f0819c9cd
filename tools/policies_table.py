"""Writes `docs/policies.md`: each shipped policy, its source, its options.

    python tools/policies_table.py [--check]

All of it is read from the policies: the source from the first line of the module, what it does from
that of the class, options and defaults from the constructor. `--check` only says whether the file
is up to date.
"""

import argparse
import inspect
import sys
from pathlib import Path

from engine.sched.policies import POLICIES

TARGET = Path(__file__).resolve().parent.parent / "docs" / "policies.md"
HEAD = """# Policies that ship

Written by `python tools/policies_table.py` from their docstrings.

`LLM(scheduling_policy="edf", policy_options={"default_deadline": 5.0})`; one file each in
`engine/sched/policies/`, where the docstring says more. Times are seconds, lengths are tokens.
`metronome policies --policies fcfs,edf,...` puts them side by side on a virtual clock, and
[policy-guide.md](policy-guide.md) is how to write another.

| name | what it does | where it is from | options and defaults |
|---|---|---|---|
"""


def table() -> str:
    return HEAD + "".join(_row(name, policy) for name, policy in sorted(POLICIES.items()))


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
