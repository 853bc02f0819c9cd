"""Adapters over HTTP: model names of the clients of OpenAI and Anthropic, loaded by operators or
found in a directory."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.box_adapters import write_adapter
from support.patience import WAIT_SECONDS
from support.served import Served, forked

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
parser = pytest.importorskip("prometheus_client.parser")

MODEL, KEY, ADMIN = "box", "key-one", "the-admin"
OPTIONS = (
    "--served-model-name", MODEL, "--num-threads", "1", "--max-model-len", "128",
    "--num-kv-blocks", "200", "--dtype", "float32", "--enable-lora", "--max-loras", "2",
    "--max-cpu-loras", "3", "--api-key", KEY, "--admin-api-key", ADMIN,
)  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
ASK = [{"role": "user", "content": "The colour of the sky"}]
TO_THE_END = {"ignore_eos": True}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    (root / "template.jinja").write_text(TEMPLATE)
    write_adapter(root / "outside" / "sql", 1)
    for seed, name in enumerate(("de", "fr", "team/es", "it"), 2):
        write_adapter(root / "dir" / name, seed)
    shutil.copytree(root / "dir" / "de", root / "dir" / "damaged")
    (root / "dir" / "damaged" / "adapter_model.safetensors").write_bytes(b"not at all")
    (root / "dir" / "link").symlink_to(root / "outside" / "sql")
    return root


@pytest.fixture(scope="module")
def server(places: Path) -> Iterator[Served]:
    options = (
        "--chat-template", str(places / "template.jinja"),
        "--lora-modules", f"sql={places / 'outside' / 'sql'}",
        json.dumps({"name": "german", "path": str(places / "dir" / "de")}),
        "--adapter-dir", str(places / "dir"),
    )  # fmt: skip
    with forked(*OPTIONS, *options, log=places / "log") as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def answer(client: Any, model: str) -> str:
    got = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=10, temperature=0, extra_body=TO_THE_END
    )
    assert got.model == model
    return str(got.choices[0].message.content)


def post(server: Served, path: str, body: Any, key: str = ADMIN) -> Any:
    return server.ask(path, body, Authorization=f"Bearer {key}")


def listed(client: Any) -> dict[str, Any]:
    return {model.id: model for model in client.models.list()}


def test_a_chat_with_two_adapters_side_by_side(server: Served, client: Any) -> None:
    names = (MODEL, "sql", "german", "sql")
    alone = {name: answer(client, name) for name in names}
    assert len(set(alone.values())) == 3
    apart = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)

    async def chat(name: str) -> str:
        stream = await apart.chat.completions.create(
            model=name,
            messages=ASK,
            max_tokens=10,
            temperature=0,
            stream=True,
            extra_body=TO_THE_END,
        )
        chunks = [chunk async for chunk in stream]
        assert {chunk.model for chunk in chunks} == {name}
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    async def together() -> list[str]:
        async with apart:
            return list(await asyncio.gather(*map(chat, names)))

    assert asyncio.run(together()) == [alone[name] for name in names]


def test_every_api_takes_an_adapter(server: Served, client: Any) -> None:
    text = answer(client, "sql")
    response = client.responses.create(
        model="sql",
        input="The colour of the sky",
        max_output_tokens=16,
        temperature=0,
        extra_body=TO_THE_END,
    )
    assert response.model == "sql" and response.output_text.startswith(text)
    claude = anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)
    message = claude.messages.create(
        model="sql", messages=ASK, max_tokens=10, extra_body={"temperature": 0, **TO_THE_END}
    )
    assert message.model == "sql" and message.content[0].text == text
    prompts = [f"user: {ASK[0]['content']}\nassistant:"] * 2
    completion = client.completions.create(
        model="sql", prompt=prompts, max_tokens=10, temperature=0, extra_body=TO_THE_END
    )
    assert completion.model == "sql" and {each.text for each in completion.choices} == {text}


def test_adapters_are_listed_with_their_parent(client: Any, places: Path) -> None:
    models = listed(client)
    assert {MODEL, "sql", "german"} <= models.keys()
    sql = models["sql"]
    assert (sql.parent, sql.root) == (MODEL, str(places / "outside" / "sql"))
    assert models[MODEL].parent is None
    assert client.models.retrieve("german").parent == MODEL
    with pytest.raises(openai.NotFoundError, match=r"model is 'germann'.*'german'"):
        client.models.retrieve("germann")


def test_names_resolve_in_the_directory_and_nowhere_else(
    server: Served, client: Any, places: Path
) -> None:
    assert "team/es" not in listed(client)
    assert answer(client, "team/es") != answer(client, MODEL)
    assert "team/es" in listed(client)
    assert answer(client, "de") == answer(client, "german"), "the same files under two names"
    hostile = (
        "../outside/sql",
        str(places / "outside" / "sql"),
        "link",
        "team",
        ".",
        "",
        "a" * 999,
    )
    for name in (*hostile, "de/../../outside/sql", "de\0", "none-such"):
        with pytest.raises(openai.NotFoundError) as caught:
            answer(client, name)
        assert caught.value.code == "model_not_found" and caught.value.param == "model"
    with pytest.raises(openai.BadRequestError) as caught:
        answer(client, "damaged")
    assert caught.value.code == "adapter_failed" and str(places) not in str(caught.value)
    assert answer(client, "sql"), "nobody else is hurt"


def test_operators_load_replace_and_unload(server: Served, client: Any, places: Path) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    body = {"lora_name": "new", "lora_path": str(places / "dir" / "fr")}
    for path in (load, unload):
        assert post(server, path, body, KEY).status == 401
    loaded = post(server, load, body)
    assert (loaded.status, loaded.body) == (200, b"Success: LoRA adapter 'new' added successfully.")
    french = answer(client, "new")
    assert french == answer(client, "fr")
    again = post(server, load, body)
    assert again.status == 400 and "'new' is loaded already" in again.json["error"]["message"]
    replaced = post(server, load, {**body, "lora_path": "it", "load_inplace": True})
    assert replaced.status == 200 and answer(client, "new") == answer(client, "it") != french
    for change, reason in (
        ({"lora_name": MODEL}, "a name of the base model"),
        ({"lora_name": "other", "lora_path": str(places / "outside" / "sql")}, "adapter_dir"),
        ({"lora_name": "other", "lora_path": "../outside/sql"}, "adapter_dir"),
        ({"lora_name": "other", "lora_path": "damaged"}, "adapter_model.safetensors"),
        ({"lora_name": "other", "lora_path": "none"}, "none"),
        ({"lora_name": "\n", "lora_path": "fr"}, "printable"),
        ({"lora_name": "other", "lora_path": 3}, "lora_path"),
        ({"what": 1}, "what"),
    ):
        refused = post(server, load, {**body, **change})
        assert refused.status == 400 and reason in refused.json["error"]["message"], refused
    assert "other" not in listed(client)
    assert post(server, unload, {"lora_name": "new"}).status == 200
    with pytest.raises(openai.NotFoundError, match=r"model is 'new', must be one of"):
        answer(client, "new")
    gone = post(server, unload, {"lora_name": "new"})
    assert gone.status == 404 and gone.json["error"]["code"] == "model_not_found"


def test_the_log_names_the_adapter(server: Served, client: Any, places: Path) -> None:
    got = client.chat.completions.create(model="sql", messages=ASK, max_tokens=2)
    base = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=2)
    deadline = time.monotonic() + WAIT_SECONDS
    while base.id.rpartition("-")[2] not in (text := (places / "log").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lines = text.splitlines()
    (own,) = (line for line in lines if got.id.rpartition("-")[2] in line)
    (other,) = (line for line in lines if base.id.rpartition("-")[2] in line)
    assert " adapter=sql " in own and "adapter=" not in other


def test_metrics_show_slots_copies_and_who_runs(server: Served, client: Any) -> None:
    for name in ("sql", "german", "fr", "it"):
        answer(client, name)
    page = server.ask("/metrics", Authorization=f"Bearer {KEY}").body.decode()
    families = parser.text_string_to_metric_families(page)
    samples = {sample.name: sample for family in families for sample in family.samples}
    assert samples["metronome_adapter_slots"].value == 2
    assert samples["metronome_adapter_slots_used"].value == 2
    assert samples["metronome_adapter_host_copies"].value == 3
    assert samples["metronome_adapter_host_bytes"].value > 0
    info = samples["vllm:lora_requests_info"]
    assert info.labels == {
        "max_lora": "2",
        "running_lora_adapters": "",
        "waiting_lora_adapters": "",
    }


def test_a_server_that_cannot_load_its_adapters_does_not_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = ("--num-kv-blocks", "50", "--enable-lora", "--lora-modules", "sql=/none/such")
    with (
        pytest.raises(AssertionError, match="the server has ended before it was ready"),
        forked(*options, log=log),
    ):
        pass
    assert "lora_modules: adapter 'sql'" in log.read_text()
