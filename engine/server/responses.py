"""``POST /v1/responses``, and stored responses.

A response is made from the events of its stream, even if the client does not want a stream.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from engine.messages.requests import RequestOutput
from engine.server.answers import reason_of
from engine.server.blocks import Block, BlockAnswer, BlockChange, Json, named_event
from engine.server.bodies import ChatRequest
from engine.server.conversation import Message
from engine.server.dialogue import AnswerPiece, ChatGeneration, LoadedChatModel
from engine.server.errors import ApiError, as_api_error
from engine.server.logprobs import TokenNames, chat_logprobs
from engine.server.responses_body import ResponsesRequest, chat_of, tools_of
from engine.server.responses_items import messages_of
from engine.server.speech.custom import InputReader, input_of
from engine.server.speech.events import CallBegin, Text

MAX_STORED = 1024
MAX_STORED_BYTES = 64 << 20


class StoredResponse(NamedTuple):
    """A response and the conversation that it ends, both as JSON; ``size``: bytes of the two
    together; ``owner``: who may read them."""

    response: bytes
    conversation: bytes
    owner: str
    size: int


class ResponseStore:
    """The latest responses, at most ``MAX_STORED`` and at most ``MAX_STORED_BYTES`` together."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._size = 0

    def put(self, name: str, response: bytes, messages: list[Message], owner: str) -> None:
        conversation = msgspec.json.encode(messages)
        size = len(response) + len(conversation)
        if name in self._stored:
            self._size -= self._stored.pop(name).size
        self._stored[name] = StoredResponse(response, conversation, owner, size)
        self._size += size
        while len(self._stored) > MAX_STORED or self._size > MAX_STORED_BYTES:
            self._size -= self._stored.popitem(last=False)[1].size

    def get(self, name: str, owner: str, param: str | None = None) -> StoredResponse:
        """Find a response. Raises ``ApiError`` if there is none with this name and owner."""
        found = self._stored.get(name)
        if found is None or found.owner != owner:
            raise ApiError(
                404 if param is None else 400,
                f"there is no response {name!r:.80}: it was not stored, or is not among the last "
                f"{MAX_STORED} any more; send its conversation as input",
                param=param,
                code="response_not_found" if param is None else "previous_response_not_found",
            )
        return found

    def delete(self, name: str, owner: str) -> None:
        self._size -= self.get(name, owner).size
        del self._stored[name]


