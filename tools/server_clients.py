"""Runs other programs' clients over `metronome serve`, each in an environment of its own.

    python tools/server_clients.py --environments DIR [--model DIR] [--template NAME ...]
                                   [--only CLIENT ...] [--json FILE]

pip or npm makes an environment that DIR lacks. Each client (``tools/clients``) chats, streams,
lets the model call a tool, requests text by a schema, provokes an error and cancels a stream;
`parameters` sends every parameter of the newest packages instead. The model is used with its own
chat template and with one in the style of Hermes; a random tiny model that sees gets pictures. A
cell of the table is `right`, `WRONG`, `model`
(the exchange was right, but the small model did not write what the task requires) or `-`. The exit
status is the number of wrong cells; a client that cannot be run counts as one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from columns import print_columns

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "tools" / "clients"
NAME = "served"
SECONDS = 900.0  # for each client
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_API_KEY": "none",
    "ANTHROPIC_API_KEY": "none",
    "LANGSMITH_TRACING": "false",
}
OWN, HERMES, SEEING = "own", "hermes", "seeing"
HERMES_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
Call one by <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Without thinking: the small model was not trained to think, and would begin to."""


@dataclass(frozen=True)
class Client:
    """A client program in ``tools/clients``, and the packages of its environment."""

    program: str
    packages: tuple[str, ...]
    environment: str
    arguments: tuple[str, ...] = ()
    has_pictures: bool = True

    @property
    def is_node(self) -> bool:
        return self.program.endswith(".mjs")

    def command(self, place: Path) -> list[str]:
        program = str(HERE / self.program)
        return ["node", program] if self.is_node else [str(place / "bin/python"), program]

    def prepare(self, place: Path) -> None:
        """Install the environment if it is missing. Raises ``CalledProcessError``."""
        done = place / ".installed"
        if done.exists():
            return
        place.mkdir(parents=True, exist_ok=True)
        if self.is_node:
            run_quietly(["npm", "init", "-y"], place)
            run_quietly(["npm", "install", "--no-audit", "--no-fund", *self.packages], place)
        else:
            run_quietly([sys.executable, "-m", "venv", "."], place)
            torch = place / "constraints.txt"  # some would fetch another build of torch
            torch.write_text("torch==2.13.0\n")
            run_quietly(["bin/pip", "install", "-q", "-c", str(torch), *self.packages], place)
        done.touch()


NODE = ("openai", "@anthropic-ai/sdk", "ai@6", "@ai-sdk/openai-compatible@2", "zod", "ollama")
CLIENTS = {
    "openai-agents": Client("openai_agents_client.py", ("openai-agents",), "openai-agents"),
    "langchain": Client(
        "langchain_client.py", ("langchain-openai", "langchain-anthropic"), "langchain"
    ),
    "litellm": Client("litellm_client.py", ("litellm",), "litellm"),
    "ollama": Client("ollama_client.py", ("ollama",), "ollama"),
    "langchain-ollama": Client(
        "langchain_ollama_client.py", ("langchain-ollama",), "langchain-ollama"
    ),
    "npm openai": Client("node_clients.mjs", NODE, "node", ("openai",)),
    "npm anthropic": Client("node_clients.mjs", NODE, "node", ("anthropic",)),
    "npm ollama": Client("node_clients.mjs", NODE, "node", ("ollama",)),
    "npm ai": Client("node_clients.mjs", NODE, "node", ("ai",)),
    "parameters": Client(
        "parameters_client.py", ("openai", "anthropic"), "parameters", has_pictures=False
    ),
    "lm-eval": Client("lm_eval_client.py", ("lm-eval[api]",), "lm-eval", has_pictures=False),
    "guidellm": Client("guidellm_client.py", ("guidellm",), "guidellm", has_pictures=False),
}


def run_quietly(command: Sequence[str], place: Path) -> None:
    subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)


def cells_of(
    client: Client, place: Path, url: str, model: str, template: str
) -> dict[str, dict[str, str]]:
    """Run one client and return its results by cell; `run` is wrong if it ended early."""
    arguments = client.arguments or (model,)
    sees = {"SEEING": "1"} if template == SEEING else {}
    run = subprocess.run(
        [*client.command(place), url, *arguments],
        cwd=place,
        env={**os.environ, **OFFLINE, **sees},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    found = {}
    for line in run.stdout.splitlines():
        if line.startswith('{"cell"'):
            cell = json.loads(line)
            found[cell["cell"]] = cell
    if run.returncode or not found:
        found["run"] = {"cell": "run", "result": "WRONG", "why": run.stderr[-3000:]}
    return found


def print_table(results: dict[str, dict[str, dict[str, str]]]) -> None:
    """Print a row for each client; cells that few clients have share the last column."""
    usual = ["chat", "stream", "tool", "schema", "error", "cancel"]
    rows = []
    for name, cells in results.items():
        others = [f"{cell}: {each['result']}" for cell, each in cells.items() if cell not in usual]
        row = [cells.get(cell, {"result": "-"})["result"] for cell in usual]
        rows.append([name, *row, "; ".join(others) or "-"])
    print_columns(["client", *usual, "others"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environments", required=True, type=Path, metavar="DIR")
    parser.add_argument("--model", help="a directory; default: the model in the box")
    parser.add_argument("--template", action="append", choices=(OWN, HERMES, SEEING))
    parser.add_argument("--only", action="append", choices=CLIENTS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all results there")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    servers: Any = importlib.import_module("support.served")
    model = args.model or str(importlib.import_module("engine.assets").BOX_MODEL)
    length = "4096" if args.model else "2048"  # all that the model in the box has
    kept: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as home:
        written = Path(home, "hermes.jinja")
        written.write_text(HERMES_TEMPLATE)
        for template in args.template or (OWN, HERMES, SEEING):
            used = seeing_model(Path(home)) if template == SEEING else model
            options = ["--model", used, "--served-model-name", NAME, "--max-model-len", length]
            if template == HERMES:
                options += ["--chat-template", str(written)]
            with servers.served(*options) as server:
                kept[template] = results_of(args, server.url, used, template)
            print(f"\ntemplate: {template}")
            print_table(kept[template])
    if args.json:
        args.json.write_text(json.dumps(kept, indent=1) + "\n")
    wrong = [
        (template, client, cell["cell"], cell["why"])
        for template, clients in kept.items()
        for client, cells in clients.items()
        for cell in cells.values()
        if cell["result"] == "WRONG"
    ]
    for template, client, cell, why in wrong:
        print(f"\n{client}, {cell}, template {template}:\n{why}")
    return len(wrong)


def seeing_model(home: Path) -> str:
    """The directory of a random tiny model that reads pictures."""
    made: Any = importlib.import_module("e2e.seeing_models")
    return str(made.make_seeing_model(home / "seeing", "smolvlm"))


def results_of(
    args: argparse.Namespace, url: str, model: str, template: str
) -> dict[str, dict[str, dict[str, str]]]:
    results = {}
    for name in args.only or CLIENTS:
        client = CLIENTS[name]
        if template == SEEING and not client.has_pictures:
            continue
        place = args.environments / client.environment
        try:
            client.prepare(place)
            results[name] = cells_of(client, place, url, model, template)
        except (OSError, subprocess.SubprocessError) as error:
            results[name] = {"run": {"cell": "run", "result": "WRONG", "why": repr(error)}}
    return results


if __name__ == "__main__":
    sys.exit(main())
