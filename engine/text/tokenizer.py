"""Loads the tokenizer of a model directory, without transformers if possible.

Reads tokenizer.json with the ``tokenizers`` library, including the special tokens around a prompt.
Named special tokens and chat templates come from tokenizer_config.json, special_tokens_map.json,
chat_template.jinja and additional_chat_templates/. Ids and rendered chats equal those of
transformers' ``AutoTokenizer``.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import DecodeStream

from engine.config.model import GGUF_LINK, ModelConfig, read_json, read_model_info
from engine.config.pooling.sentence_files import lowers_case
from engine.errors import ModelError, RequestError, RequestTypeError
from engine.text.chat import Messages, read_templates, render_chat
from engine.text.pair_layout import PairLayout, has_token_types, read_layout
from engine.text.token_bytes import TokenBytes
from engine.text.token_lengths import max_chars_per_token
from engine.text.token_texts import REPLACEMENT, TokenTexts, joins_texts

logger = logging.getLogger(__name__)
# Files from which transformers can make a tokenizer without tokenizer.json.
OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
Step = Callable[[list[int]], str | None]
"""Takes the next ids of a sequence; returns the text they complete, or ``None``."""


class ChatInputs(NamedTuple):
    """A conversation, its template, and the template's other variables."""

    template: str
    messages: Messages
    values: dict[str, Any]


class AddedId(NamedTuple):
    """The id of a token added to the vocabulary, and whether it is a special token."""

    token_id: int
    special: bool


