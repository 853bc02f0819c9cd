"""Fit a profile of what steps cost to step logs, for the simulator and for policies.

Serve what you like with --step-log first. The report is of a profile that was fitted to half of
the steps, on the other half; the one that is written knows all.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policylab.sim.calibrate import Judged, calibrate, samples_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs", type=Path, nargs="+", metavar="LOG", help="files made with --step-log"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the profile to write, as JSON"
    )
    parser.add_argument(
        "--name", metavar="TEXT", help="what was measured, for every output; default: FILE's name"
    )
    parser.add_argument(
        "--allow-truncated",
        action="store_true",
        help="of a log that breaks off, take what is whole",
    )


def run(parsed: argparse.Namespace) -> int:
    logs = [samples_of(log, allow_truncated=parsed.allow_truncated) for log in parsed.logs]
    name = parsed.name or parsed.out.stem
    profile = calibrate(logs, name, {"logs": [str(log) for log in parsed.logs]})
    profile.write(parsed.out)
    report: Mapping[str, Any] = profile.report
    for regime, judged in report.items():
        print(f"{regime + ' steps:':14} {Judged(**judged)}")
    host = profile.host
    print(
        f"between steps: {1e6 * host.step:.0f} us, {1e6 * host.sequence:.1f} a request in the step,"
        f" {1e6 * host.request:.0f} a request that comes"
    )
    print(f"{name}: {profile.source['steps']} steps, written to {parsed.out}")
    return 0
