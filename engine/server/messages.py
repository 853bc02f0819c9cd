"""Anthropic's ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import msgspec

from engine.messages.requests import RequestOutput
from engine.server.answers import reason_of
from engine.server.blocks import Block, BlockAnswer, BlockChange, Json, named_event
from engine.server.dialogue import AnswerPiece, ChatGeneration, LoadedChatModel
from engine.server.errors import as_api_error, field_error
from engine.server.messages_body import MessagesRequest, chat_of, left_out_of
from engine.server.speech.json_text import object_in

DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class Messages(BlockAnswer):
    """The answer to one ``POST /v1/messages``, complete or streamed."""

    def __init__(self, loaded: LoadedChatModel, body: MessagesRequest, name: str) -> None:
        """name: the model's name. Raises ``RequestError`` or ``ApiError`` for an unsupported value
        of a field."""
        if body.max_tokens is None:
            raise field_error("max_tokens", "is missing: add it, it is required")
        super().__init__(f"msg_{uuid.uuid4().hex}", ChatGeneration(loaded, chat_of(body)))
        self.left_out = left_out_of(body)
        self._is_begun = False
        self.response = {
            "id": self.name,
            "type": "message",
            "role": "assistant",
            "model": name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def failure(self, error: BaseException) -> bytes:
        return named_event(as_api_error(error).anthropic())

    def _events(self, output: RequestOutput) -> Iterator[Json]:
        for piece in self._generation.read(output):
            self._counted.add(0, piece.output, [piece.completion])
            if not self._is_begun:
                self._is_begun = True
                message = {**self.response, "usage": self._usage()}
                yield {"type": "message_start", "message": message}
            for change in self._blocks.take(piece.events):
                yield from_change(change)
                self._keep(change)
            if piece.completion.finish_reason is not None:
                yield from self._end(piece)

    def _end(self, piece: AnswerPiece) -> Iterator[Json]:
        reason = reason_of(piece.completion)  # raises if the generation ended with an error
        for change in self._blocks.end():
            yield from_change(change)
            self._keep(change)
        stop = piece.completion.stop_reason
        ended = {"stop_reason": "end_turn", "stop_sequence": None}
        if reason == "length":
            ended["stop_reason"] = "max_tokens"
        elif piece.turn.calls:
            ended["stop_reason"] = "tool_use"
        elif isinstance(stop, str):
            ended = {"stop_reason": "stop_sequence", "stop_sequence": stop}
        self.response |= {**ended, "usage": self._usage()}
        yield {"type": "message_delta", "delta": ended, "usage": self._usage()}
        yield {"type": "message_stop"}

    def _keep(self, change: BlockChange) -> None:
        if change.what == "end":
            self.response["content"].append(whole_block(change.block))

    def _usage(self) -> Json:
        """Token counts in Anthropic's format: ``input_tokens`` excludes cached tokens."""
        usage = self._counted.usage
        cached = usage.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
        }


async def count_tokens(loaded: LoadedChatModel, body: MessagesRequest) -> bytes:
    """Return JSON with the number of tokens in the prompt that a request renders to."""
    ids = await ChatGeneration(loaded, chat_of(body)).token_ids()
    return msgspec.json.encode({"input_tokens": len(ids)})


def from_change(change: BlockChange) -> Json:
    """The server-sent event that reports the beginning, a delta or the end of a content block."""
    block, index = change.block, change.block.index
    if change.what == "begin":
        begun = {"type": "content_block_start", "index": index}
        return {**begun, "content_block": block_json(block, "", {})}
    if change.what == "end":
        return {"type": "content_block_stop", "index": index}
    kind, field = DELTAS[block.kind]
    return {
        "type": "content_block_delta",
        "index": index,
        "delta": {"type": kind, field: change.text},
    }


def whole_block(block: Block) -> Json:
    arguments = object_in(block.text) if block.call is not None else {}
    return block_json(block, block.text, arguments)


def block_json(block: Block, text: str, arguments: Json) -> Json:
    if block.call is not None:
        call = block.call
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text, "citations": None}