class Tokenizer:
    """Converts text to token ids and back, and conversations to prompts."""

    def __init__(
        self,
        backend: Backend,
        special_tokens: dict[str, str],
        templates: dict[str, str],
        response_template: dict[str, Any] | None = None,
        *,
        cuts_left: bool = False,
        has_types: bool = False,
    ) -> None:
        self.backend = backend
        self.special_tokens = special_tokens
        """Named tokens such as ``"bos_token"``, as chat templates refer to them."""
        self.templates = templates
        self.response_template = response_template
        """The format of the model's answers, from tokenizer_config.json."""
        self._cuts_left = cuts_left
        self._has_types = has_types
        self._texts: dict[int, str] = {}

    @property
    def vocab_size(self) -> int:
        """The number of ids, added tokens included."""
        return self.backend.vocab_size

    @cached_property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @cached_property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @cached_property
    def added_tokens(self) -> dict[str, AddedId]:
        """Tokens added to the vocabulary, by text."""
        return self.backend.added_tokens()

    @cached_property
    def max_chars_per_token(self) -> int | None:
        """The most characters that one token can stand for; ``None`` if there is no bound."""
        return self.backend.max_chars_per_token()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, by default with the special tokens the model expects.

        Raises ``RequestTypeError`` for a value that is not a str or has lone surrogates, and
        ``RequestError`` for a text that the tokenizer refuses.
        """
        try:
            if not isinstance(text, str):  # the library would encode a pair of texts as one
                raise TypeError(type(text).__name__)
            return self.backend.encode([text], add_special_tokens)[0]
        except (TypeError, UnicodeError) as error:
            raise RequestTypeError(
                f"{text!r:.80} cannot be tokenised: it must be a str without lone surrogates "
                "(a wrongly decoded file may have some)",
                param="prompt",
            ) from error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises plain Exception, or panics
            message = f"{text!r:.80} cannot be tokenised: {error}"
            raise RequestError(message, param="prompt") from error

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Encode several texts on all processors. An invalid text may raise any exception."""
        return self.backend.encode(texts, True)

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of texts without special tokens, on all processors. Raises the error
        of ``encode`` for the first text that cannot be tokenised."""
        try:
            return self.backend.encode(texts, False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # one of them is invalid
            return [self.encode(text, add_special_tokens=False) for text in texts]

    @cached_property
    def pair_layout(self) -> PairLayout | None:
        """How two texts are joined; ``None`` if the tokenizer does not reveal it."""
        layout = self.backend.pair_layout()
        if layout is None or self._has_types:
            return layout
        return layout._replace(second=None)

    def cut(self, token_ids: list[int], num_kept: int) -> list[int]:
        """Keep ``num_kept`` tokens: the first ones, or the last ones if tokenizer_config.json has
        truncation_side left."""
        if self._cuts_left:
            return token_ids[max(0, len(token_ids) - num_kept) :]
        return token_ids[:num_kept]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``; incomplete characters become U+FFFD."""
        return self.backend.decode(token_ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself; for a special token, its name."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.backend.decode([token_id], False)
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes that a token adds to a text; for a special token, the bytes of its name.
        ``None`` if the token is part of a character and the tokenizer does not reveal its bytes."""
        return self.backend.token_bytes(token_id)

    def apply_chat_template(
        self,
        messages: Messages,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render the prompt of a conversation.

        chat_template: a template, or a template's name; variables: more variables for the template.
        Raises ``RequestError`` if there is no template, or it refuses the conversation."""
        return render_chat(
            *self.chat_inputs(
                messages,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **variables,
            )
        )

    def chat_inputs(
        self,
        messages: Messages,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> ChatInputs:
        """Return the template and its variables. Raises ``RequestError`` without a template."""
        template = self._template(chat_template, has_tools=tools is not None)
        values = {
            **self.special_tokens,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        return ChatInputs(template, messages, values)

    def _template(self, chosen: str | None, has_tools: bool) -> str:
        if chosen is not None:
            if not isinstance(chosen, str):
                message = f"chat_template is {chosen!r:.80}, must be a str"
                raise RequestTypeError(message, param="chat_template")
            return self.templates.get(chosen, chosen)
        name = "tool_use" if has_tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            known = f" (it has: {', '.join(self.templates)})" if self.templates else ""
            raise RequestError(
                f"the model has no default chat template{known}; set chat_template, or use "
                "generate() with the complete prompt"
            )
        return self.templates[name]

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_id(token)


def load_tokenizer(config: ModelConfig) -> Tokenizer:
    """Load the tokenizer of a model. Raises ``ModelError`` if the model has none."""
    root = Path(config.tokenizer or config.model).expanduser()
    if config.tokenizer is None:
        read_model_info(root)  # raises for a directory without a model
    elif not root.is_dir():
        raise ModelError(
            f"tokenizer directory {str(root)!r} does not exist; give the path of a local "
            "directory, or the name of a repository on a hub"
        )
    is_lower = lowers_case(Path(config.model).expanduser())
    if (root / "tokenizer.json").is_file():
        return _read_tokenizer(root, is_lower)
    if not any((root / name).is_file() for name in OTHER_FILES):
        reason = (read_json(root / GGUF_LINK) or {}).get("no_tokenizer")
        raise ModelError(
            f"{reason or f'{root} has no tokenizer.json'}; set tokenizer to the directory of the "
            "tokenizer, or skip_tokenizer_init=True to work with token ids only"
        )
    return _convert_tokenizer(root, is_lower, config.trust_remote_code)


def _read_tokenizer(root: Path, is_lower: bool) -> Tokenizer:
    options = _tokenizer_options(root)
    path = root / "tokenizer.json"
    try:
        tokenizer = RustTokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} is damaged: {error}") from error
    named = _named_tokens(options)
    try:
        _add_special_tokens(tokenizer, options, named)
    except (
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
    ) as error:  # fields may have wrong types
        raise ModelError(
            f"{root / 'tokenizer_config.json'} is damaged: its special tokens cannot be read "
            f"({type(error).__name__}: {error})"
        ) from error
    tokenizer.encode_special_tokens = bool(options.get("split_special_tokens", False))
    templates = read_templates(root, options)
    if is_lower:
        _convert_to_lower_case(tokenizer)
    return Tokenizer(
        RustBackend(tokenizer),
        named,
        templates,
        options.get("response_template"),
        cuts_left=options.get("truncation_side") == "left",
        has_types=has_token_types(root, options),
    )


def _convert_to_lower_case(tokenizer: RustTokenizer) -> None:
    """Convert texts, but not the names of special tokens in them, to lower case."""
    own = tokenizer.normalizer
    parts: list[Any] = [own]
    if isinstance(own, normalizers.Sequence):
        parts = [own[index] for index in range(len(own))]
    if any(isinstance(part, normalizers.Lowercase) for part in parts):
        return
    following = [part for part in parts if part is not None]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *following])


