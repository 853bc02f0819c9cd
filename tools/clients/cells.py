"""Shared by the client programs: their task, and the report of a result.

Each client is a module of functions, one a cell, that take the server's address. They run in the
client's own environment, which has neither the engine nor what it needs: only the standard library
is imported here.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from typing import Any

NAME = "served"
CITIES = ("Rome", "Paris")
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
}
ABOUT = "The weather in a city"
QUESTION = "The weather in Rome?"
MESSAGES = [{"role": "user", "content": QUESTION}]
PICTURE_CELL = "picture"
SCREEN = (
    "iVBORw0KGgoAAAANSUhEUgAAABgAAAAQCAAAAAApT+BJAAAAHUlEQVR42mPkYMAOWPhxSQjikhAYlSBWgvE7DgkA"
    "DlsCGqxOL98AAAAASUVORK5CYII="
)
"""A picture: a PNG file in base64."""
SCREEN_URL = f"data:image/png;base64,{SCREEN}"
TOO_LONG = "word " * 20_000
IDLE_SECONDS = 20.0  # from a cancelled request to the moment at which the server runs nothing

Cell = Callable[[str], None]


class ModelFault(Exception):
    """The exchange was right, but the small model did not write what the task requires."""


def run(cells: dict[str, Cell]) -> None:
    """Call each cell with the server's address (the first argument) and print a JSON line of it. If
    the model sees (the variable SEEING), only the cell of pictures; otherwise all others."""
    url, sees = sys.argv[1], "SEEING" in os.environ
    for name, cell in cells.items():
        if (name == PICTURE_CELL) != sees:
            continue
        result, why = "right", ""
        try:
            cell(url)
        except ModelFault as fault:
            result, why = "model", str(fault)
        except Exception as error:
            result, why = "WRONG", "".join(traceback.format_exception(error))[-3000:]
        print(json.dumps({"cell": name, "result": result, "why": why}), flush=True)


def check_city(city: Any) -> None:
    assert city in CITIES, city


def check_message(error: BaseException, *words: str) -> None:
    """An error that a user sees must hold these words."""
    text = str(error)
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} is missing in {type(error).__name__}: {text[:500]}"


def wait_until_idle(url: str) -> None:
    """Wait until the server has ended the request of a client that has left."""
    until = time.monotonic() + IDLE_SECONDS
    while True:
        with urllib.request.urlopen(f"{url}/load", timeout=10) as answer:
            load = json.loads(answer.read())
        if not load["running"] and not load["waiting"]:
            return
        assert time.monotonic() < until, f"the server still runs a cancelled request: {load}"
        time.sleep(0.05)
