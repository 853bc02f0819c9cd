"""Prefill apart, simulated with measured step times, has the ratios that were measured."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_simulated_ratios_are_near_the_measured_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    lab = importlib.import_module("prefill_apart_simulated")
    measured = json.loads((BENCHMARKS / "results" / "prefill_apart_mid.json").read_text())
    workload = lab.LongAmongShort(every=measured["about"]["every"])
    engines = lab.engines(BENCHMARKS / "results")
    kinds = ("one core", "prefill apart")
    figures = {kind: lab.simulated(engines[kind], workload, seed=1) for kind in kinds}
    found, theirs = lab.ratios(figures)["prefill apart"], measured["ratios"]["prefill apart"]
    near = {"gap_p99_ms": 0.25, "tokens_per_s": 0.1, "long_ttft_s": 0.25}
    far = {name: found[name] / theirs[name] for name in near}
    assert all(abs(far[name] - 1.0) <= most for name, most in near.items()), far
    absolute = figures["one core"]["gap_p99_ms"] / measured["medians"]["one core"]["gap_p99_ms"]
    assert 0.9 < absolute < 1.1
