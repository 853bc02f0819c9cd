"""LLM: whole lists of prompts at once, results in the order of the prompts."""

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
from engine.frontend.prompt import Prompt, RequestOptions, Submission
from engine.frontend.session import HeldInterrupt
from engine.llm_engine import LLMEngine
from engine.messages.params import SamplingParams
from engine.messages.requests import RequestOutput
from engine.text.chat import Messages
from engine.text.tokenizer import Tokenizer

T = TypeVar("T")


class LLM:
    """A model for offline use.

    ``model`` is a local directory in the Hugging Face layout, or the name of a repository on a hub,
    as "Qwen/Qwen3-0.6B", which is fetched; the model in the box if not given.
    Further options are those of ``EngineArgs``. Raises ``ConfigError`` for what cannot work.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        args = EngineArgs(model=model, **options)
        self.llm_engine = LLMEngine.from_engine_args(args)
        self._counter = itertools.count()
        self._turn = threading.Lock()  # each call steps until its own requests are done

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs stand in the order of the prompts.

        A prompt is a text, a list of token ids, ``{"prompt": ...}`` or ``{"prompt_token_ids":
        ...}`` with options of its own. ``sampling_params`` is one for all or one for each;
        without, ``get_default_sampling_params`` holds. Raises ``RequestError`` before anything is
        computed if a prompt or its parameters are wrong. Requests end with finish reason
        ``"deadline"`` ``timeout`` seconds from now, or after ``queue_timeout`` if they have not
        started. An interrupt stops what was started. Calls from several threads wait for each
        other.
        """
        todo = _as_prompts(prompts)
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _one_each("sampling_params", given, len(todo), SamplingParams)
        ranks = _one_each("priority", 0 if priority is None else priority, len(todo), int)
        options: RequestOptions = {}
        if timeout is not None:
            options["timeout"] = timeout
        if queue_timeout is not None:
            options["queue_timeout"] = queue_timeout
        submissions = self._process(todo, params, [{**options, "priority": rank} for rank in ranks])
        with self._turn:
            return self._run(submissions, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        ``chat_template_kwargs`` are variables of the template. Otherwise like ``generate``.
        """
        self.get_tokenizer()  # or its ConfigError
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            **_template_variables(chat_template_kwargs),
        }
        prompts = self.llm_engine.session.inputs.render(_as_conversations(messages), options)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """What holds without ``sampling_params``: the values that the model's makers recommend
        (``generation_config``), and the defaults of ``SamplingParams`` for the others."""
        return SamplingParams(**self.llm_engine.session.recommended)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ``ConfigError`` if none was loaded."""
        return self.llm_engine.get_tokenizer()

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget all cached prefixes. False, and nothing happens, while requests use them."""
        with self._turn:
            return self.llm_engine.reset_prefix_cache(reset_running)

    def start_profile(self) -> None:
        """Record what the worker does, until ``stop_profile``: give ``torch_profiler_dir``."""
        with self._turn:
            self.llm_engine.start_profile()

    def stop_profile(self) -> list[str]:
        """Write what was recorded; paths of the traces, one or more of each core."""
        with self._turn:
            return self.llm_engine.stop_profile()

    def shutdown(self) -> None:
        """Let go of model and memory; harmless when repeated."""
        self.llm_engine.shutdown()

    def _process(
        self,
        prompts: list[Prompt],
        params: Sequence[SamplingParams],
        options: list[RequestOptions],
    ) -> list[Submission]:
        """Check requests; their texts are tokenised together."""
        inputs = self.llm_engine.session.inputs
        started = inputs.texts.start_all(prompts, params)
        try:
            return [
                inputs.process(str(next(self._counter)), prompt, _only_final(own), option, ids)
                for prompt, own, option, ids in zip(prompts, params, options, started, strict=True)
            ]
        finally:  # after an error the others are not needed
            for ids in started:
                if ids is not None:
                    ids.cancel()

    def _run(self, submissions: list[Submission], use_tqdm: bool) -> list[RequestOutput]:
        session = self.llm_engine.session
        ids = [submission.request_id for submission in submissions]
        finished: dict[str, RequestOutput] = {}
        unfinished = set(ids)
        try:
            for error in session.submit_all(submissions).values():
                raise error
            with _progress(len(ids), use_tqdm) as bar:
                while unfinished:
                    with HeldInterrupt():
                        outputs = session.step()
                    for output in outputs:
                        unfinished.discard(output.request_id)
                        finished[output.request_id] = output
                        if bar is not None:
                            bar.advance(output)
        except BaseException:  # an interrupt too: nothing of this call is left
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
    """One prompt, or many, as a list of prompts. A list of integers is one prompt."""
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
            message = f"chat_template_kwargs has {name!r}, which chat() takes itself"
            raise RequestError(message, param="chat_template_kwargs")
    return values


def _items(name: str, value: object) -> list[Any]:
    """What was given, as a list. Raises ``RequestTypeError`` if it is not several things."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        message = f"{name} is {value!r:.80} ({type(value).__name__}), must be a list"
        raise RequestTypeError(message, param=name)
    return list(value)


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
            message = f"{name} has {item!r:.80}, must have {kind.__name__} only"
            raise RequestTypeError(message, param=name)
    return values


def _only_final(params: SamplingParams) -> SamplingParams:
    """The same, with one output at the end: text that is not shown is not made step by step."""
    return msgspec.structs.replace(params, output_kind="final")


class RequestProgress:
    """Counts finished requests. ``tokens_per_second`` of output is shown next to the bar."""

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
        """A request has finished."""
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