def _tokenizer_options(root: Path) -> dict[str, Any]:
    options = read_json(root / "tokenizer_config.json") or {}
    if "added_tokens_decoder" not in options:  # older files do not list all tokens themselves
        options.update(read_json(root / "special_tokens_map.json") or {})
    return options


def _named_tokens(options: dict[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token and the like, including names that a model family adds."""
    named = {}
    for name, value in options.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            named[name] = content
    extra = options.get("extra_special_tokens")
    if isinstance(extra, dict):
        named.update({name: str(token) for name, token in extra.items()})
    return named


def _add_special_tokens(
    tokenizer: RustTokenizer, options: dict[str, Any], named: dict[str, str]
) -> None:
    """Add the tokens that tokenizer_config.json names and tokenizer.json does not mark as
    special."""
    known = tokenizer.get_added_tokens_decoder()
    added = {token.content: token for token in known.values()}
    for index, fields in sorted(
        options.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])
    ):
        if fields["content"] not in added:
            token = AddedToken(**fields)
            tokenizer.add_tokens([token])
            added[token.content] = token
            logger.debug("token %r (id %s) is named by tokenizer_config.json only", token, index)
    extra = options.get("extra_special_tokens") or options.get("additional_special_tokens") or []
    wanted = [*named.values(), *map(_content, extra if isinstance(extra, list) else [])]
    for content in dict.fromkeys(wanted):
        if content not in added or not added[content].special:
            tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False)])


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _convert_tokenizer(root: Path, is_lower: bool, trust_remote_code: bool) -> Tokenizer:
    logger.info("%s has no tokenizer.json: transformers converts what is there", root)
    transformers = importlib.import_module("transformers")  # takes seconds, so only here
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(
            str(root), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # third-party files may raise anything
        raise ModelError(
            f"no tokenizer can be made from the files in {root}: {error}; convert it to "
            "tokenizer.json, or set skip_tokenizer_init=True to work with token ids only"
        ) from error
    rust = getattr(loaded, "backend_tokenizer", None)
    if is_lower and rust is not None:
        _convert_to_lower_case(rust)
    backend: Backend = PythonBackend(loaded) if rust is None else RustBackend(rust)
    options = {**_tokenizer_options(root), "chat_template": loaded.chat_template}
    templates = read_templates(root, options)
    named = dict(loaded.special_tokens_map)
    return Tokenizer(
        backend,
        named,
        templates,
        options.get("response_template"),
        cuts_left=options.get("truncation_side") == "left",
        has_types=has_token_types(root, options),
    )


class Backend(Protocol):
    """Encodes and decodes text. Any id below ``vocab_size`` can be decoded."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of each text. Lets other threads run meanwhile, if possible."""

    def pair_layout(self) -> PairLayout | None:
        """Return how two texts are joined; ``None`` if it is unknown."""

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text; the names of special tokens in it are plain text."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str: ...
    def token_id(self, token: str) -> int | None: ...
    def added_tokens(self) -> dict[str, AddedId]: ...
    def max_chars_per_token(self) -> int | None:
        """Return the most characters that one token can stand for; ``None`` if unbounded."""

    def stream(self, context: list[int], skip_special_tokens: bool) -> Step:
        """Return a function that decodes the ids after ``context``, a few at a time.

        The function raises if text that it returned earlier turns out to be wrong."""

    def token_texts(self, skip_special_tokens: bool) -> TokenTexts | None:
        """Return the text of each token; ``None`` if a sequence is not decoded by joining the texts
        of its tokens."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of one token; ``None`` if they are unknown."""

    def as_json(self) -> str | None:
        """Return the tokenizer in the format of tokenizer.json, with added tokens; ``None`` if it
        is written in Python."""


class RustBackend:
    """A tokenizer of the ``tokenizers`` library."""

    def __init__(self, tokenizer: RustTokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._token_bytes = TokenBytes(tokenizer)
        self._token_texts: dict[bool, TokenTexts] = {}
        if joins_texts(tokenizer):
            self._token_texts = {skip: TokenTexts(tokenizer, skip) for skip in (False, True)}

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        # For one text too: ``encode`` blocks other threads meanwhile, and takes longer.
        return [
            encoding.ids
            for encoding in self._tokenizer.encode_batch_fast(
                texts, add_special_tokens=add_special_tokens
            )
        ]

    def pair_layout(self) -> PairLayout | None:
        return read_layout(self._tokenizer)

    def encode_plain(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _plain(self) -> RustTokenizer:
        copy = RustTokenizer.from_str(self._tokenizer.to_str())
        copy.encode_special_tokens = True
        return copy

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def added_tokens(self) -> dict[str, AddedId]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: AddedId(number, token.special) for number, token in added.items()}

    def max_chars_per_token(self) -> int | None:
        return max_chars_per_token(self._tokenizer)

    def stream(self, context: list[int], skip_special_tokens: bool) -> Step:
        stream = DecodeStream(ids=context, skip_special_tokens=skip_special_tokens)
        return partial(stream.step, self._tokenizer)

    def token_texts(self, skip_special_tokens: bool) -> TokenTexts | None:
        return self._token_texts.get(skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes | None:
        return self._token_bytes[token_id]

    def as_json(self) -> str | None:
        found: str = self._tokenizer.to_str()
        return found


class PythonBackend:
    """A tokenizer that transformers runs in Python."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        encode = partial(self._tokenizer.encode, add_special_tokens=add_special_tokens)
        return [list(encode(text)) for text in texts]

    def pair_layout(self) -> PairLayout | None:
        return None

    def encode_plain(self, text: str) -> list[int]:
        encode = self._tokenizer.encode
        return list(encode(text, add_special_tokens=False, split_special_tokens=True))

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_id(self, token: str) -> int | None:
        found = self._tokenizer.get_vocab().get(token)
        return None if found is None else int(found)

    def added_tokens(self) -> dict[str, AddedId]:
        added = self._tokenizer.added_tokens_decoder
        return {token.content: AddedId(number, token.special) for number, token in added.items()}

    def max_chars_per_token(self) -> int | None:
        return None

    def stream(self, context: list[int], skip_special_tokens: bool) -> Step:
        return WindowStream(self, context, skip_special_tokens)

    def token_texts(self, skip_special_tokens: bool) -> TokenTexts | None:
        return None

    def token_bytes(self, token_id: int) -> bytes | None:
        text = self.decode([token_id], skip_special_tokens=False)
        return None if REPLACEMENT in text else text.encode()

    def as_json(self) -> str | None:
        return None


class WindowStream:
    """Decodes new ids in their context: decodes the last ids alone, then together with the new ids,
    and returns the difference of the two texts.

    New text is withheld while it ends in an incomplete character."""

    def __init__(self, backend: Backend, context: list[int], skip_special_tokens: bool) -> None:
        self._decode = partial(backend.decode, skip_special_tokens=skip_special_tokens)
        self._window = list(context)
        self._num_out = len(context)  # ids of the window whose text was returned

    def __call__(self, token_ids: list[int]) -> str | None:
        self._window += token_ids
        before = self._decode(self._window[: self._num_out])
        text = self._decode(self._window)
        if len(text) <= len(before) or text.endswith(REPLACEMENT):
            return None
        if not text.startswith(before):
            raise ValueError("the text that was already returned has changed")
        del self._window[: self._num_out]
        self._num_out = len(self._window)
        return text[len(before) :]
