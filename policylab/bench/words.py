"""Turns token ids into text, for servers and chats that take no ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from engine.errors import ConfigError

FILE = "tokenizer.json"
FEWEST = 64
NUM_PROBED = 256
TEXT = (
    "about above across act after again against age ago air all along also always among and "
    "animal answer any area arm around art ask away back bad ball bank base bed been before "
    "began behind being below best better between big bird black blood blue board boat body "
    "book both box boy bring brother brought build built business but buy call came can car "
    "care carry case cause cell center certain chance change check child church city class "
    "clear close cold color come common company complete contain control cool copy corner cost "
    "could count country course cover cross cry cup cut dark day dead deal decide deep design "
    "did differ direct do doctor does dog done door down draw dream drive drop dry during each "
    "early earth east easy eat edge effect egg eight either else end energy engine enough even "
    "event ever every example eye face fact fall family far farm fast father fear feel feet "
    "few field fight figure fill find fine fire first fish five floor fly follow food foot for "
    "force form found four free fresh friend from front full fun game gas gave general get "
    "girl give glass go gold gone good got govern grand grass great green ground group grow "
    "had hair half hand happen hard has hat have he head hear heart heat heavy held help her "
    "here high hill him his history hit hold hole home horse hot hour house how human hundred "
    "ice idea if in inch is island it job join jump just keep kept key kind king knew know "
    "land language large last late law lay lead learn least leave left leg less let letter "
    "level lie life lift light like line list listen little live local long look lost lot love "
    "low machine made main make man many map mark market may me mean measure meet men mile "
)
COMMON = TEXT.split()
"""Words that most tokenizers have as one token each."""


class Words:
    """A list of words, of which each is one token after a space."""

    def __init__(self, words: Sequence[str], tokenizer: Tokenizer | None = None) -> None:
        self._words = words
        self._tokenizer = tokenizer
        # The first word may be one token only after a space, like the others, or only without.
        leads = ("", " ") if tokenizer is not None else ("",)
        self._lead = max(leads, key=self._num_whole)

    def _num_whole(self, lead: str) -> int:
        """How many words are one token after this text."""
        return sum(self.count(lead + word) == 1 for word in self._words[:NUM_PROBED])

    @classmethod
    def of(cls, path: Path) -> Words:
        """The words of a tokenizer, in a file or in a model directory.

        Raises ``ConfigError`` if it cannot be read or has too few.
        """
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(
                f"--tokenizer is {str(path)!r}, must be a {FILE} or a directory with one; without "
                "this option tokens are counted by the server"
            )
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no narrower class
            raise ConfigError(f"--tokenizer {str(file)!r} cannot be read: {error}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        found = tokenizer.decode_batch([[each] for each in range(tokenizer.get_vocab_size())])
        words = sorted({word.strip() for word in found if word.strip().isalpha()})
        words = [word for word in words if word.isascii() and word.islower() and len(word) > 1]
        codes = tokenizer.encode_batch([f"a {word}" for word in words], add_special_tokens=False)
        first = len(tokenizer.encode("a", add_special_tokens=False).ids)
        whole = [w for w, code in zip(words, codes, strict=True) if len(code.ids) == first + 1]
        if len(whole) < FEWEST:
            raise ConfigError(
                f"--tokenizer {str(file)!r} has {len(whole)} words of one token, {FEWEST} are "
                "needed; leave the option out"
            )
        return cls(whole, tokenizer)

    def text(self, ids: Sequence[int]) -> str:
        """A word for each id; equal ids give equal words."""
        words, number = self._words, len(self._words)
        return self._lead + " ".join([words[each % number] for each in ids])

    def count(self, text: str) -> int:
        """Tokens of a text; estimated as a quarter of its characters without a tokenizer."""
        if self._tokenizer is None:
            return max(1, len(text) // 4)
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)
