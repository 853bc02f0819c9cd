"""Sessions with text processes on scripted cores, for tests of what becomes of them."""

import itertools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from engine import LLM, LLMEngine, RequestOutput, SamplingParams
from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig
from engine.frontend.session import Session
from engine.frontend.text_workers import TextPool
from engine.messages.params import OutputKind
from engine.messages.requests import AddRequest, CompletionOutput, CoreOutputs
from engine.text.tokenizer import Tokenizer
from support import made_tokenizers as made
from support.fakes import FakeClient, FakeDecided, Live, replay
from support.patience import WAIT_SECONDS

WAIT = WAIT_SECONDS
PARAMS = SamplingParams(max_tokens=50, output_kind="delta")
TEXT = "The quick brown fox, café 日本語 😀👍🏽, jumps over the lazy dog.\n\n  Füchse springen."
TEMPLATE = """{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no bad') }}\
{% endif %}<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}{% endfor %}\
{{ extra | default('') }}{% if add_generation_prompt %}<assistant>{% endif %}"""


def make_model(root: Path) -> ModelConfig:
    """A directory with a tokenizer and a chat template, and no weights."""
    made.save(root, made.metaspace(), {"chat_template.jinja": TEMPLATE})
    return ModelConfig(model=str(root))


class Pools(ExitStack):
    """Starts pools and closes them in the end. ``limits`` are those of ``TextPool``."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = model

    def start(self, size: int = 1, hang_seconds: float = 1.0, **limits: Any) -> TextPool:
        pool = TextPool(self.model, size, hang_seconds=hang_seconds, **limits)
        self.callback(pool.close)
        pool.wait_until_ready()
        return pool


def session_on(
    pool: TextPool | None,
    tokenizer: Tokenizer,
    pace: Callable[[], object] = lambda: None,
    max_model_len: int = 256,
) -> Session:
    """A session whose core says ``TEXT`` over and over."""
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    decided = FakeDecided(max_model_len, tokenizer.vocab_size)
    client = FakeClient(replay(ids), decided, pace=pace)
    config = EngineConfig(model=ModelConfig(model="fake"), disable_log_stats=True)
    return Session(config, client, tokenizer, client.clock, pool)


def texts_of(session: Session, num: int, params: SamplingParams = PARAMS) -> list[str]:
    """What ``num`` requests get, side by side: all pieces joined."""
    llm_engine = LLMEngine(session)
    for i in range(num):
        llm_engine.add_request(str(i), [5, 6, 7], params)
    texts = [""] * num
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            texts[int(output.request_id)] += output.outputs[0].text
    return texts


def joined(outputs: list[RequestOutput], kind: OutputKind) -> RequestOutput:
    """All outputs of a request as one: what its user has in the end, however often it came."""
    last = replace(outputs[-1])
    if kind != "delta":
        texts = [completion.text for output in outputs for completion in output.outputs[:1]]
        assert all(b.startswith(a) for a, b in itertools.pairwise(texts)) or last.finished
        return last
    pieces: dict[int, list[CompletionOutput]] = {}
    for output in outputs:
        for completion in output.outputs:
            pieces.setdefault(completion.index, []).append(completion)
    last.outputs = []
    for _, own in sorted(pieces.items()):
        whole = replace(own[-1], text="".join(each.text for each in own))
        whole.token_ids = [token for each in own for token in each.token_ids]
        if whole.logprobs is not None:
            whole.logprobs = [entry for each in own for entry in each.logprobs or ()]
        last.outputs.append(whole)
    return last


class LeapingClient(FakeClient):
    """A core whose requests get several tokens a step: as many as ``stride`` says."""

    def stride(self, request: AddRequest, position: int) -> int:
        return 1 + position % 4

    def advance(self, index: int, row: Live, batch: CoreOutputs) -> None:
        before = len(batch.token_ids)
        for _ in range(self.stride(row.request, row.num_output)):
            if row.request.request_id in self.live:
                super().advance(index, row, batch)
        batch.counts = [*(batch.counts or []), len(batch.token_ids) - before]


def llm_around(session: Session) -> LLM:
    """An `LLM` of an engine that was made by hand."""
    llm = LLM.__new__(LLM)
    llm.llm_engine = LLMEngine(session)
    llm._counter = itertools.count()
    llm._turn = threading.Lock()
    return llm
