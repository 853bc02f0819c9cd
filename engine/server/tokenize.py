"""``POST /tokenize`` and ``POST /detokenize``, with vLLM's fields."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.async_engine import AsyncLLMEngine
from engine.pictures.sources import Given
from engine.server.conversation import plain_messages
from engine.server.dialogue import ChatModel, check_pictures, template_variables
from engine.server.errors import field_error
from engine.server.logprobs import TokenNames

MAX_CHARS = 4 << 20  # characters of ``prompt``
MAX_IDS = 1 << 18


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/tokenize``: a text or a conversation."""

    client_names: ClassVar = {"multi_modal_data": ("messages",)}

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # default: true for a text; a template has its own
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeAnswer(msgspec.Struct, omit_defaults=True):
    """The token ids of a text, or of the prompt of a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/detokenize``."""

    tokens: list[int]
    model: str | None = None


class DetokenizeAnswer(msgspec.Struct):
    """The text of token ids, with special tokens."""

    prompt: str


async def tokenize(model: ChatModel, body: TokenizeRequest) -> TokenizeAnswer:
    """Encode a text, or the prompt of a conversation. Raises ``ApiError`` or ``RequestError``."""
    engine = model.engine
    if (body.prompt is None) == (body.messages is None):
        found = "missing" if body.prompt is None else "given with messages"
        raise field_error("prompt", f"is {found}: send either prompt or messages")
    if body.messages is None:
        text = body.prompt or ""
        ids = await _encoded(engine, text, body.add_special_tokens is not False)
    else:
        rendered = await _rendered(model, body)
        if body.add_special_tokens:
            rendered["prompt_token_ids"] = await _encoded(engine, rendered["prompt"], True)
        ids = await engine.pictures.token_ids(rendered)
    strings = None
    if body.return_token_strs:
        names = TokenNames(engine.tokenizer)
        strings = [names.text_of(token_id, is_unique=True) for token_id in ids]
    return TokenizeAnswer(len(ids), engine.max_model_len, ids, strings)


async def detokenize(engine: AsyncLLMEngine, body: DetokenizeRequest) -> DetokenizeAnswer:
    """Decode token ids. Raises ``ApiError``."""
    if len(body.tokens) > MAX_IDS:
        raise field_error(
            "tokens", f"has {len(body.tokens)} ids, the limit is {MAX_IDS}: send fewer"
        )
    size = engine.get_tokenizer().vocab_size
    for token_id in body.tokens:
        if not 0 <= token_id < size:
            raise field_error("tokens", f"has {token_id}, must have ids from 0 to {size - 1}")
    return DetokenizeAnswer(await engine.detokenize(body.tokens))


async def _encoded(engine: AsyncLLMEngine, text: str, add_special_tokens: bool) -> list[int]:
    if len(text) > MAX_CHARS:
        raise field_error(
            "prompt", f"has {len(text)} characters, the limit is {MAX_CHARS}: send it in parts"
        )
    return await engine.tokenize(text, add_special_tokens)


async def _rendered(model: ChatModel, body: TokenizeRequest) -> Any:
    variables = template_variables(body.chat_template_kwargs)
    variables["add_generation_prompt"] = body.add_generation_prompt
    pictures: list[Given] = []
    messages = plain_messages(body.messages or [], pictures)
    check_pictures(model.engine, pictures)
    return await model.render(messages, pictures, **variables)
