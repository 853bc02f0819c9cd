"""What a request to the server may hold, and what that means for the engine.

Names and defaults are OpenAI's, further ones vLLM's where they mean the same. A field that is not
here is refused by name.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from engine.config.near import near_value
from engine.frontend.prompt import RequestOptions
from engine.messages.params import GREEDY_BELOW, SamplingParams
from engine.messages.requests import CompletionOutput
from engine.messages.structured import (
    AdditionalProperties,
    ObjectRules,
    PropertyOrder,
    StructuredOutputsParams,
    with_rules,
)
from engine.server.absent import without_absent
from engine.server.diagnosis import read_from
from engine.server.errors import ApiError

MAX_ID_DIGITS = 10  # of a token
HALF = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
"""A surrogate in JSON without the other half."""
FORMS = ("text", "json_object", "json_schema")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream has besides its chunks."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # of no effect: it is never done


class RequestBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every completion may ask. ``None`` is a field that was left out."""

    nothing: ClassVar[dict[str, tuple[Any, ...]]] = {
        "echo": (False,),
        "length_penalty": (1, 1.0),
        "spaces_between_special_tokens": (True,),
        "use_beam_search": (False,),
    }
    """Parameters that the API has and this server has not, and the values that ask for nothing."""

    model: str
    max_tokens: int | None = None
    n: int = 1
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    response_format: dict[str, Any] | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool = False
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    # ours
    timeout: float | None = None
    queue_timeout: float | None = None
    deadline: float | None = None  # seconds from now, a wish
    tbt: float | None = None  # seconds between tokens, a wish
    expected_tokens: int | None = None
    additional_properties: AdditionalProperties | None = None  # of structured outputs and tools
    property_order: PropertyOrder | None = None  # the same
    hints: dict[str, Any] | None = None

    def options(self) -> RequestOptions:
        """Options of the request other than prompt and sampling. Raises ``ApiError``."""
        options: RequestOptions = {}
        for name in OPTIONS:
            if getattr(self, name) is not None:
                options[name] = getattr(self, name)
        if self.deadline is not None:
            options["deadline"] = time.monotonic() + _above_zero("deadline", self.deadline)
        if self.tbt is not None:
            options["tbt"] = _above_zero("tbt", self.tbt)
        hints = dict(self.hints or {})
        if self.expected_tokens is not None:
            hints["output_tokens"] = _above_zero("expected_tokens", self.expected_tokens)
        if hints:
            options["hints"] = hints
        return options

    def fill(self, recommended: Mapping[str, Any]) -> None:
        """Give fields that were left out the values that the model's makers recommend."""
        for name, value in recommended.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def sampling(
        self, *, max_tokens: int | None, logprobs: int | None, echoed: int | None = None
    ) -> SamplingParams:
        """Where all ``n`` texts are the same, the engine makes one (``copies``).

        echoed: log-probabilities of the prompt that are reported with its text. Raises
        ``RequestError`` for a value out of range.
        """
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(
                400,
                f"prompt_logprobs is {self.prompt_logprobs} with stream: leave one of them out",
                param="prompt_logprobs",
            )
        given = {name: value for name in SAMPLED if (value := getattr(self, name)) is not None}
        is_greedy = self.temperature is not None and self.temperature < GREEDY_BELOW
        return SamplingParams(
            **given,
            n=1 if is_greedy and self.n > 1 else self.n,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs if echoed is None else echoed,
            logit_bias=_bias(self.logit_bias),
            output_kind="delta" if self.stream else "final",
            structured_outputs=self._form(),
        )

    @property
    def objects(self) -> ObjectRules:
        """For objects of the JSON schemas that it has."""
        return ObjectRules(self.additional_properties, self.property_order)

    def _form(self) -> StructuredOutputsParams | None:
        """The form of the text, by either name."""
        if self.structured_outputs is not None and self.response_format is not None:
            raise ApiError(
                400,
                "structured_outputs and response_format are both given: leave one of them out",
                param="response_format",
            )
        form: StructuredOutputsParams | None = None
        if self.structured_outputs is not None:
            form = read_from(self.structured_outputs, StructuredOutputsParams, "structured_outputs")
        elif self.response_format is not None:
            form = form_of(self.response_format)
        return None if form is None else with_rules(form, self.objects)


OPTIONS: tuple[Literal["priority", "user", "timeout", "queue_timeout"], ...] = (
    "priority", "user", "timeout", "queue_timeout",
)  # fmt: skip
SAMPLED = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in RequestBody.__struct_fields__
    and name not in ("n", "max_tokens", "prompt_logprobs", "logit_bias", "structured_outputs")
)
"""Fields that the engine takes as they are."""
FORM = ("structured_outputs", "response_format")


