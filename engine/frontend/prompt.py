"""Checks a user's request and builds ``AddRequest`` messages for the core."""

from __future__ import annotations

import itertools
import logging
import types
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

import msgspec

from engine.config.near import did_you_mean
from engine.config.pooling.spec import PoolingSpec
from engine.errors import (
    RequestError,
    RequestTypeError,
)
from engine.frontend.chats import render_chats
from engine.frontend.encoding import (
    PROMPT_KEYS,
    Prompt,
    PromptEncoder,
    StartedIds,
    TextPrompt,
    has_media,
    too_long,
)
from engine.frontend.pooling import UNSAMPLED, PooledTexts
from engine.frontend.text_workers import TextPool
from engine.messages.adapters import AdapterSource, LoRARequest
from engine.messages.finite import check_finite
from engine.messages.params import SamplingParams, check_params_for_vocab, is_finite
from engine.messages.pooling import PoolingParams
from engine.messages.requests import AddRequest
from engine.messages.structured import NO_RULES, ObjectRules, grammar_of
from engine.pictures.chat import taken
from engine.pictures.errors import NOT_READ, refused
from engine.text.chat import Messages
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.pictures.opening import Picture  # imports Pillow
    from engine.pictures.prompts import Pictures, SeeingPrompt  # import it and transformers

logger = logging.getLogger(__name__)
T = TypeVar("T")
NOT_TEXTS = ("prompt_token_ids", "multi_modal_data")  # keys of a prompt
SHOWN_ID_CHARS = 64  # characters of a user's request id that its core id contains


class RequestOptions(TypedDict, total=False):
    """Options of a request other than prompt and sampling parameters."""

    priority: int
    """Lower values run first; read by scheduling_policy="priority"."""
    user: str
    """The user that fair policies charge the request to."""
    arrival_time: float
    """Seconds on the engine's clock (time.monotonic); default: now."""
    deadline: float
    """Seconds on the engine's clock; read by deadline policies only."""
    tbt: float
    """Target seconds between output tokens; read by policies that pace tokens."""
    timeout: float
    """Seconds after arrival at which the request ends, with finish reason "deadline"."""
    queue_timeout: float
    """Seconds after arrival at which the request ends if it has not started."""
    hints: dict[str, Any]
    """Passed to the policy unchanged."""
    kv_transfer_params: dict[str, Any] | None
    """With KV blocks kept outside the pool: ``max_load_tokens``, the most tokens whose KV is loaded
    for the request; ``store``, False to keep the blocks that it computes out of all stores;
    ``await_blocks``, seconds to wait until stores have the blocks of its prompt."""
    lora_request: LoRARequest | None
    """The LoRA adapter to use; it is loaded if it is not."""
    adapter: str
    """Name of a loaded LoRA adapter, in place of ``lora_request``."""


class Submission(NamedTuple):
    """A checked request: its prompt and parameters, one ``AddRequest`` for each of n sequences,
    and its pictures by hash, which are not decoded yet."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    requests: list[AddRequest]
    pictures: Mapping[str, Picture] = types.MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """Limits that the loaded model sets for a request."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    """Token ids that end text, from config, generation config and tokenizer."""
    scheduling_policy: str
    seed: int
    object_rules: ObjectRules = NO_RULES
    """The engine's defaults for JSON objects in schemas, which a request may override."""
    has_adapters: bool = False
    """Whether requests may use LoRA adapters."""
    pooling: PoolingSpec | None = None
    """How the model pools, if it does and its directory is known."""


