"""Runs coding agents over `metronome serve`: `codex` and `claude`, each with one task.

    python tools/server_agents.py --environments DIR [--only codex|claude]

The programs come from npm (`@openai/codex`, `@anthropic-ai/claude-code`) into DIR. The model's
answers are written beforehand: two calls of the agent's shell, then a text. A program is right when
both commands ran in order and its output ends with the text. The exit status is the number of
programs that are wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools" / "clients")]

import scripted  # noqa: E402
from server_clients import NAME, run_quietly  # noqa: E402
from support.served import served  # noqa: E402

from engine.assets import BOX_MODEL  # noqa: E402

TASK = "Write two files"
LAST = "Both files are written."
COMMANDS = ("printf one > first.txt", "cat first.txt > second.txt && printf two >> second.txt")
SECONDS = 300
PACKAGES = {"codex": "@openai/codex", "claude": "@anthropic-ai/claude-code"}
TOOLS = {"codex": ("exec_command", "cmd"), "claude": ("Bash", "command")}
CODEX_CONFIG = """\
model = "{name}"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


def answers(program: str) -> list[str]:
    """What the model writes in each turn."""
    tool, argument = TOOLS[program]
    calls = [{"name": tool, "arguments": {argument: command}} for command in COMMANDS]
    written = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
    return [f"I write the first.\n{written[0]}", written[1], LAST]


def command_of(program: str, place: Path, url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """The command line and the variables of a program for this server."""
    binary = str(place / "node_modules" / ".bin" / program)
    variables = {**os.environ, "HOME": str(home)}
    if program == "codex":
        (home / "config.toml").write_text(CODEX_CONFIG.format(name=NAME, url=url))
        variables["CODEX_HOME"] = str(home)
        how = ["exec", "--skip-git-repo-check", "-s", "danger-full-access", TASK]
        return [binary, *how], variables
    variables |= {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    return [binary, "-p", TASK, "--model", NAME, "--allowedTools", "Bash"], variables


def run_task(program: str, place: Path, url: str) -> str:
    """What is wrong; empty if nothing is."""
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as work:
        command, variables = command_of(program, place, url, Path(home))
        run = subprocess.run(
            command,
            cwd=work,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        second = Path(work, "second.txt")
        found = second.read_text() if second.exists() else None
    if run.returncode == 0 and found == "onetwo" and run.stdout.rstrip().endswith(LAST):
        return ""
    return f"status {run.returncode}, second.txt: {found!r}\n{run.stdout}\n{run.stderr}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environments", required=True, type=Path, metavar="DIR")
    parser.add_argument("--only", action="append", choices=PACKAGES)
    args = parser.parse_args()
    wrong = 0
    for program in args.only or PACKAGES:
        place = args.environments / program
        if not (place / "node_modules" / ".bin" / program).exists():
            place.mkdir(parents=True, exist_ok=True)
            run_quietly(["npm", "init", "-y"], place)
            run_quietly(["npm", "install", "--no-audit", "--no-fund", PACKAGES[program]], place)
        why = task_with_server(program, place)
        print(f"{program}: {'WRONG' if why else 'right'}", flush=True)
        if why:
            wrong += 1
            print(why)
    return wrong


def task_with_server(program: str, place: Path) -> str:
    with tempfile.TemporaryDirectory() as home:
        model = Path(home) / "model"
        script = scripted.make_model(BOX_MODEL, model, answers(program))
        options: list[Any] = ["--model", str(model), "--load-format", "dummy"]
        options += ["--served-model-name", NAME, "--logits-processors", "scripted.processor"]
        variables = {
            scripted.SCRIPT: str(script),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tools" / "clients")]),
        }
        with served(*options, "--num-kv-blocks", "16384", **variables) as server:
            return run_task(program, place, server.url)


if __name__ == "__main__":
    sys.exit(main())
