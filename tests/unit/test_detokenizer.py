"""Text that grows token by token equals text decoded in one go; no half characters."""

import random
from collections.abc import Callable

import pytest
from support import made_tokenizers as made
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders

from engine.messages.text import TextWish
from engine.text.detokenizer import Detokenizer, StopStrings, TextReader
from engine.text.token_texts import REPLACEMENT, TokenTexts, joins_texts
from engine.text.tokenizer import (
    Backend,
    PythonBackend,
    RustBackend,
    Step,
    WindowStream,
)

TEXTS = [
    "Hello world, this is text.",
    " starts with a space",
    "café 日本語 😀😃 👍🏽 e\u0301 кириллица",
    "tabs\t\tand\n\nnewlines   and spaces ",
    "a\ufffdb",
]
LAST_BYTE_ID = made.SPECIAL.index("</s>") + len(made.BYTES)
PROMPTS = ["", "The quick", "The quick ", "日本", "😀", "<s>"]


class WindowBackend(RustBackend):
    """A tokenizer library without a decode stream of its own."""

    def stream(self, context: list[int], skip_special_tokens: bool) -> Step:
        return WindowStream(self, context, skip_special_tokens)


class StreamBackend(RustBackend):
    """One whose token texts nothing is known of."""

    def token_texts(self, skip_special_tokens: bool) -> TokenTexts | None:
        return None


def metaspace_decoder() -> RustTokenizer:
    """A tokenizer like T5's: the decoder knows the mark, and drops it from the first token."""
    tokenizer = made.replaced_spaces()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def rust(kind: str) -> RustTokenizer:
    return made.MAKERS[kind]()


def ids_of(backend: Backend, text: str) -> list[int]:
    (token_ids,) = backend.encode([text], False)
    return token_ids


BACKENDS: dict[str, Backend] = {
    f"{name}-{cls.__name__}": cls(rust(name))
    for name in made.MAKERS
    for cls in (RustBackend, WindowBackend)
}
each_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())


def pieces_of(
    backend: Backend, prompt: list[int], output: list[int], sizes: list[int]
) -> list[str]:
    detokenizer = Detokenizer(backend, prompt, True)
    pieces, start = [], 0
    for size in sizes:
        pieces.append(detokenizer.feed(output[start : start + size]))
        start += size
    return [*pieces, detokenizer.feed(output[start:]), detokenizer.flush()]


@each_backend
@pytest.mark.parametrize("prompt", PROMPTS)
def test_pieces_joined_are_the_decoded_output(backend: Backend, prompt: str) -> None:
    prompt_ids = ids_of(backend, prompt) or [1]
    for text in TEXTS:
        output = ids_of(backend, text)
        before = backend.decode(prompt_ids, True)
        expected = backend.decode(prompt_ids + output, True).removeprefix(before)
        assert REPLACEMENT in text or expected.strip() == text.strip()
        for sizes in ([1] * len(output), [len(output)], [2, 3, 1, 5]):
            assert "".join(pieces_of(backend, prompt_ids, output, sizes)) == expected


@each_backend
def test_half_a_character_is_withheld(backend: Backend) -> None:
    """118: nothing before the last byte, then the whole character; at the end what there is."""
    smile = ids_of(backend, "😀")
    for byte_ids in (smile, smile[-4:]):
        detokenizer = Detokenizer(backend, ids_of(backend, "a"), True)
        shown = [detokenizer.feed([i]) for i in byte_ids]
        assert "".join(shown).strip() == "😀" and all(REPLACEMENT not in piece for piece in shown)
        assert detokenizer.flush() == ""
    cut = Detokenizer(backend, ids_of(backend, "a"), True)
    assert "".join(cut.feed([i]) for i in smile[:-1]).strip() == ""
    assert set(cut.flush()) == {REPLACEMENT}


@each_backend
def test_a_character_begun_in_the_prompt_appears_whole(backend: Backend) -> None:
    ids = ids_of(backend, "ab😀")
    detokenizer = Detokenizer(backend, ids[:-1], True)
    assert detokenizer.feed(ids[-1:]) == "😀"


@each_backend
def test_special_tokens_are_shown_only_if_asked(backend: Backend) -> None:
    ids = [*ids_of(backend, "a"), 2]
    for skip, expected in ((True, "a"), (False, "a</s>")):
        detokenizer = Detokenizer(backend, [1], skip)
        shown = "".join(detokenizer.feed([i]) for i in ids) + detokenizer.flush()
        assert shown.strip().removeprefix("<s>") == expected


@pytest.mark.parametrize("kind", [name for name in BACKENDS if name.startswith("byte_level")])
def test_any_ids_at_all(kind: str, seed: int) -> None:
    """Random ids, as a random model makes them: every byte of the output is shown exactly once."""
    dice, backend = random.Random(seed), BACKENDS[kind]
    for _ in range(200):
        ids = [dice.randrange(backend.vocab_size) for _ in range(40)]
        prompt, output = ids[:10], ids[10:]
        while backend.decode(prompt, True).endswith(REPLACEMENT):
            prompt.pop()  # how a broken end of the prompt is shown is nobody's promise
        expected = backend.decode(prompt + output, True).removeprefix(backend.decode(prompt, True))
        pieces = pieces_of(backend, prompt, output, [1] * len(output))
        assert "".join(pieces) == expected