class InputProcessor:
    """Checks prompts and parameters and turns them into messages for the core."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: ModelLimits,
        clock: Callable[[], float],
        id_prefix: str = "",
        pool: TextPool | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        """pictures: puts pictures into prompts, if the model sees."""
        self.texts = PromptEncoder(tokenizer, pool, limits.max_model_len)
        self.pooled = PooledTexts(limits.pooling, tokenizer, limits.max_model_len)
        self._tokenizer = tokenizer
        self._pool = pool
        self.pictures = pictures
        self._limits = limits
        self._clock = clock
        self._id_prefix = id_prefix  # of core ids
        self._counter = itertools.count()
        self._num_sequences = itertools.count()
        self._warned_of_priority = False

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None,
        options: RequestOptions,
        started: StartedIds = None,
    ) -> Submission:
        """Check a request and build its messages. Raises ``RequestError``.

        ``started``: the result of ``PromptEncoder.start`` for the prompt, if it was called."""
        if isinstance(params, PoolingParams):
            return self.process_pooled(request_id, prompt, params, options, started)
        _check_request_id(request_id)
        arrival_time = self._arrival(options)
        params = _own_params(params)
        parts = self._parts(prompt)
        num_kept, most = params.truncate_prompt_tokens, self._limits.max_model_len - 1
        if num_kept is not None and num_kept < 0:
            num_kept = most
        token_ids = self._token_ids(parts, None if num_kept is not None else most, started)
        seen = self._seen(parts, token_ids, num_kept)
        if seen is not None:
            token_ids = seen.token_ids
        elif num_kept is not None:
            token_ids = _last(token_ids, num_kept)
        self._check_ids(parts, token_ids, num_output=1)
        self._check_params(params)
        grammar = self._grammar(params)
        first = msgspec.structs.replace(
            self._request(request_id, parts, token_ids, options, arrival_time),
            params=params if grammar is None else _without_schema(params),
            seed=self._seed(params),
            max_tokens=self._max_tokens(params, len(token_ids)),
            eos_token_ids=[] if params.ignore_eos else list(self._limits.eos_token_ids),
            bad_words_ids=self._bad_words_ids(params),
            grammar=grammar,
            media=[] if seen is None else seen.media,
        )
        requests = [self._sequence(first, index) for index in range(params.n)]
        pictures = {} if seen is None else seen.opened
        return Submission(
            request_id, parts.get("prompt"), token_ids, params, arrival_time, requests, pictures
        )

    def token_ids(self, prompt: TextPrompt) -> list[int]:
        """The token ids of a prompt that has them, with those of its pictures. Raises
        ``RequestError`` for pictures that cannot be read, and not for too many tokens."""
        seen = self._seen(prompt, prompt["prompt_token_ids"], None)
        return prompt["prompt_token_ids"] if seen is None else seen.token_ids

    def process_pooled(
        self,
        request_id: str,
        prompt: Prompt,
        params: PoolingParams,
        options: RequestOptions,
        started: StartedIds = None,
    ) -> Submission:
        """Check a pooled request and build its message. Its prompt may have ``max_model_len``
        tokens, since no output token follows. Otherwise like ``process``."""
        _check_request_id(request_id)
        arrival_time = self._arrival(options)
        params = self.pooled.resolved(params)
        parts = self._parts(prompt)
        if has_media(parts):
            raise RequestError(
                "multi_modal_data is given, and pooled requests take no pictures: leave it out",
                param="multi_modal_data",
            )
        num_kept = params.truncate_prompt_tokens
        most = None if num_kept is not None else self._limits.max_model_len
        token_ids = self._token_ids(parts, most, started)
        if num_kept is not None:
            token_ids = self.pooled.cut(token_ids, num_kept)
        self._check_ids(parts, token_ids, num_output=0)
        request = self._request(request_id, parts, token_ids, options, arrival_time)
        pooling = msgspec.structs.replace(params, truncate_prompt_tokens=None)
        request = self._sequence(msgspec.structs.replace(request, pooling=pooling), 0)
        return Submission(
            request_id, parts.get("prompt"), token_ids, UNSAMPLED, arrival_time, [request]
        )

    def process_together(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        params: Sequence[PoolingParams],
        options: RequestOptions,
    ) -> list[Submission]:
        """Check several pooled requests, whose ids are ``request_id`` with the index, and tokenise
        their texts in one batch. Sets ``index`` of the ``RequestError`` that it raises."""
        started = self.texts.start_all(prompts, params)
        submissions = []
        for index, (prompt, own, ids) in enumerate(zip(prompts, params, started, strict=True)):
            name = f"{request_id}-{index}"
            try:
                submissions.append(self.process_pooled(name, prompt, own, options, ids))
            except RequestError as error:
                error.index = index
                raise
        return submissions

    def _request(
        self,
        request_id: str,
        parts: TextPrompt,
        token_ids: list[int],
        options: RequestOptions,
        arrival_time: float,
    ) -> AddRequest:
        """The message for a request, without anything that concerns sampling."""
        adapter, source = self._adapter(options)
        return AddRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=UNSAMPLED,
            seed=0,
            arrival_time=arrival_time,
            max_tokens=1,
            priority=options.get("priority", 0),
            user=options.get("user", ""),
            deadline=options.get("deadline"),
            cache_salt=parts.get("cache_salt"),
            hints=options.get("hints"),
            kv_transfer_params=options.get("kv_transfer_params"),
            queue_deadline=_seconds_after(arrival_time, options.get("queue_timeout")),
            end_deadline=_seconds_after(arrival_time, options.get("timeout")),
            tbt=options.get("tbt"),
            adapter=adapter,
            adapter_source=source,
        )

    @property
    def object_rules(self) -> ObjectRules:
        """The engine's defaults for JSON objects in schemas, which a request may override."""
        return self._limits.object_rules

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and output together."""
        return self._limits.max_model_len

    def render(
        self, conversations: Iterable[Messages], options: dict[str, Any]
    ) -> list[TextPrompt]:
        """Render conversations to prompts with the chat template. ``options``: as for
        ``apply_chat_template``. Raises the ``RequestError`` of the first conversation that
        fails."""
        assert self._tokenizer is not None
        chats, pictures = [], []
        for messages in conversations:
            chat, found = taken(messages)
            chats.append(chat)
            pictures.append(found)
        prompts: list[TextPrompt] = []
        rendered = render_chats(self._tokenizer, self._pool, chats, options)
        for (text, token_ids), found in zip(rendered, pictures, strict=True):
            prompt: TextPrompt = {"prompt": text, "prompt_token_ids": token_ids}
            if found:
                prompt["multi_modal_data"] = {"image": found}
            prompts.append(prompt)
        return prompts

    def _grammar(self, params: SamplingParams) -> str | None:
        """The grammar for ``structured_outputs``, as a text for the core; ``None`` if not
        requested."""
        if params.structured_outputs is None:
            return None
        if self._tokenizer is None:
            raise RequestError(
                "structured_outputs needs a tokenizer, and the engine has none "
                "(skip_tokenizer_init): start it without skip_tokenizer_init",
                param="structured_outputs",
            )
        if not self._limits.eos_token_ids:
            raise RequestError(
                "structured_outputs needs an end-of-text token, and neither the model's "
                "configuration nor its tokenizer has one: set eos_token_id in config.json",
                param="structured_outputs",
            )
        grammar = grammar_of(params.structured_outputs, self.object_rules)
        check_finite(grammar)
        return grammar

    def _adapter(self, options: RequestOptions) -> tuple[str | None, AdapterSource | None]:
        """The name of the request's LoRA adapter, and where a core finds it."""
        name, request = options.get("adapter"), options.get("lora_request")
        if name is None and request is None:
            return None, None
        if not self._limits.has_adapters:
            raise RequestError(
                "the request names a LoRA adapter, and the engine was started without: start it "
                "with enable_lora=True",
                param="adapter" if request is None else "lora_request",
            )
        if request is None:
            return name, None
        if name is not None:
            raise RequestError(
                f"adapter is {name!r:.80} and lora_request is given: give only one of them",
                param="adapter",
            )
        replaces = request.load_inplace and request.tensors is None
        source = AdapterSource(request.lora_path, request.lora_int_id, replaces)
        return request.lora_name, source

    def _parts(self, prompt: Prompt) -> TextPrompt:
        if isinstance(prompt, str):
            return {"prompt": prompt}
        if isinstance(prompt, list):
            return {"prompt_token_ids": prompt}
        if not isinstance(prompt, Mapping):
            raise RequestTypeError(
                "prompt must be a str, a list of token ids, or a dict with 'prompt' or "
                f"'prompt_token_ids', got {type(prompt).__name__}",
                param="prompt",
            )
        unknown = prompt.keys() - PROMPT_KEYS
        if unknown or not prompt.keys() & {"prompt", "prompt_token_ids"}:
            raise RequestError(
                "a prompt dict must have 'prompt' or 'prompt_token_ids' and may have 'cache_salt' "
                f"and 'multi_modal_data', got the keys {sorted(map(str, prompt))}",
                param="prompt",
            )
        for key, value in prompt.items():
            if key not in NOT_TEXTS and not isinstance(value, str | None):
                raise RequestTypeError(f"{key} must be a str, got {value!r:.80}", param=key)
        return prompt

    def _token_ids(self, parts: TextPrompt, most: int | None, started: StartedIds) -> list[int]:
        """The token ids of a prompt. most: as for ``PromptEncoder.encode``."""
        ids = parts.get("prompt_token_ids")
        if ids is not None:
            return _whole_numbers(ids)
        return self.texts.encode(parts["prompt"], most, started)

    def _seen(
        self, parts: TextPrompt, token_ids: list[int], num_kept: int | None
    ) -> SeeingPrompt | None:
        """The prompt with its pictures; ``None`` if it has no ``multi_modal_data``."""
        data = parts.get("multi_modal_data")
        if data is None:
            return None
        if self.pictures is None:
            raise refused(f"multi_modal_data is given, and {NOT_READ}")
        if num_kept is not None:
            raise RequestError(
                f"truncate_prompt_tokens is {num_kept}, and a prompt with pictures cannot be cut: "
                "leave truncate_prompt_tokens out, and shorten the prompt",
                param="truncate_prompt_tokens",
            )
        return self.pictures.into(token_ids, data)

    def _check_ids(self, parts: TextPrompt, token_ids: list[int], *, num_output: int) -> None:
        """Raise ``RequestError`` for ids that the model does not have, or for too many or none.
        num_output: tokens that must fit after them."""
        limit, vocab_size = self._limits.max_model_len, self._limits.vocab_size
        if not token_ids:
            message = "the prompt is empty; it must have at least one token"
            raise RequestError(message, param="prompt")
        if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
            raise RequestError(
                f"token id {wrong} is not in the model's vocabulary; ids are 0..{vocab_size - 1}",
                param="prompt" if parts.get("prompt_token_ids") is None else "prompt_token_ids",
            )
        if len(token_ids) + num_output > limit:
            raise too_long(
                f"{len(token_ids)} tokens", limit, num_output, has_pictures=has_media(parts)
            )

    def _check_params(self, params: SamplingParams) -> None:
        check_params_for_vocab(params, self._limits.vocab_size)
        if self._tokenizer is not None:
            return
        for name in ("stop", "bad_words"):
            if getattr(params, name):
                raise RequestError(
                    f"{name}={getattr(params, name)!r} needs a tokenizer, and the engine has none "
                    "(skip_tokenizer_init); use stop_token_ids or logit_bias with ids",
                    param=name,
                )

    def _arrival(self, options: RequestOptions) -> float:
        """Check the options of a request and return its arrival time, which is now by default."""
        self._check_options(options)
        now, requested = self._clock(), options.get("arrival_time")
        if requested is None:
            return now
        if requested > now:
            raise RequestError(
                f"arrival_time is {requested!r:.80}, which is in the future: the engine's clock "
                f"(time.monotonic, not time.time) is at {now:.3f}; leave arrival_time out",
                param="arrival_time",
            )
        return requested

    def _check_options(self, options: RequestOptions) -> None:
        unknown = options.keys() - RequestOptions.__annotations__.keys()
        if unknown:
            name, known = min(unknown), RequestOptions.__annotations__
            near = did_you_mean(name, known) or f"; there are: {', '.join(known)}"
            message = f"unknown option {name!r} of a request{near}"
            raise RequestError(message, param=name, code="unknown_parameter")
        check_option_types(options)
        is_ignored = options.get("priority") and self._limits.scheduling_policy == "fcfs"
        if is_ignored and not self._warned_of_priority:
            self._warned_of_priority = True
            logger.warning(
                "priority %s is ignored by policy 'fcfs'; use scheduling_policy='priority'",
                options["priority"],
            )

    def _max_tokens(self, params: SamplingParams, num_prompt: int) -> int:
        left = self._limits.max_model_len - num_prompt
        return left if params.max_tokens is None else min(params.max_tokens, left)

    def _seed(self, params: SamplingParams) -> int:
        number = next(self._counter)
        return derive_seed(self._limits.seed, number) if params.seed is None else params.seed

    def _sequence(self, request: AddRequest, index: int) -> AddRequest:
        """Make the message for one of a request's n sequences, with a seed and core id of its own.

        Each core id is used once, so that late outputs of an aborted sequence reach no other
        request. The id contains the user's request id for logs."""
        number = next(self._num_sequences)
        return msgspec.structs.replace(
            request,
            request_id=f"{self._id_prefix}{number}/{request.request_id[:SHOWN_ID_CHARS]}",
            seed=derive_seed(request.seed, index) if request.params.n > 1 else request.seed,
        )

    def _bad_words_ids(self, params: SamplingParams) -> list[list[int]]:
        """Token ids of each bad word, once as the start of a text and once after a space."""
        if self._tokenizer is None:
            return []
        found = []
        for word in params.bad_words:
            for text in (word.lstrip(), " " + word.lstrip()):
                try:
                    ids = self._tokenizer.encode(text, add_special_tokens=False)
                except RequestError as error:
                    error.param = "bad_words"
                    raise
                if ids and ids not in found:
                    found.append(ids)
        return found


OPTION_KINDS: dict[str, tuple[type | types.UnionType, str]] = {
    "priority": (int, "a whole number of 64 bits"),
    "user": (str, "a str"),
    "arrival_time": (int | float | None, "a finite number of seconds"),
    "deadline": (int | float | None, "a finite number of seconds"),
    "tbt": (int | float | None, "a finite number of seconds above 0"),
    "timeout": (int | float | None, "a finite number of seconds above 0"),
    "queue_timeout": (int | float | None, "a finite number of seconds above 0"),
    "hints": (dict | None, "a dict"),
    "kv_transfer_params": (dict | None, "a dict"),
    "lora_request": (LoRARequest | None, "a LoRARequest"),
    "adapter": (str, "a str"),
}


def check_option_types(options: RequestOptions) -> None:
    """Raise ``RequestError`` for an option of a wrong type or out of range, before it reaches a
    policy in the core."""
    for name, value in options.items():
        kind, wanted = OPTION_KINDS[name]
        is_wrong = isinstance(value, int | float) and not is_finite(value)
        if is_wrong or not isinstance(value, kind):
            raise RequestTypeError(f"{name} is {value!r:.80}, must be {wanted}", param=name)
    priority = options.get("priority", 0)
    if not -(2**63) <= priority < 2**63:
        message = f"priority is {priority}, must be {OPTION_KINDS['priority'][1]}"
        raise RequestError(message, param="priority")
    for name in ("timeout", "queue_timeout", "tbt"):
        seconds = options.get(name)
        if isinstance(seconds, int | float) and seconds <= 0:
            message = f"{name} is {seconds!r:.80}, must be {OPTION_KINDS[name][1]}"
            raise RequestError(message, param=name)


def _seconds_after(arrival_time: float, seconds: float | None) -> float | None:
    return None if seconds is None else arrival_time + seconds


def _own_params(params: SamplingParams | None) -> SamplingParams:
    """A checked copy of the parameters, since the caller may change the object later."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        message = f"params must be SamplingParams, got {type(params).__name__}"
        raise RequestTypeError(message, param="params")
    return msgspec.structs.replace(params)


def _last(token_ids: list[int], count: int) -> list[int]:
    """The last ``count`` tokens."""
    return token_ids[max(0, len(token_ids) - count) :]


def _whole_numbers(ids: list[int]) -> list[int]:
    try:
        return array("q", ids).tolist()
    except (TypeError, OverflowError) as error:
        items = ids if isinstance(ids, Iterable) else ()
        wrong = next((i for i in items if not isinstance(i, int)), ids)
        message = f"prompt_token_ids must be integers, got {wrong!r:.80}"
        raise RequestTypeError(message, param="prompt_token_ids") from error


def _check_request_id(request_id: object) -> None:
    if not isinstance(request_id, str):
        raise RequestTypeError(
            f"request_id must be a str, got {type(request_id).__name__}: {request_id!r}",
            param="request_id",
        )


def derive_seed(seed: int, number: int) -> int:
    """A pseudo-random seed below 2**63, derived from a seed and a number."""
    digest = blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _without_schema(params: SamplingParams) -> SamplingParams:
    """The parameters without ``structured_outputs``: the core gets a grammar instead."""
    return msgspec.structs.replace(params, structured_outputs=None)
