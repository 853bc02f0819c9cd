"""Decode steps that are recorded and replayed give what they give launch by launch."""

import json
import random
from pathlib import Path

import pytest
import torch
from e2e.references import engine_for
from e2e.tiny_models import VOCAB, make_tiny_model

from engine import LLMEngine, SamplingParams
from kernels.cpu.pointwise import join_columns
from kernels.cpu.recording import Recorder, Recording, Stages, record
from kernels.meta import AttentionMeta


def scores(engine: LLMEngine, requests: list[tuple[list[int], int]]) -> list[list]:
    """Tokens with log-probabilities; requests come one by one, so that steps of all sizes mix."""
    waiting = list(enumerate(requests))
    found: dict[str, list] = {}
    while waiting or engine.has_unfinished_requests():
        for index, (prompt, num_output) in waiting[:2]:
            params = SamplingParams(
                temperature=0.0, max_tokens=num_output, ignore_eos=True, logprobs=1
            )
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        del waiting[:2]
        for _ in range(7):
            for output in engine.step():
                entries = output.outputs[0].logprobs or []
                found[output.request_id] = [
                    {token: entry.logprob for token, entry in each.items()} for each in entries
                ]
    return [found[str(index)] for index in range(len(requests))]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int, int]]:
    """Rows, tokens and sequences of each step that is replayed."""
    found, launch = set(), Recording.launch

    def seen(self: Recording, meta: AttentionMeta) -> None:
        found.add((len(self.given), meta.query_start[1:].tolist()[-1], len(meta.seq_lens)))
        launch(self, meta)

    monkeypatch.setattr(Recording, "launch", seen)
    return found


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float32),
        *((name, torch.bfloat16) for name in ("qwen3-moe", "gemma2", "qwen3.5")),
        *(
            pytest.param(name, torch.bfloat16, marks=pytest.mark.slow)
            for name in (
                "mistral-window",
                "granite",
                "granite-hybrid",
                "falcon-h1",
                "mamba2",
                "mamba",
            )
        ),
    ],
)
def test_replayed_steps_compute_the_same(
    tmp_path: Path,
    name: str,
    dtype: torch.dtype,
    sizes: set[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Over contexts that begin to be cut into items, in batches that grow and shrink."""
    # Steps with prompts compute the last layer's attention otherwise than those that are eager.
    monkeypatch.setattr("engine.worker.worker.takes_tiles", lambda dtype: False)
    draw = random.Random(seed)
    path = make_tiny_model(name, tmp_path, dtype)
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = 320
    (path / "config.json").write_text(json.dumps(config))
    lengths = [draw.choice((1, 15, 31, 250, 254)) for _ in range(8)]
    requests = [
        ([draw.randrange(3, VOCAB) for _ in range(length)], draw.randint(3, 24))
        for length in lengths
    ]
    with engine_for(str(path), max_model_len=320) as engine:
        replayed = scores(engine, requests)
    # Of the others torch computes a part, the routes.
    assert (len(sizes) > 1) == (name != "qwen3-moe")
    sizes.clear()
    with engine_for(str(path), max_model_len=320, enforce_eager=True) as engine:
        assert scores(engine, requests) == replayed and not sizes


def sampled(engine: LLMEngine, params: list[SamplingParams]) -> dict[str, list[int]]:
    """Tokens of requests that come one by one."""
    found = {}
    for index in range(len(params) + 99):
        if index < len(params):
            prompt = {"prompt_token_ids": [3 + index, 4, 5]}
            engine.add_request(str(index), prompt, params[index])
        for output in engine.step():
            found[output.request_id] = output.outputs[0].token_ids
    assert len(found) == len(params) and not engine.has_unfinished_requests()
    return found


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_sampling_after_replayed_steps_is_the_same(
    tmp_path: Path, name: str, sizes: set[tuple[int, int, int]], seed: int
) -> None:
    """Greedy, random and edited rows, alone and together, as requests start and end."""
    draw, path = random.Random(seed), str(make_tiny_model(name, tmp_path, torch.bfloat16))
    kinds: list[dict] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "frequency_penalty": 0.5, "logit_bias": {7: 3.0}},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 0.7, "seed": 6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
    ]
    ignored = {"ignore_eos": True}
    params = [
        SamplingParams(**draw.choice(kinds[:most]), **ignored, max_tokens=draw.randint(2, 30))
        for most in (1, 1, 1, 4, 4, 4, 3, 3, 1, 4)
    ]
    with engine_for(path, max_num_seqs=6) as engine:
        replayed = [sampled(engine, params) for _ in range(2)]
    assert len({num_rows for num_rows, _, _ in sizes}) > 2
    with engine_for(path, max_num_seqs=6, enforce_eager=True) as engine:
        assert replayed == [sampled(engine, params)] * 2


def test_steps_are_replayed_after_steps_of_many_other_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise steps with prompts are padded to a few sizes.
    monkeypatch.setattr("engine.worker.worker.takes_tiles", lambda dtype: False)
    path = str(make_tiny_model("llama", tmp_path, torch.bfloat16))
    long = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    short = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    with engine_for(path, max_model_len=320, enable_prefix_caching=False) as engine:
        wanted = [sampled(engine, [long] * 3) for _ in range(2)]
        for length in range(4, 290):
            prompt = {"prompt_token_ids": [3 + length % 9] * length}
            engine.add_request("x", prompt, short)
            while engine.has_unfinished_requests():
                engine.step()
        assert [sampled(engine, [long] * 3) for _ in range(2)] == wanted


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_invalid_logits_of_replayed_steps_are_explained(tmp_path: Path, temperature: float) -> None:
    """Requests fail with the cause, and later ones are computed as before."""
    path = str(make_tiny_model("llama", tmp_path, torch.bfloat16))
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    with engine_for(path) as engine:
        wanted = sampled(engine, [params] * 3)
        for name in ("a", "b"):
            engine.add_request(name, {"prompt_token_ids": [3, 4, 5]}, params)
        for _ in range(9):
            engine.step()
        for layer in engine.session.client.core.executor.driver.runner.machine.kv:
            layer.fill_(torch.nan)
        errors = {output.request_id: output.outputs[0].error for output in engine.step()}
        assert errors.keys() == {"a", "b"} and all("hold NaN" in why for why in errors.values())
        for layer in engine.session.client.core.executor.driver.runner.machine.kv:
            layer.zero_()
        engine.reset_prefix_cache()
        assert sampled(engine, [params] * 3) == wanted


@pytest.mark.parametrize("name", ["gemma2"])
def test_steps_with_drafts_are_replayed_too(
    tmp_path: Path, name: str, sizes: set[tuple[int, int, int]], seed: int
) -> None:
    """Steps have one request or several, of which some have drafts."""
    draw = random.Random(seed)
    path = str(make_tiny_model(name, tmp_path, torch.bfloat16))
    phrase = [draw.randrange(3, VOCAB) for _ in range(4)]
    requests = [(phrase * draw.randint(3, 6), draw.randint(20, 60)) for _ in range(4)]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}
    drafts["adaptive"] = False
    found = []
    for options in ({}, {"enforce_eager": True}):
        options |= {"speculative_config": drafts}
        with engine_for(path, **options) as engine:
            found.append((scores(engine, requests[:1]), scores(engine, requests)))
    assert found[0] == found[1]
    assert any(num_tokens > num_seqs for num_tokens, _, num_seqs in sizes), sizes


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_steps_with_prompts_are_replayed_too(
    tmp_path: Path,
    name: str,
    sizes: set[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Prompts of any length, in pieces and whole, alone and beside others that decode."""
    # Wherever there are tiles; what is made up to whole ones is computed alike without.
    monkeypatch.setattr("engine.worker.worker.takes_tiles", lambda dtype: True)
    draw = random.Random(seed)
    path = make_tiny_model(name, tmp_path, torch.bfloat16)
    requests = [
        ([draw.randrange(3, VOCAB) for _ in range(draw.randint(1, 90))], draw.randint(3, 24))
        for _ in range(24)
    ]
    found = []
    for options in ({}, {"enforce_eager": True}):
        options |= {"long_prefill_token_threshold": 40, "max_num_batched_tokens": 70}
        with engine_for(str(path), max_num_seqs=8, **options) as engine:
            found.append(scores(engine, requests))
    assert found[0] == found[1]
    mixed = {size for size in sizes if size[1] > size[2]}
    assert bool(mixed) == (name != "qwen3-moe")  # torch computes its routes
    assert all(num_rows % 16 == 0 and 0 <= num_rows - num < 16 for num_rows, num, _ in mixed)


def no_meta() -> AttentionMeta:
    none = torch.zeros(0, dtype=torch.int32)
    return AttentionMeta(none, none, none, none.long(), none.long(), 16, 0, 0, 0)


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def test_work_that_torch_computes_is_done_anew_each_time() -> None:
    recorder, stages = Recorder(), Stages(same, lambda x: x * 2 + 1)
    for value in range(5):
        given = torch.full((3, 4), float(value))
        assert torch.equal(recorder.run(stages, given, no_meta()).hidden, given * 2 + 1)


COMPUTED = {
    "an operation": lambda x: x.relu(),
    "in place": lambda x: x.mul_(2),
    "a copy": lambda x: x.t().reshape(6),
    "a conversion": lambda x: x.bfloat16().float(),
    "a number read": lambda x: x.view(-1)[: int(x[0, 0].item()) + 1],
    "chosen rows": lambda x: x[torch.tensor([0])],
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_torch_computes_is_not_recorded(name: str) -> None:
    memory, given = torch.empty(4096, dtype=torch.uint8), torch.ones(2, 3)
    found, recording = record(Stages(same, COMPUTED[name]), given, no_meta(), memory)
    assert torch.equal(found.hidden, COMPUTED[name](torch.ones(2, 3))) and recording is None


@pytest.mark.parametrize("name", ["an operation", "in place", "a conversion"])
def test_stages_that_torch_computes_are_called_in_each_replay(name: str) -> None:
    """The layers between them are replayed."""
    memory, work = torch.empty(4096, dtype=torch.uint8), COMPUTED[name]
    recording = None
    for value in range(1, 5):
        given = torch.full((2, 3), float(value))
        stages = Stages(lambda x: work(x + 1), copied_by_a_kernel, lambda x: work(x.clone()))
        if recording is None:
            found, recording = record(stages, given, no_meta(), memory)
            assert recording is not None
        else:
            found = recording.replay(stages, given, no_meta())
        hidden = work(torch.full((2, 3), float(value + 1)))
        assert torch.equal(found.hidden, hidden)
        assert torch.equal(found.output, work(hidden.clone()))


def copied_by_a_kernel(x: torch.Tensor) -> torch.Tensor:
    return join_columns([x])


def test_other_looks_at_memory_are_recorded() -> None:
    memory, given = torch.empty(4096, dtype=torch.uint8), torch.arange(6.0).view(2, 3)
    stages = Stages(same, lambda x: x.float().contiguous().view(3, 2)[1:])
    looks = record(stages, given, no_meta(), memory)[1]
    assert looks is not None
    replayed = looks.replay(stages, given + 5, no_meta())
    assert replayed.hidden.tolist() == [[7.0, 8.0], [9.0, 10.0]]


def test_work_that_needs_more_memory_than_there_is_goes_launch_by_launch() -> None:
    memory = torch.empty(4096, dtype=torch.uint8)

    def work(x: torch.Tensor) -> torch.Tensor:
        for _ in range(9):  # one after the other: each takes the place of the last
            x = x.new_empty(x.shape)
        return x

    assert record(Stages(same, work), torch.zeros(300), no_meta(), memory)[1] is not None
    assert record(Stages(same, work), torch.zeros(600), no_meta(), memory)[1] is None
    large = Stages(same, copied_by_a_kernel, lambda x: x.new_ones(900))
    found, recording = record(large, torch.zeros(20, 20), no_meta(), memory)
    assert recording is not None and len(found.output) == 900
    assert len(recording.replay(large, torch.zeros(20, 20), no_meta()).output) == 900
