"""The tokenizer of an engine for asyncio tasks."""

from __future__ import annotations

from engine.errors import ConfigError
from engine.frontend.session import Session
from engine.text.tokenizer import Tokenizer


class AsyncTexts:
    """The methods of ``AsyncLLMEngine`` that convert texts to tokens and back."""

    _session: Session

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, without blocking other tasks. Raises as ``Tokenizer.encode`` does,
        and ``ConfigError`` without a tokenizer."""
        encode = self.get_tokenizer().encode
        return await self._session.inputs.texts.elsewhere(encode, text, add_special_tokens)

    async def detokenize(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids, without blocking other tasks. Raises ``ConfigError`` without a
        tokenizer."""
        decode = self.get_tokenizer().decode
        return await self._session.inputs.texts.elsewhere(decode, token_ids, skip_special_tokens)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; ``None`` if none was loaded."""
        return self._session.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ``ConfigError`` if none was loaded."""
        if self._session.tokenizer is None:
            raise ConfigError("no tokenizer: the engine was started with skip_tokenizer_init")
        return self._session.tokenizer
