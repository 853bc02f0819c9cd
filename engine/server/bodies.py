"""Bodies of completions and chat completions, and the engine parameters that they mean.

Names and defaults are OpenAI's, and vLLM's for fields that OpenAI does not have. A field that is
not listed here is refused by name.
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
from engine.server.callers import charged_user
from engine.server.diagnosis import read_from
from engine.server.errors import ApiError, field_error

MAX_ID_DIGITS = 10  # of a token id
HALF = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
"""An escaped UTF-16 surrogate without its other half."""
FORMS = ("text", "json_object", "json_schema")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # no effect: streams are never obfuscated


class QueuedBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of all requests that a core computes, for its queue and its policy."""

    user: str | None = None
    # vLLM's
    priority: int | None = None
    cache_salt: str | None = None
    # ours
    timeout: float | None = None
    queue_timeout: float | None = None
    deadline: float | None = None  # seconds from now; a goal for the policy
    hints: dict[str, Any] | None = None

    def options(self) -> RequestOptions:
        """The engine's options for the request besides prompt and parameters. Raises
        ``ApiError``."""
        options: RequestOptions = {}
        user = charged_user(self.user)
        if user is not None:
            options["user"] = user
        for name in OPTIONS:
            if getattr(self, name) is not None:
                options[name] = getattr(self, name)
        if adapter := getattr(self, "model", None):  # the server leaves only names of adapters
            options["adapter"] = adapter
        if self.deadline is not None:
            options["deadline"] = time.monotonic() + _above_zero("deadline", self.deadline)
        if self.hints:
            options["hints"] = dict(self.hints)
        return options


class RequestBody(QueuedBody, kw_only=True, forbid_unknown_fields=True):
    """Fields of both completions and chat completions. ``None``: the client left the field out."""

    no_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        "echo": (False,),
        "length_penalty": (1, 1.0),
        "spaces_between_special_tokens": (True,),
        "use_beam_search": (False,),
    }
    """Fields of the API that this server does not have, and their values without an effect."""

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
    return_token_ids: bool = False
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    # ours
    tbt: float | None = None  # seconds between tokens; a goal for the policy
    expected_tokens: int | None = None
    additional_properties: AdditionalProperties | None = None  # for structured outputs and tools
    property_order: PropertyOrder | None = None  # for structured outputs and tools

    def options(self) -> RequestOptions:
        """The engine's options for the request besides prompt and sampling. Raises ``ApiError``."""
        options = super().options()
        if self.kv_transfer_params:
            options["kv_transfer_params"] = dict(self.kv_transfer_params)
        if self.tbt is not None:
            options["tbt"] = _above_zero("tbt", self.tbt)
        if self.expected_tokens is not None:
            num_tokens = _above_zero("expected_tokens", self.expected_tokens)
            options["hints"] = {**options.get("hints", {}), "output_tokens": num_tokens}
        return options

    def fill(self, recommended: Mapping[str, Any]) -> None:
        """Set fields that were left out to values of the model's ``generation_config.json``."""
        for name, value in recommended.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def sampling(
        self, *, max_tokens: int | None, logprobs: int | None, echoed: int | None = None
    ) -> SamplingParams:
        """The sampling parameters. Greedy sampling would generate ``n`` equal texts, so it
        generates one, which ``copies`` repeats.

        echoed: number of log-probabilities per prompt token, if the prompt is echoed with them.
        Raises ``RequestError`` for a value out of range."""
        if self.prompt_logprobs is not None and self.stream:
            raise field_error(
                "prompt_logprobs",
                f"is {self.prompt_logprobs} with stream, which are not supported "
                "together: leave one of them out",
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
            structured_outputs=self._structured_outputs(),
        )

    @property
    def objects(self) -> ObjectRules:
        """Rules for JSON objects in the schemas of this request."""
        return ObjectRules(self.additional_properties, self.property_order)

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        """The value of ``structured_outputs`` or ``response_format``. Raises ``ApiError``."""
        if self.structured_outputs is not None and self.response_format is not None:
            raise field_error(
                "response_format", "and structured_outputs are both given: leave one of them out"
            )
        found: StructuredOutputsParams | None = None
        if self.structured_outputs is not None:
            given = self.structured_outputs
            found = read_from(given, StructuredOutputsParams, "structured_outputs")
        elif self.response_format is not None:
            found = structured_outputs_of(self.response_format)
        return None if found is None else with_rules(found, self.objects)


OPTIONS: tuple[Literal["priority", "timeout", "queue_timeout"], ...] = (
    "priority", "timeout", "queue_timeout",
)  # fmt: skip
SAMPLED = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in RequestBody.__struct_fields__
    and name not in ("n", "max_tokens", "prompt_logprobs", "logit_bias", "structured_outputs")
)
"""Fields that are passed to ``SamplingParams`` unchanged."""
OUTPUT_FIELDS = ("structured_outputs", "response_format")


