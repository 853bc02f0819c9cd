"""A GPU compiles nothing while a request waits: each kernel was met when the engine started.

Shown by the keys by which Triton looks up what it has compiled; nothing is computed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.quantized_models import awq, gptq, write_model
from e2e.tiny_models import CASES, Case, config_of, random_model
from support import made_tokenizers
from support.adapted import Adapted, random_adapter, run
from support.compile_keys import LARGE, Keys, engine_of, grouped, model, recorded

from engine import LLMEngine, SamplingParams, StructuredOutputsParams

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels have no keys"
    ),
]


def quickly(few: tuple[Any, ...], others: tuple[Any, ...]) -> list[Any]:
    """A few values, and others where there is time."""
    return [*few, *(pytest.param(value, marks=pytest.mark.slow) for value in others)]


GROUPS = quickly((1, 12), (2, 3, 4, 5, 6, 7, 8, 16, 71))
SEATS = quickly((256,), (1, 4, 8, 64))
FORM = StructuredOutputsParams(regex="(the|dog|fox)+")
COMMON = {"max_tokens": 3, "ignore_eos": True, "temperature": 0.0}
FEATURES: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 3},
    "all log-probabilities": {"logprobs": -1},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {3: 1.0}},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": [9]},
    "allowed_token_ids": {"allowed_token_ids": [3, 4, 5]},
    "bad_words": {"bad_words": ["the", " dog", "x +"]},
    "grammar": {"structured_outputs": FORM, "ignore_eos": False},
    "n": {"n": 3, "temperature": 1.0},
    "narrowed": {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
}


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keys]:
    with recorded(monkeypatch) as found:
        yield found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizer")
    return made_tokenizers.save(root, made_tokenizers.byte_level())


class Serving:
    """Requests to an engine whose start is over. From here on a new key is a fault."""

    def __init__(self, engine: LLMEngine, keys: Keys) -> None:
        self._engine = engine
        self._keys = keys
        self._ids = map(str, itertools.count())
        keys.phase = "plain requests"

    def add(self, length: int, **params: Any) -> None:
        ids = {"prompt_token_ids": [5] * length}
        self._engine.add_request(next(self._ids), ids, SamplingParams(**{**COMMON, **params}))

    def drain(self) -> None:
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                failed = any(one.finish_reason == "error" for one in output.outputs)
                # The zeros that are drawn follow no grammar.
                assert not failed or self._keys.phase == "grammar", output

    def plain(self, group: int, max_model_len: int) -> None:
        """Chunks of each size on both sides of where tiles change: alone, beside decodes, all at
        once; then a prompt of several steps."""
        edges = [max(rows // group, 1) for rows in (8, 16, 32, 64, 128, 256)]
        lengths = {length + more for length in edges for more in (0, 1)} | {1, 2, 9, 17, 65, 500}
        fitting = sorted(length for length in lengths if length <= max_model_len - 8)
        for length in fitting:
            self.add(length)
            self.drain()
        for length in fitting[::2]:
            self.add(3, max_tokens=6)
            self._engine.step()
            self._engine.step()
            self.add(length, temperature=0.8)
            self.add(5)
            self.drain()
        for length in fitting:
            self.add(length)
        self.add(max_model_len - 8, max_tokens=5)
        self.drain()

    def features(self, names: list[str]) -> None:
        """Each alone, and beside a chunk."""
        for name in names:
            self._keys.phase = name
            self.add(7, **FEATURES[name])
            self.drain()
            self.add(70, **FEATURES[name])
            self.add(3)
            self.drain()

    def check(self) -> None:
        late = [told for told in self._keys.first.values() if not told.startswith("start: ")]
        assert not late, "compiled while requests wait:\n" + "\n".join(late)
        assert len(self._keys.first) > 15


WITHOUT_TEXT = [name for name in FEATURES if name not in ("bad_words", "grammar")]


def serve(
    root: Path, keys: Keys, group: int, max_num_seqs: int, features: bool = True, **options: Any
) -> None:
    with engine_of(root, max_num_seqs=max_num_seqs, **options) as engine:
        serving = Serving(engine, keys)
        serving.plain(group, options.get("max_model_len", 4096))
        if features:
            serving.features(list(FEATURES) if "tokenizer" in options else WITHOUT_TEXT)
    serving.check()


@pytest.mark.parametrize("group", GROUPS)
def test_every_number_of_query_heads(group: int, keys: Keys, tmp_path: Path) -> None:
    serve(model(tmp_path, **grouped(group)), keys, group, 64)


@pytest.mark.parametrize("max_num_seqs", SEATS)
def test_every_number_of_seats(max_num_seqs: int, keys: Keys, tmp_path: Path) -> None:
    serve(model(tmp_path, **grouped(4)), keys, 4, max_num_seqs)


@pytest.mark.parametrize(
    "options",
    quickly(
        (
            {"enforce_eager": True, "block_size": 16, "dtype": "float16"},
            {"max_model_len": 40, "max_num_batched_tokens": 16, "kv_cache_dtype": "fp8"},
            {"batch_invariant": True, "cudagraph_capture_sizes": [2, 5]},
        ),
        (
            {"enforce_eager": True, "max_model_len": 65536},
            {"max_model_len": 131072, "dtype": "float32"},
            {"batch_invariant": True, "enforce_eager": True, "kv_cache_dtype": "fp8"},
        ),
    ),
    ids=str,
)
def test_every_way_to_run(options: dict[str, Any], keys: Keys, tmp_path: Path) -> None:
    small = options.get("max_model_len") == 40
    serve(model(tmp_path, **grouped(3)), keys, 3, 4, not small, **options)


def test_steps_of_one_token(keys: Keys, tmp_path: Path) -> None:
    options = {"max_num_batched_tokens": 1, "max_num_seqs": 1, "max_model_len": 16}
    with engine_of(model(tmp_path, **grouped(3)), **options) as engine:
        serving = Serving(engine, keys)
        serving.add(3)
        serving.drain()
    serving.check()


LAYERS = {
    "gemma2": {"num_hidden_layers": 3},
    "qwen3-next": {"num_hidden_layers": 3},
    "qwen3-moe": {"num_experts": 32, "num_experts_per_tok": 1},
    "qwen3": {"head_dim": 128},
    "phi3": {"head_dim": 96},
    "olmo2": {},
    "mixtral": {"intermediate_size": 128},
    "lfm2": {"num_hidden_layers": 4},
    "bamba": {"num_hidden_layers": 3},
}


@pytest.mark.parametrize("family", quickly(tuple(LAYERS)[:2], tuple(LAYERS)[2:]))
def test_every_kind_of_layer(family: str, keys: Keys, tmp_path: Path) -> None:
    options = LAYERS[family]
    serve(model(tmp_path, family, **options), keys, 2, 8)


@pytest.mark.parametrize("max_num_seqs", [1, 5])
def test_tensors_of_groups_that_begin_anywhere(
    max_num_seqs: int, keys: Keys, tmp_path: Path
) -> None:
    """Block tables and cache slots of all groups but the first are not aligned."""
    root = model(tmp_path, "gemma3", num_hidden_layers=3)
    options = {"max_num_batched_tokens": 507, "max_model_len": 2048 + 100}
    serve(root, keys, 2, max_num_seqs, False, **options)


QUANTIZED = {
    "int8": (None, {}),
    "fp8": (None, {}),
    "awq": (awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}),
    "gptq": (
        gptq(4, 32, desc_act=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True},
    ),
}


@pytest.mark.parametrize("kind", quickly(("gptq",), ("int8", "fp8", "awq")))
def test_quantised_weights(kind: str, keys: Keys, tmp_path: Path) -> None:
    """Numbers of rows lie on both sides of the limits between kernels."""
    write, stated = QUANTIZED[kind]
    sizes = {**grouped(4), "intermediate_size": 256}
    options = {"max_num_batched_tokens": 2048, "dtype": "float16"}
    if write is None:
        root, options["quantization"] = model(tmp_path, **sizes), kind
    else:
        case = Case("Llama", {**sizes, "num_hidden_layers": 2, "max_position_embeddings": 4096})
        root = write_model(tmp_path / kind, case, write, stated).path
        options["load_format"] = "auto"
    with engine_of(root, **options) as engine:
        serving = Serving(engine, keys)
        serving.plain(4, 4096)
        for length in (60, 64, 127, 128, 250, 511, 700, 1020, 1024, 1500, 2000):
            serving.add(length)
            serving.drain()
            serving.add(length + 1)
            serving.drain()
    serving.check()


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {"hidden_size": 1024, "intermediate_size": 4096}),  # in parts, or not, by rows
        ("qwen3-moe", {"num_experts": 12, "num_experts_per_tok": 3}),
    ],
)
def test_packed_weights_of_large_layers_and_of_experts(
    family: str, sizes: dict[str, Any], keys: Keys, tmp_path: Path
) -> None:
    options = {"quantization": "int8", "max_num_batched_tokens": 1024}
    serve(model(tmp_path, family, **sizes), keys, 2, 8, False, **options)


def test_every_launch_compiles_for_the_device(keys: Keys, tmp_path: Path) -> None:
    """Each kernel is compiled with the very arguments of a launch that a request led to."""
    keys.compiles = True
    options = {"max_model_len": 256, "max_num_batched_tokens": 128, "num_kv_blocks": 40}
    with engine_of(model(tmp_path, **grouped(2)), **options) as engine:
        serving = Serving(engine, keys)
        for length in (3, 100, 200):
            serving.add(length)
        serving.drain()
        serving.features(WITHOUT_TEXT)
    serving.check()


def test_texts_grammars_and_bad_words(keys: Keys, tmp_path: Path, tokenizer: Path) -> None:
    serve(model(tmp_path, **grouped(2)), keys, 2, 8, tokenizer=tokenizer)


@pytest.mark.parametrize("num_drafts", quickly((11,), (1, 4)))
def test_drafts(num_drafts: int, keys: Keys, tmp_path: Path) -> None:
    """Constant prompts and the zeros that are drawn repeat themselves: there is always a draft."""
    drafts = {"method": "ngram", "num_speculative_tokens": num_drafts, "adaptive": False}
    options = {"speculative_config": drafts, "max_num_seqs": 8}
    with engine_of(model(tmp_path, **grouped(4)), **options) as engine:
        serving = Serving(engine, keys)
        for length in (3, 20, 70):
            for params in ({}, {"presence_penalty": 0.5}, {"logprobs": 2}):
                serving.add(length, max_tokens=20, **params)
            serving.drain()
            serving.add(length, max_tokens=20)
            serving.drain()
    serving.check()


def test_a_model_that_drafts(keys: Keys, tmp_path: Path) -> None:
    small = model(tmp_path / "small", **grouped(3))
    drafts = {"method": "draft_model", "model": str(small), "num_speculative_tokens": 3}
    serve(model(tmp_path / "large", **grouped(4)), keys, 3, 8, speculative_config=drafts)


@pytest.mark.slow
def test_requests_with_adapters(keys: Keys, tmp_path: Path) -> None:
    root, case = model(tmp_path / "model", **grouped(1)), CASES["llama"]
    base = random_model(config_of(Case(case.family, {**case.options, **LARGE, **grouped(1)})), 0)
    adapters = [random_adapter(base, tmp_path / str(rank), rank, rank=rank) for rank in (3, 16)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with engine_of(root, enable_lora=True) as engine:
        serving = Serving(engine, keys)
        serving.plain(1, 200)
        keys.phase = "adapters"
        for length in (1, 9, 33, 300):
            run(engine, [Adapted([5] * length, one, params) for one in (None, *adapters)])
            run(engine, [Adapted([5] * length, adapters[0], params)])
    serving.check()
    assert any("shrink_kernel" in one for one in keys.first.values())
