"""Pooled requests in the front end: texts with prompts, truncation, checks, results for users."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec.structs import replace

from engine.config.near import did_you_mean
from engine.config.pooling.spec import PoolingSpec
from engine.errors import RequestError, RequestTypeError
from engine.frontend.encoding import Prompt
from engine.messages.params import SamplingParams
from engine.messages.pooling import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    R,
)
from engine.messages.requests import RequestOutput
from engine.messages.vectors import Vectors
from engine.text.pairs import encode_pairs

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.text.tokenizer import Tokenizer

UNSAMPLED = SamplingParams(max_tokens=1, detokenize=False, output_kind="final")
"""Sampling parameters in the place of those of a pooled request, which samples nothing."""


class PooledTexts:
    """Prepares the texts of pooled requests as the model's directory says."""

    def __init__(
        self, spec: PoolingSpec | None, tokenizer: Tokenizer | None, max_model_len: int
    ) -> None:
        """spec: ``None`` if the model's directory is not here; its prompts are then unknown."""
        self.spec = spec
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    def resolved(self, params: PoolingParams) -> PoolingParams:
        """The parameters with the values that the model's directory has for what they leave open:
        the task, and after how many tokens a prompt is cut.

        Raises ``RequestError`` for a task or a number of dimensions that the model does not
        have."""
        task, spec = params.task, self.spec
        if spec is not None:
            task = task or spec.task
            if task not in spec.tasks:
                raise RequestError(
                    f"task is {task!r}, must be one of: {', '.join(spec.tasks)}; set convert to "
                    "use the model for another one",
                    param="task",
                )
            if params.dimensions is not None:
                self._check_dimensions(spec, params.dimensions, is_embedding="embed" in task)
        return replace(params, task=task, truncate_prompt_tokens=self._num_kept(params))

    def with_prompts(self, given: Sequence[Prompt], name: str | None = None) -> list[Prompt]:
        """The inputs with the model's prompt ``name`` in front of each text; ``None``: its default
        prompt, if it has one. Inputs of token ids stay as they are.

        Raises ``RequestError`` for an unknown name, or a name for token ids."""
        prefix = self._prompt(name)
        if not prefix and name is None:
            return list(given)
        return [self._with_prefix(each, prefix, name) for each in given]

    def prompt_name(self, role: str) -> str | None:
        """The name of the model's prompt for a ``"query"`` or a ``"document"``, if it has one."""
        names = ROLES[role]
        return next((name for name in names if self.spec and name in self.spec.prompts), None)

    def pairs(
        self, pairs: Sequence[tuple[str, str]], params: PoolingParams
    ) -> tuple[list[Prompt], list[PoolingParams]]:
        """Tokenise pairs of texts for a cross-encoder, each to one prompt. Returns the prompts and
        their parameters. params: as ``resolved`` returns them."""
        if self._tokenizer is None or self.spec is None:
            raise RequestError(
                "texts cannot be compared: the engine has no tokenizer (skip_tokenizer_init)"
            )
        encoded = encode_pairs(self._tokenizer, self.spec, pairs, params.truncate_prompt_tokens)
        prompts: list[Prompt] = [each.token_ids for each in encoded]
        return prompts, [replace(params, second_text_start=each.second) for each in encoded]

    def counted(self, text: Prompt, params: PoolingParams) -> tuple[list[int], list[int]]:
        """Tokenise a document for late interaction. Returns its tokens, and which of their vectors
        count in scores. params: as ``resolved`` returns them."""
        assert self._tokenizer is not None and isinstance(text, str)
        ids, kept = self._tokenizer.encode(text), params.truncate_prompt_tokens
        ids = ids if kept is None else self.cut(ids, kept)
        return ids, [place for place, each in enumerate(ids) if each not in self._skipped]

    @cached_property
    def _skipped(self) -> frozenset[int | None]:
        """The tokens of documents that are left out of scores."""
        assert self._tokenizer is not None and self.spec is not None
        return frozenset(map(self._tokenizer.backend.token_id, self.spec.skipped_tokens))

    def cut(self, token_ids: list[int], num_kept: int) -> list[int]:
        """Keep ``num_kept`` tokens of a prompt. Special tokens that the tokenizer adds at the
        beginning and the end of each text stay there."""
        if len(token_ids) <= num_kept:
            return token_ids
        begin, end = self._special_ends
        num_text = num_kept - len(begin) - len(end)
        last = len(token_ids) - len(end)
        if self._tokenizer is None or num_text < 1:
            return token_ids[:num_kept]
        if token_ids[: len(begin)] != begin or token_ids[last:] != end:
            return self._tokenizer.cut(token_ids, num_kept)
        return begin + self._tokenizer.cut(token_ids[len(begin) : last], num_text) + end

    @cached_property
    def _special_ends(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer adds at the beginning and the end of each text."""
        if self._tokenizer is None:
            return [], []
        plain = self._tokenizer.encode("a", add_special_tokens=False)
        whole = self._tokenizer.encode("a")
        for begin in range(len(whole) - len(plain) + 1):
            end = begin + len(plain)
            if whole[begin:end] == plain:
                return whole[:begin], whole[end:]
        return [], []

    def _num_kept(self, params: PoolingParams) -> int | None:
        """After how many tokens a prompt is cut; ``None``: a longer one than fits is refused."""
        most = None if self.spec is None else self.spec.max_seq_length
        kept = params.truncate_prompt_tokens
        if kept is None:
            return most
        if kept < 0:
            kept = self._max_model_len
        return kept if most is None else min(kept, most)

    def _check_dimensions(self, spec: PoolingSpec, wanted: int, *, is_embedding: bool) -> None:
        sizes, width = spec.matryoshka_dimensions, spec.width
        if not is_embedding:
            why = "and the result is no embedding: leave it out"
        elif wanted == width or (spec.is_matryoshka and (wanted in sizes or not sizes)):
            why = "" if wanted <= width else f"must be at most {width}, which the model has"
        elif spec.is_matryoshka:
            why = f"must be one of: {', '.join(map(str, sizes))}"
        else:
            why = f"and the model was not trained for fewer than {width}: leave it out"
        if why:
            raise RequestError(f"dimensions is {wanted}, {why}", param="dimensions")

    def _prompt(self, name: str | None) -> str:
        """The text of a prompt; empty for the default one of a model without."""
        known = {} if self.spec is None else self.spec.prompts
        chosen = name
        if chosen is None and self.spec is not None:
            chosen = self.spec.default_prompt_name
        if chosen is None:
            return ""
        if chosen not in known:
            names = ", ".join(known) or "none"
            near = did_you_mean(chosen, known)
            raise RequestError(
                f"prompt_name is {chosen!r:.80}, the model's prompts are: {names}{near}",
                param="prompt_name",
            )
        return known[chosen]

    def _with_prefix(self, prompt: Prompt, prefix: str, name: str | None) -> Prompt:
        if isinstance(prompt, str):
            return prefix + prompt
        if isinstance(prompt, dict) and prompt.get("prompt_token_ids") is None:
            text = prompt.get("prompt")
            return {**prompt, "prompt": prefix + text} if isinstance(text, str) else prompt
        if name is not None:
            raise RequestError(
                f"prompt_name is {name!r:.80} for token ids, before which no text fits: give texts",
                param="prompt_name",
            )
        return prompt


ROLES = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""Names that models give to prompts of queries and documents."""


def checked_params(params: object) -> PoolingParams:
    """The parameters, default ones for ``None``. Raises ``RequestTypeError`` for another type."""
    if params is None:
        return PoolingParams()
    if not isinstance(params, PoolingParams):
        message = f"pooling_params must be PoolingParams, got {type(params).__name__}"
        raise RequestTypeError(message, param="pooling_params")
    return params


def pooled_output(output: RequestOutput, make: Callable[[Vectors], R]) -> PoolingRequestOutput[R]:
    """The output of a pooled request for users. ``make``: makes the result."""
    completion, vectors = output.outputs[0], output.pooled
    return PoolingRequestOutput(
        output.request_id,
        None if vectors is None else make(vectors),
        output.prompt_token_ids,
        output.num_cached_tokens,
        error=(completion.error or completion.finish_reason) if vectors is None else None,
        code=completion.code,
    )


def with_result(
    output: PoolingRequestOutput[PoolingOutput], make: Callable[[Vectors], R]
) -> PoolingRequestOutput[R]:
    """The output with its result in another form."""
    return PoolingRequestOutput(
        output.request_id,
        None if output.result is None else make(output.result.data),
        output.prompt_token_ids,
        output.num_cached_tokens,
        output.error,
        output.code,
    )


def embedding_of(vectors: Vectors) -> EmbeddingOutput:
    return EmbeddingOutput(vectors.tolist())


def classes_of(vectors: Vectors) -> ClassificationOutput:
    return ClassificationOutput(vectors.tolist())
