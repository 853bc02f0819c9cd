"""Every panel of the dashboard and every alert has data when Prometheus scrapes a loaded server."""

from __future__ import annotations

import json
import math
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.deployed import (
    ALERTS,
    DEPLOY,
    Expression,
    alert_expressions,
    dashboard_expressions,
    program,
)
from support.patience import WAIT_SECONDS
from support.served import Served, free_port, served

pytestmark = pytest.mark.slow

NUM_CLIENTS = 12  # two run, four wait, others are refused
LOAD_SECONDS = 30.0
VARIABLES = {"$__rate_interval": "20s", "$job": "metronome", "$model": ".*", "$instance": ".*"}
OPTIONS = (
    "--num-threads", "1", "--max-model-len", "256", "--num-kv-blocks", "40", "--max-num-seqs", "2",
    "--max-waiting-requests", "4", "--dtype", "float32",
    "--request-log", "off",
    "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}',
    "--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces",  # fails, which is counted
)  # fmt: skip


class Prometheus:
    """A running Prometheus that scrapes one server each second."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **query: str) -> Any:
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=WAIT_SECONDS) as answer:
            return json.load(answer)["data"]

    def numbers(self, expression: str) -> list[float]:
        """The values of an expression now, without those that are not numbers."""
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)
        found = [float(each["value"][1]) for each in self.get("query", query=expression)["result"]]
        return [each for each in found if not math.isnan(each)]


@contextmanager
def prometheus(server: Served, folder: Path) -> Iterator[Prometheus]:
    (config,) = yaml.safe_load_all((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(ALERTS)]
    (scraped,) = config["scrape_configs"]
    del scraped["authorization"]
    scraped["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
    file, port = folder / "prometheus.yml", free_port()
    file.write_text(yaml.safe_dump(config))
    command = [
        program("prometheus"), f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip
    process = subprocess.Popen(command)
    try:
        yield Prometheus(port)
    finally:
        process.terminate()
        process.wait()


def send(server: Served, until: float, name: int) -> None:
    """Send requests one after another, each with a prompt of its own and a tail that repeats."""
    for index in range(10_000):
        if time.monotonic() > until:
            return
        prompt = f"{name}, {index}: " + "Once upon a time there was a fox. " * 3
        body = {"model": "box", "prompt": prompt, "max_tokens": 48, "ignore_eos": True}
        if server.ask("/v1/completions", body).status == 503:
            time.sleep(0.5)


def test_every_expression_has_data(tmp_path: Path) -> None:
    expressions: list[Expression] = [*dashboard_expressions(), *alert_expressions()]
    with served(*OPTIONS) as server, prometheus(server, tmp_path) as scraper:
        until = time.monotonic() + LOAD_SECONDS
        clients = [
            threading.Thread(target=send, args=(server, until, name)) for name in range(NUM_CLIENTS)
        ]
        for client in clients:
            client.start()
        time.sleep(LOAD_SECONDS - 5)
        found = {each: scraper.numbers(each.text) for each in expressions}
        rules = scraper.get("rules")["groups"][0]["rules"]
        for client in clients:
            client.join()
    # Refusals are the only errors of this server, and that alert does not count them.
    empty = [each.where for each, numbers in found.items() if not numbers]
    assert empty == ["MetronomeErrors"]
    assert {each["health"] for each in rules} == {"ok"}
