"""Decode steps of ranks are recorded as a whole, with the operations of the ranks, and replayed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from e2e.paged import PagedRun
from e2e.references import WHOLE
from e2e.test_slices import load
from e2e.tiny_models import TinyModels
from support.rank_threads import run_all, shared_ranks

from engine import LLM, SamplingParams
from engine.layers.batch import ForwardBatch, Output
from engine.parallel.collectives import Collectives
from kernels.cpu.recording import Recorder
from kernels.meta import AttentionMeta, StateMeta

SIZE = 2
STEPS = 8
OF_ATTENTION = ("query_start", "seq_lens", "block_tables", "positions", "slots")
OF_STATES = ("query_start", "state_reads", "state_writes")
PROMPTS = {"a": [5, 6, 7], "b": [8, 9, 10, 11, 12], "c": [13]}


def placed(batch: ForwardBatch, first: ForwardBatch | None) -> ForwardBatch:
    """The same batch at the addresses of the first one, as recordings need it."""
    if first is None:
        return batch
    first.input_ids.copy_(batch.input_ids)
    first.positions.copy_(batch.positions)
    attn = []
    for meta, new in zip(first.attn, batch.attn, strict=True):
        names = OF_ATTENTION if isinstance(meta, AttentionMeta) else OF_STATES
        for name in names:
            getattr(meta, name).copy_(getattr(new, name))
        is_state = isinstance(new, StateMeta)
        attn.append(meta if is_state else replace(meta, max_seq_len=new.max_seq_len))
    return replace(first, attn=tuple(attn))


@pytest.mark.parametrize(
    ("name", "dtype", "output"),
    [
        ("llama", "bfloat16", "largest"),
        pytest.param("llama", "float32", "logits", marks=pytest.mark.slow),
        pytest.param("qwen3", "bfloat16", "logits", marks=pytest.mark.slow),
    ],
)
def test_replayed_steps_of_ranks_compute_the_same(
    tiny_models: TinyModels, name: str, dtype: str, output: Output
) -> None:
    def outputs(ranks: Collectives, recorder: Recorder | None) -> list[torch.Tensor]:
        run = PagedRun(load(tiny_models.path(name), ranks, dtype=dtype))
        for sequence, prompt in PROMPTS.items():
            run.prefill(sequence, prompt, 9)
        found, first = [], None
        for step in range(STEPS):
            if step % 3 == 1:
                ranks.barrier()  # recordings hold no numbers of operations
            order = sorted(PROMPTS)
            for sequence in order:
                run.grow(sequence, 1)
            batch = run.batch(order, {sequence: [20 + step] for sequence in order})
            batch = placed(batch, first)
            first = first or batch
            batch.recorder, batch.output = recorder, output
            hidden = run.model.forward(batch, run.kv)
            model = run.model
            if recorder is None:
                made = (model.largest if output == "largest" else model.output.part)(hidden.last)
            else:
                made = hidden.output
            assert made is not None
            found.append(made.clone())
        ranks.check()
        if recorder is not None:
            assert recorder.of_decodes(len(PROMPTS), output) is not None
        return found

    expected = run_all(shared_ranks(SIZE), lambda ranks: outputs(ranks, None))
    recorded = run_all(shared_ranks(SIZE), lambda ranks: outputs(ranks, Recorder(1 << 22)))
    for one, other in zip(expected, recorded, strict=True):
        assert len(one) == len(other) == STEPS
        assert all(map(torch.equal, one, other))


def test_recordings_hold_for_requests_that_sample_alike(tiny_models: TinyModels) -> None:
    """Draws from parts and from all logits alternate, in steps of one size."""
    options = {
        "max_model_len": 64,
        "num_threads": 1,
        "log_level": "error",
        "skip_tokenizer_init": True,
    }
    prompts = [{"prompt_token_ids": [5, 6, number]} for number in (7, 8)]
    found = []
    for size in (1, 2):
        path = str(tiny_models.path("llama"))
        with LLM(path, dtype="float32", tensor_parallel_size=size, **options) as model:
            tokens = []
            for more in ({}, {"top_k": 2}, {}, {"top_p": 0.5}, {"temperature": 0.0}):
                fields = {"temperature": 1.5, "seed": 3, "max_tokens": 12, **WHOLE}
                params = SamplingParams(**(fields | more))
                outputs = model.generate(prompts, params, use_tqdm=False)
                tokens.append([output.outputs[0].token_ids for output in outputs])
        found.append(tokens)
    assert found[0] == found[1]
    assert found[0][0] == found[0][2] != found[0][1]
