"""Fit a cost profile to step logs: how long steps take, for the simulator and for policies.

Record the logs first with the engine's option --step-log. The printed errors are those of a profile
fitted to one half of the steps and tested on the other half; the file that is written is fitted to
all steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policylab.sim.calibrate import PredictionErrors, calibrate, samples_of

MAX_MEDIAN = 0.1  # of a step's time; on an idle machine the median error is about 0.06


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs", type=Path, nargs="+", metavar="LOG", help="step logs, recorded with --step-log"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="write the profile here (JSON)"
    )
    parser.add_argument(
        "--name", metavar="TEXT", help="name of the profile in all outputs; default: FILE's name"
    )
    parser.add_argument(
        "--allow-truncated",
        action="store_true",
        help="if a log is truncated, use its complete records",
    )


def run(parsed: argparse.Namespace) -> int:
    logs = [samples_of(log, allow_truncated=parsed.allow_truncated) for log in parsed.logs]
    name = parsed.name or parsed.out.stem
    profile = calibrate(logs, name, {"logs": [str(log) for log in parsed.logs]})
    profile.write(parsed.out)
    report: Mapping[str, Any] = profile.report
    print("errors of a profile fitted to half of the steps, in the other half:")
    for regime, judged in report.items():
        print(f"{regime + ' steps:':14} {PredictionErrors(**judged)}")
    host = profile.host
    print(
        f"between steps: {1e6 * host.step:.0f} us, {1e6 * host.sequence:.1f} per request,"
        f" {1e6 * host.request:.0f} per added request"
    )
    judged = report["all"]
    if judged["median"] > MAX_MEDIAN:
        print(
            f"warning: the median error is above {100 * MAX_MEDIAN:.0f} %; probably other programs "
            "kept the machine busy: record the log again on an idle one"
        )
    print(f"{name}: {profile.source['steps']} steps, written to {parsed.out}")
    return 0
