"""How much text a token can stand for, and what is refused for it."""

import random
import time
from collections.abc import Callable

import pytest
from support import made_tokenizers as made
from support.fakes import FakeClient, FakeDecided, counting, fake_session
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from engine import LLMEngine, SamplingParams
from engine.errors import RequestError
from engine.text import tokenizer as frontend
from engine.text.token_lengths import max_chars_per_token
from engine.text.tokenizer import RustBackend

RANGES = [(0x20, 0x7F), (0x1, 0x20), (0x80, 0xD800), (0xE000, 0x110000), (0x300, 0x370)]


def with_normal_form() -> Tokenizer:
    tokenizer = made.byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC()])
    return tokenizer


@pytest.mark.parametrize("maker", [*made.MAKERS.values(), with_normal_form])
def test_no_text_has_fewer_tokens(maker: Callable[[], Tokenizer], seed: int) -> None:
    dice = random.Random(seed)
    tokenizer = maker()
    most = max_chars_per_token(tokenizer)
    assert most is not None
    texts = (
        [token * 9 for token in tokenizer.get_vocab()]
        + made.TEXT
        + ["\u03b1\u0313\u0300\u0345" * 9]
    )
    for _ in range(500):
        kind = dice.choice(RANGES)
        texts.append("".join(chr(dice.randrange(*kind)) for _ in range(dice.randint(1, 50))))
    for text in texts:
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert len(text) <= num_tokens * most, ascii(text)


def test_ids_may_have_gaps() -> None:
    """The longest token may be the one behind the gap, and one that was added later."""
    vocab = {letter: index for index, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab | {"abcd": 1000}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert max_chars_per_token(tokenizer) == 4
    tokenizer.add_tokens(["abcdefgh"])
    assert max_chars_per_token(tokenizer) == 8


def stripping() -> Tokenizer:
    tokenizer = made.byte_level()
    tokenizer.normalizer = normalizers.Strip()
    return tokenizer


def collapsing() -> Tokenizer:
    tokenizer = made.byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(Regex(" +"), " ")])
    return tokenizer


def dropping_spaces() -> Tokenizer:
    tokenizer = made.byte_level()
    split = pre_tokenizers.WhitespaceSplit()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel()])
    return tokenizer


def swallowing() -> Tokenizer:
    tokenizer = made.byte_level()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return tokenizer


def words() -> Tokenizer:
    return Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))


def one_unknown() -> Tokenizer:
    return Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True))


@pytest.mark.parametrize(
    "maker", [stripping, collapsing, dropping_spaces, swallowing, words, one_unknown]
)
def test_where_a_token_may_stand_for_any_length_nothing_is_certain(
    maker: Callable[[], Tokenizer],
) -> None:
    assert max_chars_per_token(maker()) is None


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    tokenizer = frontend.Tokenizer(RustBackend(made.byte_level()), {}, {})
    vocab_size = tokenizer.vocab_size
    client = FakeClient(counting, FakeDecided(256, vocab_size))
    llm_engine = LLMEngine(fake_session(client, tokenizer))
    huge = "x" * 20_000_000
    began = time.process_time()
    with pytest.raises(RequestError, match=r"20000000 characters, at least \d+ tokens.*truncate"):
        llm_engine.add_request("a", huge)
    assert time.process_time() - began < 1.0
    params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=1)
    llm_engine.add_request("b", huge[:10_000], params)  # its end is wanted
    assert len(llm_engine.step()[0].prompt_token_ids) == 255
