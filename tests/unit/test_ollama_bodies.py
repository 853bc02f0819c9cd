"""Requests in Ollama's form: each field is used, has no effect or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gguf import GGMLQuantizationType
from support.box_gguf import box_as_gguf

from engine.assets import BOX_MODEL
from engine.errors import RequestError
from engine.gguf.directory import make
from engine.server.blame import with_client_names
from engine.server.bodies import ChatRequest, read
from engine.server.conversation import plain_messages
from engine.server.dialogue import check_body
from engine.server.errors import ApiError, as_api_error
from engine.server.ollama import bodies as b
from engine.server.ollama.details import ModelDetails, read_details
from engine.server.ollama.names import tagged
from engine.server.ollama.options import context_of
from engine.server.speech.tools import tools_of

USED, IDLE, REFUSED = "used", "no effect", "refused"
LAST_N = "repeat_last_n"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = {"function": {"index": 0, "name": "look", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "look", "description": "x", "parameters": SCHEMA}}

# The fields of `Options` in Ollama's api/types.go, those of older versions included.
OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("num_predict", 7, USED), ("num_predict", 7.0, USED), ("num_ctx", 64.0, USED),
    ("num_predict", -1, IDLE), ("num_predict", -2, IDLE),
    ("num_predict", 0, IDLE), ("num_predict", -3, REFUSED), ("num_ctx", 64, USED),
    ("num_ctx", 1, REFUSED), ("seed", 5, USED), ("seed", -1, IDLE), ("top_k", 20, USED),
    ("top_k", -5, REFUSED), ("top_p", 0.9, USED), ("top_p", 1.5, REFUSED), ("min_p", 0.1, USED),
    ("min_p", 2, REFUSED), ("temperature", 0.8, USED), ("temperature", 3, REFUSED),
    ("temperature", "0.5", REFUSED), ("repeat_penalty", 1.2, USED), ("repeat_penalty", 0, REFUSED),
    ("presence_penalty", 1.5, USED), ("presence_penalty", 3, REFUSED),
    ("frequency_penalty", 1.0, USED), ("frequency_penalty", -3, REFUSED), ("stop", ["x"], USED),
    ("stop", "x", USED), ("stop", [1], REFUSED),
    ("repeat_last_n", 33, IDLE), ("num_keep", 5, IDLE), ("mirostat", 0, IDLE),
    ("mirostat", 1, REFUSED), ("mirostat_tau", 0.8, IDLE), ("mirostat_eta", 0.6, IDLE),
    ("tfs_z", 1.0, IDLE), ("tfs_z", 0.5, REFUSED), ("typical_p", 1, IDLE),
    ("typical_p", 0.7, REFUSED), ("penalize_newline", True, IDLE),
    ("penalize_newline", False, REFUSED), ("numa", False, IDLE), ("num_batch", 2, IDLE),
    ("num_gpu", 1, IDLE), ("num_thread", 2.0, IDLE),
    ("main_gpu", 0, IDLE), ("low_vram", False, IDLE), ("f16_kv", True, IDLE),
    ("vocab_only", False, IDLE), ("logits_all", False, IDLE), ("embedding_only", False, IDLE),
    ("use_mmap", True, IDLE), ("use_mlock", False, IDLE), ("num_thread", 8, IDLE),
    ("temprature", 1, REFUSED),
)  # fmt: skip
BOTH: tuple[tuple[str, Any, str], ...] = (
    ("stream", False, USED), ("stream", "no", REFUSED), ("format", "json", USED),
    ("format", SCHEMA, USED), ("format", "", IDLE), ("format", "jsn", REFUSED),
    ("keep_alive", "5m", IDLE), ("keep_alive", -1, IDLE), ("keep_alive", 0, IDLE),
    ("think", True, USED), ("think", False, USED), ("think", "high", USED),
    ("think", "hgh", REFUSED), ("logprobs", True, USED), ("top_logprobs", 3, REFUSED),
    ("truncate", False, USED), ("shift", False, IDLE), ("_debug_render_only", False, IDLE),
    ("_debug_render_only", True, REFUSED), ("options", {}, IDLE), ("options", 5, REFUSED),
    ("anything", 5, REFUSED), ("anything", None, IDLE), ("priority", 3, USED),
)  # fmt: skip
CHAT: tuple[tuple[str, Any, str], ...] = (
    *BOTH,
    ("messages", "x", REFUSED),
    ("tools", [TOOL], USED),
    ("tools", [], IDLE),
    ("tools", [{"function": {}}], REFUSED),
)
GENERATE: tuple[tuple[str, Any, str], ...] = (
    *BOTH,
    ("prompt", "other", USED),
    ("suffix", "x", REFUSED),
    ("suffix", "", IDLE),
    ("system", "Be short", USED),
    ("template", "{{ .Prompt }}", REFUSED),
    ("context", [1, 2], USED),
    ("context", ["x"], REFUSED),
    ("raw", True, USED),
    ("images", ["aGk="], USED),
    ("images", "aGk=", REFUSED),
    ("images", [], IDLE),
    ("width", 64, REFUSED),
    ("height", 0, IDLE),
    ("steps", 4, REFUSED),
)
MESSAGE: tuple[tuple[str, Any, str], ...] = (
    ("content", "other", USED),
    ("content", 5, REFUSED),
    ("role", "wizard", REFUSED),
    ("thinking", "hm", USED),
    ("images", ["aGk="], REFUSED),  # in an assistant's message
    ("images", [5], REFUSED),
    ("images", None, IDLE),
    ("tool_calls", [CALL], USED),
    ("tool_calls", "x", REFUSED),
    ("tool_calls", [{}], REFUSED),
    ("tool_name", "look", IDLE),  # of a message that is no result
    ("tool_call_id", "call_1", USED),
)
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (b.ChatBody, {"messages": [{"role": "user", "content": "hi"}]}),
    "generate": (b.GenerateBody, {"prompt": "hi"}),
}


def meaning(api: str, fields: dict[str, Any]) -> Any:
    """What the engine gets, or the ``ApiError``."""
    kind, good = BODIES[api]
    body = None
    try:
        body = read(json.dumps({"model": "m", **good, **fields}).encode(), kind)
        num_kept = context_of(body.values, 512) - 1
        as_chat = b.chat_of if api == "chat" else b.chat_of_prompt
        chat: ChatRequest = as_chat(body, num_kept)
        check_body(chat)
        tools = tools_of(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
        sampling = chat.sampling(max_tokens=chat.max_completion_tokens, logprobs=None)
        extra = (body.raw, body.context) if api == "generate" else ()
        left_out = ("messages", "tools", "seed")
        about = {k: v for k, v in msgspec.structs.asdict(chat).items() if k not in left_out}
        return plain_messages(chat.messages, []), tools, sampling, about, extra
    except (ApiError, RequestError) as error:
        return with_client_names(body, as_api_error(error))


def check(api: str, field: str, fields: dict[str, Any], expected: str) -> None:
    found, plain = meaning(api, fields), meaning(api, {})
    if expected == REFUSED:
        assert isinstance(found, ApiError) and found.status == 400, found
        assert field in found.message and field in (found.param or ""), found.message
        assert len(found.message) < 300
    else:
        assert not isinstance(found, ApiError), found.message
        assert (repr(found) == repr(plain)) == (expected == IDLE)


@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize(("field", "value", "expected"), OPTIONS)
def test_each_option_is_used_or_refused_by_name(
    api: str, field: str, value: Any, expected: str
) -> None:
    check(api, f"options.{field}", {"options": {field: value}}, expected)


@pytest.mark.parametrize(
    ("api", "field", "value", "expected"),
    [*(("chat", *each) for each in CHAT), *(("generate", *each) for each in GENERATE)],
)
def test_each_field_is_used_or_refused_by_name(
    api: str, field: str, value: Any, expected: str
) -> None:
    check(api, field, {field: value}, expected)


@pytest.mark.parametrize(("field", "value", "expected"), MESSAGE)
def test_each_field_of_a_message_is_used_or_refused(field: str, value: Any, expected: str) -> None:
    message = {"role": "assistant", "content": "hi", field: value}
    others = [{"role": "user", "content": "hm"}]
    found = meaning("chat", {"messages": [message, *others]})
    plain = meaning("chat", {"messages": [{"role": "assistant", "content": "hi"}, *others]})
    if expected == REFUSED:
        assert isinstance(found, ApiError) and found.param == "messages"
        assert field in found.message, found.message
    else:
        assert not isinstance(found, ApiError), found.message
        assert (repr(found) == repr(plain)) == (expected == IDLE)


def test_the_table_has_every_field_of_the_clients_package() -> None:
    types = pytest.importorskip("ollama._types")
    for table, kind, own in (
        (CHAT, types.ChatRequest, b.ChatBody),
        (GENERATE, types.GenerateRequest, b.GenerateBody),
        (OPTIONS, types.Options, None),
        (MESSAGE, types.Message, None),
    ):
        known = {field for field, _, _ in table} | {"model", "messages"}
        assert kind.model_fields.keys() <= known
        if own is not None:
            unlisted = set(own.__struct_encode_fields__) - known - {*b.QUEUED}
            assert not unlisted
    embedding = {"input", "prompt", "model", "truncate", "options", "keep_alive", "dimensions"}
    assert types.EmbedRequest.model_fields.keys() <= embedding
    for kind, own in (
        (types.EmbedRequest, b.EmbedBody),
        (types.EmbeddingsRequest, b.EmbeddingsBody),
        (types.ShowRequest, b.ShowBody),
    ):
        assert kind.model_fields.keys() <= {*own.__struct_encode_fields__}


def test_penalties_of_the_last_tokens_only_are_refused() -> None:
    for last, is_right in ((-1, True), (0, False), (64, False)):
        given = {"options": {"repeat_penalty": 1.1, LAST_N: last}}
        found = meaning("chat", given)
        assert isinstance(found, ApiError) is not is_right
        if not is_right:
            assert found.param == f"options.{LAST_N}" and "set it to -1" in found.message
    off = {"repeat_penalty": 1, "presence_penalty": 0.0, "frequency_penalty": 0}
    assert meaning("chat", {"options": off}) == meaning("chat", {"options": {**off, LAST_N: 64}})


@pytest.mark.parametrize("name", ["system", "context"])
def test_a_raw_prompt_has_no_template(name: str) -> None:
    value: Any = "x" if name == "system" else [1]
    assert meaning("generate", {"raw": True, name: value}).param == name


def test_results_belong_to_the_calls_of_their_tools() -> None:
    """Ollama's calls have no ids, and results may come in another order."""
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("one", "two", "one")]
    messages = [
        {"role": "User", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_name": "two"},
        {"role": "tool", "content": "1", "tool_name": "one"},
        {"role": "tool", "content": "3"},
    ]
    made = b.messages_of(messages)
    ids = [call["id"] for call in made[1]["tool_calls"]]
    assert len({*ids}) == 3 and made[0]["role"] == "user"
    assert [each["tool_call_id"] for each in made[2:]] == [ids[1], ids[0], ids[2]]
    assert made[2]["name"] == "two"
    own = [{"id": "a", **calls[0]}, {"id": "b", **calls[1]}]
    result = {"role": "tool", "content": "2", "tool_call_id": "b"}
    made = b.messages_of([{"role": "assistant", "tool_calls": own}, result])
    assert made[1]["tool_call_id"] == "b" and made[0]["tool_calls"][1]["id"] == "b"


def test_a_context_is_not_larger_than_the_servers() -> None:
    options = b.Options
    assert context_of(None, 512) == context_of(options(), 512) == 512
    assert context_of(options(num_ctx=4096), 512) == 512
    assert context_of(options(num_ctx=100), 512) == 100


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("box", "box:latest"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B:latest"),
        ("owner/name:Q4_K_M", "owner/name:Q4_K_M"),
        ("llama3:8b", "llama3:8b"),
    ],
)
def test_names_have_a_tag(name: str, listed: str) -> None:
    assert tagged(name) == listed


def test_details_are_those_of_the_models_files(tmp_path: Path) -> None:
    """The details of a directory, and of a GGUF file with the same weights in 8 bits."""
    found = read_details(str(BOX_MODEL))
    assert (found.format, found.family, found.quantization) == ("safetensors", "llama", "BF16")
    assert found.num_bytes > 2 * found.num_parameters > 6e6 and found.modified > 1e9
    assert found.info(64)["llama.context_length"] == 64
    assert found.info(64)["llama.block_count"] == 6
    file = tmp_path / "box.gguf"
    box_as_gguf(file, GGMLQuantizationType.Q8_0)
    packed = read_details(str(make(file, tmp_path / "made")))
    assert (packed.format, packed.family, packed.quantization) == ("gguf", "llama", "Q8_0")
    assert packed.num_parameters == found.num_parameters and packed.digest != found.digest
    assert packed.num_bytes == file.stat().st_size < found.num_bytes


def test_unknown_details_are_empty() -> None:
    about = ModelDetails().about()
    assert about["parameter_size"] == "" and about["families"] == []
    assert ModelDetails(num_parameters=134_515_008).about()["parameter_size"] == "134.52M"
    assert ModelDetails(num_parameters=8_030_000_000).about()["parameter_size"] == "8.0B"
    assert read_details("nowhere") == ModelDetails()
    assert ModelDetails(format="a").digest != ModelDetails().digest