def copies(outputs: list[CompletionOutput], num: int) -> list[CompletionOutput]:
    """The ``num`` texts that a client wants: the engine made all of them, or one."""
    if num == 1 or len(outputs) != 1:
        return outputs
    return [msgspec.structs.replace(outputs[0], index=index) for index in range(num)]


class CompletionRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``."""

    called: ClassVar = {
        "grammar": FORM,
        "hints": ("hints", "expected_tokens"),
        "prompt_token_ids": ("prompt",),
        "structured_outputs": FORM,
    }
    """Names of fields here, by those that the engine has for them; of several the one that was
    given is meant."""

    nothing: ClassVar = {**RequestBody.nothing, "add_special_tokens": (True,)}

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None


class WithoutEffect(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """Fields of chat completions that change nothing here: nothing is stored, there is one tier,
    and prefixes are cached anyway."""

    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    verbosity: str | None = None


class ChatRequest(WithoutEffect, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions``."""

    called: ClassVar = {
        "grammar": (*FORM, "tools"),
        "hints": ("hints", "expected_tokens"),
        "logprobs": ("top_logprobs", "logprobs"),
        "max_tokens": ("max_completion_tokens", "max_tokens"),
        "prompt": ("messages",),
        "prompt_token_ids": ("messages",),
        "structured_outputs": (*FORM, "tools"),
    }
    nothing: ClassVar = {
        **RequestBody.nothing,
        "add_special_tokens": (False,),
        "best_of": (1,),
        "function_call": ("auto", "none"),
        "functions": ([],),
        "modalities": ([], ["text"]),
    }

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None  # left out: a server would have to search


T = TypeVar("T", bound=msgspec.Struct)


def read(body: bytes, kind: type[T]) -> T:
    """A request from its JSON. Raises ``ApiError`` that names the field."""
    try:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            given = _untyped(body, error)
        return read_from(without_absent(given, kind), kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _no_json(body, str(error)) from error
    except RecursionError as error:
        raise ApiError(400, "the body has too many levels: nest it less") from error


def _untyped(body: bytes, error: msgspec.ValidationError) -> Any:
    """The body read without a type. Raises ``ApiError`` for a number that no type has, which
    ``error`` has found."""
    try:
        return msgspec.json.decode(body)
    except msgspec.ValidationError:
        message, _, place = str(error).partition(" - at `$")
        field = place.rstrip("`").lstrip(".") or None
        about = f"{field}: {message}" if field else message
        raise ApiError(400, about, param=field, code="invalid_value") from error


def _no_json(body: bytes, why: str) -> ApiError:
    """The error for bytes that are no JSON. It names the field with the wrong value, if known."""
    if not body.strip():
        return ApiError(400, "the body is empty, must be a JSON object")
    half = HALF.search(body)
    if half is not None and ("surrogate" in why or why.endswith("truncated")):
        return ApiError(
            400,
            f"the body has {half[0].decode()}, half of a character: send both halves, or none",
        )
    place = re.search(r"\(byte (\d+)\)", why)
    end = int(place[1]) if place else 0
    field = re.search(rb'"(\w{1,64})"\s*:\s*-?$', body[max(0, end - 100) : end])
    if field is None:
        return ApiError(400, f"the body is no JSON: {why}")
    name = field[1].decode(errors="replace")
    return ApiError(400, f"{name}: {why}; NaN and Infinity are no JSON either", param=name)


N = TypeVar("N", int, float)


def _above_zero(name: str, value: N) -> N:
    if not value > 0:
        raise ApiError(400, f"{name} is {value}, must be above 0", param=name)
    return value


def form_of(response_format: dict[str, Any]) -> StructuredOutputsParams | None:
    """What OpenAI's ``response_format`` asks for. Raises ``ApiError``."""
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    about = response_format.get("json_schema")
    if kind == "json_schema" and isinstance(about, dict) and isinstance(about.get("schema"), dict):
        return StructuredOutputsParams(json=about["schema"])
    near = "" if kind in FORMS else near_value(kind, FORMS)
    raise ApiError(
        400,
        f"response_format is {response_format!r:.80}, must have type text, json_object, or "
        f"json_schema with json_schema.schema{near}",
        param="response_format",
    )


def _bias(body: dict[str, float] | None) -> dict[int, float] | None:
    if body is None:
        return None
    wrong = [token for token in body if not token.isdecimal() or len(token) > MAX_ID_DIGITS]
    if wrong:
        raise ApiError(
            400, f"logit_bias has {wrong[0]!r:.40}, must have token ids", param="logit_bias"
        )
    return {int(token): bias for token, bias in body.items()}