@pytest.mark.parametrize("kind", [name for name in BACKENDS if "byte_level" not in name])
def test_random_ids_make_no_trouble(kind: str, seed: int) -> None:
    """Runs of byte tokens that are no text, in prompt and output; the words are all there."""
    dice, backend = random.Random(seed), BACKENDS[kind]
    for _ in range(100):
        ids = [dice.randrange(backend.vocab_size) for _ in range(60)]
        text = "".join(pieces_of(backend, ids[:10], ids[10:], [1] * 50))
        words = [backend.decode([i], True).strip() for i in ids[10:] if i > LAST_BYTE_ID]
        assert not [word for word in words if word.isalpha() and word not in text]


@pytest.mark.parametrize("maker", [*made.MAKERS.values(), metaspace_decoder])
def test_pieces_are_those_of_the_library_stream(
    maker: Callable[[], RustTokenizer], seed: int
) -> None:
    """Whatever the ids: words, special tokens, half characters, bytes that are no text, and ids
    that the tokenizer does not have."""
    dice, joining, plain = random.Random(seed), RustBackend(maker()), StreamBackend(maker())
    words = [i for i in range(plain.vocab_size) if plain.decode([i], True).isascii()]
    for _ in range(300):
        skips, share = dice.random() < 0.5, dice.random()
        ids = [
            dice.choice(words) if dice.random() < share else dice.randrange(plain.vocab_size + 20)
            for _ in range(60)
        ]
        num_prompt = dice.randrange(12)
        streams = [Detokenizer(backend, ids[:num_prompt], skips) for backend in (joining, plain)]
        while num_prompt < len(ids):
            size = dice.choice((0, 1, 1, 1, 1, 2, 5))
            new = ids[num_prompt : num_prompt + size]
            num_prompt += size
            texts = [stream.feed(new) for stream in streams]
            assert texts[0] == texts[1], f"{ids} upto {num_prompt}, {skips=}"
        assert streams[0].flush() == streams[1].flush()
    assert all(joining.token_texts(skips) for skips in (False, True))  # they were used


def test_texts_that_depend_on_neighbours_are_not_joined() -> None:
    """Decoders that add or drop spaces between tokens, and unknown ones."""
    strip = decoders.Strip(content=" ", left=2, right=0)
    unsure = [
        None,
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), strip]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
    ]
    for decoder in unsure:
        tokenizer = made.byte_level()
        tokenizer.decoder = decoder
        assert not joins_texts(tokenizer), decoder
        assert RustBackend(tokenizer).token_texts(True) is None


def test_text_that_would_have_to_change_is_continued() -> None:
    """A run of byte tokens is text or it is not, as a whole; what is out stays out."""
    backend = RustBackend(made.metaspace())
    smile = ids_of(backend, "a😀")[-4:]
    letter = ids_of(backend, "ab")[-1:]
    detokenizer = Detokenizer(backend, ids_of(backend, "a"), True)
    shown = [detokenizer.feed([i]) for i in (*smile, smile[1], *letter, *letter)]
    assert "".join(shown[:4]) == "😀"
    assert "".join(shown[4:]).count("b") == 2 and REPLACEMENT in "".join(shown[4:])


def test_tokenizers_that_are_python_code() -> None:
    """Through transformers, for those that have no other form."""
    from transformers import ByT5Tokenizer

    backend = PythonBackend(ByT5Tokenizer())
    text = "café 😀 done"
    prompt, output = ids_of(backend, "Say: "), ids_of(backend, text)
    assert max(output) < backend.vocab_size and backend.token_id("</s>") == 1
    pieces = pieces_of(backend, prompt, output, [1] * len(output))
    assert "".join(pieces) == text and REPLACEMENT not in "".join(pieces)


@pytest.mark.parametrize(
    ("text", "num_new", "strings", "include", "expected"),
    [
        ("one two STOP", 1, ["STOP"], False, ("STOP", 8)),
        ("one two STOP", 1, ["STOP"], True, ("STOP", 12)),
        ("one two STOP more", 5, ["STOP"], False, None),  # seen when it came
        ("one two STOP more", 6, ["STOP"], False, ("STOP", 8)),
        ("abc", 3, ["c", "bc"], False, ("bc", 1)),  # the earliest in the text
        ("abc", 3, ["d"], False, None),
        ("ab", 2, ["abc"], False, None),
    ],
)
def test_stop_strings(
    text: str, num_new: int, strings: list[str], include: bool, expected: tuple[str, int] | None
) -> None:
    assert StopStrings(strings, include).find(text, num_new) == expected


@pytest.mark.parametrize("sizes", [[1] * 9, [4, 5], [9]])
def test_a_stop_string_may_come_letter_by_letter(sizes: list[int]) -> None:
    backend = RustBackend(made.byte_level())
    letters = [ids_of(backend, letter)[0] for letter in "say tHEN!"]
    reader = TextReader(backend, [5], TextWish(True, ["zz", "HEN"], False, 0))
    text, start = "", 0
    for size in sizes:
        delta = reader.read(letters[start : start + size], is_last=False)
        text, start = text[: len(text) - delta.num_dropped] + delta.text, start + size
        if delta.stop is not None:
            break
    assert (text, delta.stop, delta.num_tokens) == ("say t", "HEN", 8)


def test_as_much_is_held_back_as_may_begin_a_stop_string() -> None:
    assert StopStrings(["ab", "abcd"], False).num_held_back == 3
    assert StopStrings(["ab", "abcd"], True).num_held_back == 0
