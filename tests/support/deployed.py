"""What the files of `deploy/` contain, as tests read it."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from support.source_tree import ROOT

DEPLOY = ROOT / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "metronome.json"
COMPARISON = re.compile(r"\s*(==|!=|<=|>=|<|>)\s*[\d.]+$")


class Expression(NamedTuple):
    where: str
    text: str


def dashboard_expressions() -> Iterator[Expression]:
    """The expressions of all panels."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield Expression(panel["title"], target["expr"])


def alert_expressions() -> Iterator[Expression]:
    """What alerts compare with their limits."""
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            text, num = COMPARISON.subn("", rule["expr"])
            assert num == 1, f"{rule['alert']} compares nothing with a number"
            yield Expression(rule["alert"], text)


def documents(path: Path) -> list[Any]:
    """All documents of a YAML file."""
    return list(yaml.safe_load_all(path.read_text()))


def program(name: str) -> str:
    """The path of a program, of the system or of this environment. Skips the test without it."""
    own = Path(sys.executable).parent / name
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found
