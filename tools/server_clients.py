"""Clients of others over a running `metronome serve`: a chat, a stream, a tool call, a schema.

    python tools/server_clients.py [--model DIR] [--python CLIENT=PYTHON ...] [--only CLIENT ...]

Clients: litellm, langchain (langchain-openai), llm, lm-eval, guidellm. Their packages want versions
that need not fit ours, so each may have a Python of its own. Install them with ``-c
constraints.txt``: some would fetch another torch. One that is not installed is named and is no
success; the exit status is the number of those that failed or were missing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAME = "served"
SECONDS = 300.0  # for each client
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city", "parameters": PARAMETERS},
}
ASK = [{"role": "user", "content": "The weather in Rome?"}]
UNTHOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_API_KEY": "none",
}


# What each client does. These run in the client's own Python, which knows nothing of ours.


def of_litellm(url: str, model: str) -> None:
    litellm: Any = importlib.import_module("litellm")
    about = {"model": f"openai/{NAME}", "api_base": f"{url}/v1", "api_key": "none"}
    whole = litellm.completion(messages=ASK, max_tokens=8, **about)
    assert whole.usage.completion_tokens == 8 or whole.choices[0].finish_reason == "stop"
    chunks = list(litellm.completion(messages=ASK, max_tokens=8, stream=True, **about))
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")
    forced = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    called = litellm.completion(messages=ASK, extra_body=UNTHOUGHT, **forced, **about)
    check_call(called.choices[0].message.tool_calls[0].function)
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": PARAMETERS}}
    said = litellm.completion(
        messages=ASK, response_format=form, temperature=0, extra_body=UNTHOUGHT, **about
    )
    check_city(said.choices[0].message.content)
    # And by Anthropic's form, as agents do.
    claude = {"model": f"anthropic/{NAME}", "api_base": url, "api_key": "none"}
    said = litellm.completion(messages=ASK, max_tokens=8, **claude)
    assert said.usage.completion_tokens > 0


def of_langchain(url: str, model: str) -> None:
    chat: Any = importlib.import_module("langchain_openai").ChatOpenAI
    about = {"model": NAME, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    model_of = chat(max_tokens=8, **about)
    assert model_of.invoke("Hello").usage_metadata["output_tokens"] > 0
    assert len(list(model_of.stream("Hello"))) > 1
    bound = chat(extra_body=UNTHOUGHT, **about).bind_tools(
        [TOOL], tool_choice="any", parallel_tool_calls=False
    )
    (call,) = bound.invoke("The weather in Rome?").tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Rome", "Paris")
    schema = {"title": "weather", "description": "Of a city", **PARAMETERS}
    formed = chat(extra_body=UNTHOUGHT, temperature=0, **about).with_structured_output(
        schema, method="json_schema"
    )
    assert formed.invoke("The weather in Rome?")["city"] in ("Rome", "Paris")
    newer = chat(use_responses_api=True, max_tokens=8, **about)
    assert newer.invoke("Hello").usage_metadata["output_tokens"] > 0


def of_llm(url: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as home:
        known = [
            {"model_id": NAME, "model_name": NAME, "api_base": f"{url}/v1", "can_stream": True}
        ]
        Path(home, "extra-openai-models.yaml").write_text(json.dumps(known))
        variables = {**os.environ, "LLM_USER_PATH": home}
        for option in ((), ("--no-stream",)):
            command = [sys.executable, "-m", "llm", "-m", NAME, *option, "-o", "max_tokens", "8"]
            said = subprocess.run(
                [*command, "Hello"], env=variables, capture_output=True, text=True, check=False
            )
            assert said.returncode == 0, said.stderr


def of_lm_eval(url: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as home:
        rows = [{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(8)]
        Path(home, "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
        Path(home, "sums.yaml").write_text(
            json.dumps(
                {
                    "task": "sums",
                    "dataset_path": "json",
                    "dataset_kwargs": {"data_files": {"test": str(Path(home, "sums.jsonl"))}},
                    "test_split": "test",
                    "output_type": "generate_until",
                    "doc_to_text": "{{question}}",
                    "doc_to_target": "{{answer}}",
                    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
                    "metric_list": [{"metric": "exact_match"}],
                }
            )
        )
        about = f"model={NAME},base_url={url}/v1/chat/completions,tokenizer_backend=None"
        command = [
            sys.executable, "-m", "lm_eval", "--model", "local-chat-completions",
            "--model_args", f"{about},num_concurrent=4", "--tasks", "sums",
            "--include_path", home, "--apply_chat_template", "--output_path", home,
        ]  # fmt: skip
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stderr[-2000:]
        assert "exact_match" in said.stdout, said.stdout[-2000:]


def of_guidellm(url: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as home:
        command = [
            sys.executable, "-m", "guidellm", "run",
            "--backend", f"kind=openai_http,target={url},model={NAME},validate_backend=False",
            "--tokenizer", f"kind=hf_auto,model={model}",
            "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
            "--profile", "kind=concurrent,streams=2",
            "--constraint", "kind=max_requests,count=8",
        ]  # fmt: skip
        said = subprocess.run(command, capture_output=True, text=True, check=False, cwd=home)
        assert said.returncode == 0, (said.stdout + said.stderr)[-3000:]


CLIENTS: dict[str, tuple[str, Callable[[str, str], None]]] = {
    "litellm": ("litellm", of_litellm),
    "langchain": ("langchain_openai", of_langchain),
    "llm": ("llm", of_llm),
    "lm-eval": ("lm_eval", of_lm_eval),
    "guidellm": ("guidellm", of_guidellm),
}


def check_call(function: Any) -> None:
    assert function.name == "weather"
    check_city(function.arguments)


def check_city(text: str) -> None:
    assert json.loads(text)["city"] in ("Rome", "Paris"), text


def run_here(client: str, url: str, model: str) -> int:
    """In the client's Python. 3: it is not installed."""
    package, use = CLIENTS[client]
    if importlib.util.find_spec(package) is None:
        return 3
    try:
        use(url, model)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a directory; the model in the box if not given")
    parser.add_argument("--python", action="append", default=[], metavar="CLIENT=PYTHON")
    parser.add_argument("--only", action="append", choices=CLIENTS)
    parser.add_argument("--run", nargs=3, metavar=("CLIENT", "URL", "MODEL"), help="for itself")
    asked = parser.parse_args()
    if asked.run:
        return run_here(*asked.run)
    pythons = dict(each.split("=", 1) for each in asked.python)
    sys.path.insert(0, str(ROOT / "tests"))
    templates: Any = importlib.import_module("support.chat_templates")
    servers: Any = importlib.import_module("support.served")
    box: Any = importlib.import_module("engine.assets")
    num_wrong = 0
    with tempfile.TemporaryDirectory() as home:
        template = Path(home, "hermes.jinja")
        template.write_text(templates.HERMES)
        model = asked.model or str(box.BOX_MODEL)
        options = ["--model", model, "--served-model-name", NAME, "--max-model-len", "1024"]
        options += ["--chat-template", str(template)]
        with servers.served(*options) as server:
            for client in asked.only or CLIENTS:
                command = [pythons.get(client, sys.executable), __file__, "--run", client]
                said = subprocess.run(
                    [*command, server.url, model],
                    env={**os.environ, **OFFLINE},
                    capture_output=True,
                    text=True,
                    timeout=SECONDS,
                    check=False,
                )
                told = {0: "right", 3: "not installed"}.get(said.returncode, "WRONG")
                print(f"{client:12} {told}", flush=True)
                if said.returncode:
                    num_wrong += 1
                    print(said.stdout[-2000:] + said.stderr[-4000:])
    return num_wrong


if __name__ == "__main__":
    sys.exit(main())