def copies(outputs: list[CompletionOutput], num: int) -> list[CompletionOutput]:
    """Return the ``num`` sequences of an answer; if only one was generated, repeat it."""
    if num == 1 or len(outputs) != 1:
        return outputs
    return [msgspec.structs.replace(outputs[0], index=index) for index in range(num)]


class CompletionRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/completions``."""

    client_names: ClassVar = {
        "grammar": OUTPUT_FIELDS,
        "hints": ("hints", "expected_tokens"),
        "prompt_token_ids": ("prompt",),
        "structured_outputs": OUTPUT_FIELDS,
    }
    """This API's names of a field, by the engine's name (see ``blame``)."""

    no_effect: ClassVar = {**RequestBody.no_effect, "add_special_tokens": (True,)}

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None


class WithoutEffect(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """Chat completion fields that are accepted without effect: answers are not stored, there is one
    service tier, and prefixes are always cached."""

    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    verbosity: str | None = None


class ChatRequest(WithoutEffect, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/chat/completions``."""

    client_names: ClassVar = {
        "grammar": (*OUTPUT_FIELDS, "tools"),
        "hints": ("hints", "expected_tokens"),
        "logprobs": ("top_logprobs", "logprobs"),
        "max_tokens": ("max_completion_tokens", "max_tokens"),
        "multi_modal_data": ("messages",),
        "prompt": ("messages",),
        "prompt_token_ids": ("messages",),
        "structured_outputs": (*OUTPUT_FIELDS, "tools"),
    }
    no_effect: ClassVar = {
        **RequestBody.no_effect,
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
    web_search_options: dict[str, Any] | None = None  # left out: the server cannot search


T = TypeVar("T", bound=msgspec.Struct)


def read(body: bytes, kind: type[T]) -> T:
    """Decode the body of a request from JSON. Raises ``ApiError`` that names the wrong field."""
    try:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            given = _untyped(body, error)
        return read_from(without_absent(given, kind), kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _no_json(body, str(error)) from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply: use fewer levels") from error


def _untyped(body: bytes, error: msgspec.ValidationError) -> Any:
    """Decode the body as any JSON. If that fails too, e.g. because a number is too large, raise an
    ``ApiError`` with the message of ``error``."""
    try:
        return msgspec.json.decode(body)
    except msgspec.ValidationError:
        message, _, place = str(error).partition(" - at `$")
        field = place.rstrip("`").lstrip(".") or None
        about = f"{field}: {message}" if field else message
        raise ApiError(400, about, param=field, code="invalid_value") from error


def _no_json(body: bytes, why: str) -> ApiError:
    """The error for a body that is not valid JSON, with the name of the field if it is known."""
    if not body.strip():
        return ApiError(400, "the body is empty, must be a JSON object")
    half = HALF.search(body)
    if half is not None and ("surrogate" in why or why.endswith("truncated")):
        return ApiError(
            400,
            f"the body has {half[0].decode()}, which is half of a surrogate pair: send both halves",
        )
    place = re.search(r"\(byte (\d+)\)", why)
    end = int(place[1]) if place else 0
    field = re.search(rb'"(\w{1,64})"\s*:\s*-?$', body[max(0, end - 100) : end])
    if field is None:
        return ApiError(400, f"the body is not valid JSON: {why}")
    name = field[1].decode(errors="replace")
    return ApiError(400, f"{name}: {why}; NaN and Infinity are not valid JSON", param=name)


N = TypeVar("N", int, float)


def _above_zero(name: str, value: N) -> N:
    if not value > 0:
        raise field_error(name, f"is {value}, must be above 0")
    return value


def structured_outputs_of(response_format: dict[str, Any]) -> StructuredOutputsParams | None:
    """Convert OpenAI's ``response_format``; ``None`` for plain text. Raises ``ApiError``."""
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    about = response_format.get("json_schema")
    if kind == "json_schema" and isinstance(about, dict) and isinstance(about.get("schema"), dict):
        return StructuredOutputsParams(json=about["schema"])
    near = "" if kind in FORMS else near_value(kind, FORMS)
    raise field_error(
        "response_format",
        f"is {response_format!r:.80}, must have type text, json_object, or "
        f"json_schema with json_schema.schema{near}",
    )


def _bias(body: dict[str, float] | None) -> dict[int, float] | None:
    if body is None:
        return None
    wrong = [token for token in body if not token.isdecimal() or len(token) > MAX_ID_DIGITS]
    if wrong:
        raise field_error(
            "logit_bias", f"has the key {wrong[0]!r:.40}, must have token ids as keys"
        )
    return {int(token): bias for token, bias in body.items()}