class Responses(BlockAnswer):
    """The answer to one ``POST /v1/responses``, complete or streamed."""

    def __init__(
        self,
        loaded: LoadedChatModel,
        body: ResponsesRequest,
        name: str,
        store: ResponseStore,
        owner: str,
    ) -> None:
        """name: the model's name; owner: who may read the stored response. Raises ``RequestError``
        or ``ApiError`` for an unsupported value of a field."""
        self._body, self._store, self._owner = body, store, owner
        before: list[Message] = []
        if body.previous_response_id is not None:
            param = "previous_response_id"
            stored = store.get(body.previous_response_id, owner, param)
            before = msgspec.json.decode(stored.conversation)
        self._tools = tools_of(body)
        self.left_out = tuple(self._tools.left_out)
        chat = chat_of(body, before, self._tools)
        self._has_logprobs = "message.output_text.logprobs" in (body.include or [])
        if self._has_logprobs or body.top_logprobs:
            self._has_logprobs = chat.logprobs = True
            chat.top_logprobs = body.top_logprobs or 0
        self._messages = [*before, *messages_of(body.input)]
        super().__init__(f"resp_{uuid.uuid4().hex}", ChatGeneration(loaded, chat))
        self._token_names = TokenNames(loaded.tokenizer)
        self._logprobs: list[Json] = []
        self._pending: list[Json] = []  # log-probabilities of tokens whose text has not arrived
        self._num_events = 0
        self._end_status = "completed"  # status of the blocks that end next
        self._ids: dict[int, str] = {}  # item ids by block
        self._inputs: dict[int, InputReader] = {}  # inputs of custom tools, by block
        self.response = _head(self.name, name, body, chat)

    def failure(self, error: BaseException) -> bytes:
        self.response["status"] = "failed"
        message = as_api_error(error).shown
        self.response["error"] = {"code": "server_error", "message": message}
        return named_event(self._event("response.failed", response=self.response))

    def _events(self, output: RequestOutput) -> Iterator[Json]:
        if self._num_events == 0:
            yield self._event("response.created", response=self.response)
            yield self._event("response.in_progress", response=self.response)
        for piece in self._generation.read(output):
            self._counted.add(0, piece.output, [piece.completion])
            new = self._new_logprobs(piece)
            for change in self._blocks.take(piece.events):
                yield from self._change(change, new)
            if piece.completion.finish_reason is not None:
                yield from self._end(piece)

    def _end(self, piece: AnswerPiece) -> Iterator[Json]:
        reason = reason_of(piece.completion)  # raises if the generation ended with an error
        self._end_status = "completed" if reason == "stop" else "incomplete"
        for change in self._blocks.end():
            yield from self._change(change, [])
        response, usage = self.response, self._counted.usage
        is_whole = reason == "stop"
        response["status"] = "completed" if is_whole else "incomplete"
        if is_whole:
            response["completed_at"] = time.time()
        else:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._generation.num_thinking_tokens},
            "total_tokens": usage.total_tokens,
        }
        if self._body.store is not False:
            encoded = msgspec.json.encode(response)
            messages = [*self._messages, *messages_of(response["output"])]
            self._store.put(self.name, encoded, messages, self._owner)
        yield self._event(f"response.{response['status']}", response=response)

    def _change(self, change: BlockChange, logprobs: list[Json]) -> Iterator[Json]:
        block = change.block
        place = {"output_index": block.index, "item_id": self._id(block)}
        if change.what == "begin":
            item = self._item(block, "in_progress")
            yield self._event("response.output_item.added", output_index=block.index, item=item)
            if block.kind != "call":
                part = self._part(block, "", [])
                yield self._event(
                    "response.content_part.added", **place, content_index=0, part=part
                )
            return
        if block.call is not None:
            yield from self._call_change(change, block.call, place)
            return
        what = {"text": "output_text", "thinking": "reasoning_text"}[block.kind]
        place["content_index"] = 0
        extra = {"logprobs": logprobs} if block.kind == "text" else {}
        if change.what == "more":
            yield self._event(f"response.{what}.delta", **place, delta=change.text, **extra)
            return
        yield from self._done(block, what, place)

    def _done(self, block: Block, what: str, place: Json) -> Iterator[Json]:
        item = self._item(block, self._end_status)
        extra = {"logprobs": self._logprobs} if block.kind == "text" else {}
        yield self._event(f"response.{what}.done", **place, text=block.text, **extra)
        yield self._event("response.content_part.done", **place, part=item["content"][0])
        yield from self._item_done(block, item)

    def _call_change(self, change: BlockChange, call: CallBegin, place: Json) -> Iterator[Json]:
        """Yield the events for a tool call's new arguments or end. place: fields of every event."""
        block, reader = change.block, None
        what, new = "function_call_arguments", change.text
        if call.name in self._generation.custom_tools:
            reader = self._inputs.setdefault(block.index, InputReader())
            what = "custom_tool_call_input"
            new = reader.feed(change.text) if change.what == "more" else reader.end()
        if new:
            yield self._event(f"response.{what}.delta", **place, delta=new)
        if change.what == "more":
            return
        item = self._item(block, self._end_status)
        about = {key: item[key] for key in ("arguments", "input", "name") if key in item}
        if reader is not None:
            about.pop("name")
        yield self._event(f"response.{what}.done", **place, **about)
        yield from self._item_done(block, item)

    def _item_done(self, block: Block, item: Json) -> Iterator[Json]:
        self.response["output"].append(item)
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _item(self, block: Block, status: str) -> Json:
        item: Json = {"id": self._id(block), "status": status}
        is_done = status != "in_progress"
        if block.call is not None:
            return {**item, **self._call(block.call, block.text, is_done=is_done)}
        content = [self._part(block, block.text, self._logprobs)] if is_done else []
        if block.kind == "thinking":
            return {"type": "reasoning", **item, "summary": [], "content": content}
        return {"type": "message", **item, "role": "assistant", "content": content}

    def _call(self, call: CallBegin, arguments: str, *, is_done: bool) -> Json:
        called = self._tools.called(call.name)
        about: Json = {"type": "function_call", "call_id": call.id, "name": called.name}
        if called.namespace is not None:
            about["namespace"] = called.namespace
        if call.name in self._generation.custom_tools:
            text = input_of(arguments) if is_done else ""
            return {**about, "type": "custom_tool_call", "input": text}
        return {**about, "arguments": arguments if is_done else ""}

    def _part(self, block: Block, text: str, logprobs: list[Json]) -> Json:
        if block.kind == "thinking":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _id(self, block: Block) -> str:
        prefix = {"thinking": "rs", "text": "msg", "call": "fc"}[block.kind]
        if block.call is not None and block.call.name in self._generation.custom_tools:
            prefix = "ctc"
        return self._ids.setdefault(block.index, f"{prefix}_{uuid.uuid4().hex}")

    def _new_logprobs(self, piece: AnswerPiece) -> list[Json]:
        """Log-probabilities of the tokens of new answer text; empty if there is no new text."""
        new_ones = chat_logprobs(piece.completion, self._body.top_logprobs or 0, self._token_names)
        self._pending += [] if new_ones is None else new_ones["content"]
        if not piece.events:
            return []
        new, self._pending = self._pending, []
        if not any(isinstance(event, Text) for event in piece.events):
            return []
        self._logprobs += new
        return new

    def _event(self, kind: str, **about: Any) -> Json:
        event = {"type": kind, "sequence_number": self._num_events, **about}
        self._num_events += 1
        return event


def _head(name: str, model: str, body: ResponsesRequest, chat: ChatRequest) -> Json:
    """The fields of a response before any output is generated."""
    reasoning = body.reasoning
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "store": body.store is not False,
        "temperature": 1.0 if chat.temperature is None else chat.temperature,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if chat.top_p is None else chat.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }
