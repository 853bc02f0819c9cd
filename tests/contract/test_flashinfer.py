"""FlashInfer's attention, held to what its documentation says by calls that are recorded: the
stand-in computes from its arguments alone (see support.fake_flashinfer)."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from support import fake_flashinfer
from support.fake_flashinfer import FakeFlashInfer
from support.paged_cache import Cache, assert_near

from kernels import paged_attention, reference
from kernels.bodies import ATTENTION, AttentionNeeds, Refusal
from kernels.flashinfer import FlashInferAttention
from kernels.meta import HostLens

BLOCK, HEAD_DIM = 16, 64
# (new tokens, context) of each sequence
STEPS = {
    "decodes": [(1, 0), (1, 15), (1, 16), (1, 70)],
    "drafts": [(3, 40), (3, 13)],
    "prompts": [(40, 0), (16, 0), (5, 27)],
    "mixed": [(1, 33), (1, 16), (20, 31), (2, 0)],
}
VARIANTS = {
    "full": {},
    "window": {"window": 7},
    "softcap": {"softcap": 20.0},
    "both": {"window": 33, "softcap": 30.0},
}
NEEDS = AttentionNeeds(
    torch.device("cpu"), torch.bfloat16, torch.bfloat16, 128, 64, frozenset({"window", "softcap"})
)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeFlashInfer:
    return fake_flashinfer.install(monkeypatch)


def body_of(fake: FakeFlashInfer) -> FlashInferAttention:
    return FlashInferAttention(fake, NEEDS.device, workspace_bytes=1 << 10)


def cache_of(step: list[tuple[int, int]], rng: torch.Generator, kv_heads: int = 2) -> Cache:
    cache = Cache(step, (kv_heads, HEAD_DIM), rng, block=BLOCK, dtype=torch.bfloat16)
    meta = cache.meta
    lens = HostLens(meta.query_start.numpy(), meta.seq_lens.numpy())
    cache.meta = replace(meta, host_lens=lens)
    return cache


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("step", STEPS)
def test_attention_is_the_references(step, variant, group, fake, seed):
    rng = torch.Generator().manual_seed(seed)
    cache = cache_of(STEPS[step], rng)
    num_padding = 3  # tokens behind the last sequence
    q = torch.randn(cache.num_tokens + num_padding, 2 * group, HEAD_DIM, generator=rng).bfloat16()
    options = {"scale": 0.2, **VARIANTS[variant]}
    got = paged_attention(q, cache.kv, cache.meta, body=body_of(fake), **options)
    assert_near(got, q, cache, reference.Variant(**options), weights_rounded=False)
    assert not got[cache.num_tokens :].any()
    kinds = {call.wrapper for call in fake.calls}
    assert kinds == {"decode" if step == "decodes" else "prefill"}


def test_what_is_served_has_the_workspace_that_is_recommended(fake, seed):
    body = ATTENTION["flashinfer"](NEEDS)
    assert isinstance(body, FlashInferAttention)
    cache = cache_of(STEPS["decodes"], torch.Generator().manual_seed(seed))
    q = torch.zeros(cache.num_tokens, 4, HEAD_DIM, dtype=torch.bfloat16)
    paged_attention(q, cache.kv, cache.meta, scale=0.2, body=body)
    (made,) = fake.named("init")
    assert made.args["float_workspace_buffer"].numel() >= 128 << 20


def test_a_step_is_planned_once_for_layers_of_a_form_and_wrappers_take_turns(fake, seed):
    rng = torch.Generator().manual_seed(seed)
    body = body_of(fake)
    for _ in range(4):
        cache = cache_of(STEPS["decodes"], rng)
        q = torch.randn(cache.num_tokens, 4, HEAD_DIM, generator=rng).bfloat16()
        for window in (0, 7, 0, 7):
            paged_attention(q, cache.kv, cache.meta, scale=0.2, window=window, body=body)
    assert len(fake.named("plan")) == 4 * 2
    assert len(fake.named("run")) == 4 * 4
    made = fake.named("init")
    assert len(made) == 2 * 2  # forms, turns of each
    assert len({call.args["float_workspace_buffer"].data_ptr() for call in made}) == 1


def test_a_plan_waits_until_the_device_has_copied_the_one_before_in_its_wrapper(
    fake, seed, monkeypatch
):
    told: list[tuple[str, int]] = []

    class Event:
        num = 0

        def __init__(self) -> None:
            self.num, Event.num = Event.num, Event.num + 1

        def record(self) -> None:
            told.append(("planned", self.num))

        def synchronize(self) -> None:
            told.append(("waited", self.num))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    body = body_of(fake)
    body.device = torch.device("cuda")
    for _ in range(3):
        cache = cache_of(STEPS["decodes"], torch.Generator().manual_seed(seed))
        q = torch.zeros(cache.num_tokens, 4, HEAD_DIM, dtype=torch.bfloat16)
        paged_attention(q, cache.kv, cache.meta, scale=0.2, body=body)
    assert told == [("planned", 0), ("planned", 1), ("waited", 0), ("planned", 2)]


@pytest.mark.parametrize(
    ("changed", "why", "way_out"),
    [
        ({"dtype": torch.float32}, "this model in float32", 'dtype="bfloat16"'),
        ({"cache_dtype": torch.float8_e4m3fn}, "float8_e4m3fn", 'kv_cache_dtype="auto"'),
        ({"head_dim": 80}, "64, 128, 256, and this model's are of 80", '"triton"'),
        ({"switches": frozenset({"sinks", "window"})}, "not serve sinks", "leave it out"),
        ({"switches": frozenset({"alibi"})}, "not serve alibi", "leave it out"),
        ({"switches": frozenset({"kv_scales"})}, "not serve kv_scales", "leave it out"),
        ({"switches": frozenset({"batch_invariant"})}, "not serve batch_invariant", "leave it out"),
    ],
)
def test_what_is_not_served_is_said_with_the_way_out(changed, why, way_out, fake):
    found = ATTENTION["flashinfer"](NEEDS._replace(**changed))
    assert isinstance(found, Refusal)
    assert why in found.reason and way_out in found.way_out
    assert not fake.calls


@pytest.mark.parametrize(
    ("hip", "capability", "why"),
    [("6.2", (9, 4), "another maker's"), (None, (7, 5), "compute capability 7.5")],
)
def test_other_devices_are_refused(hip, capability, why, fake, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = ATTENTION["flashinfer"](NEEDS._replace(device=torch.device("cuda")))
    assert isinstance(found, Refusal) and why in found.reason


def test_a_missing_package_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    found = ATTENTION["flashinfer"](NEEDS)
    assert isinstance(found, Refusal) and "cannot be imported" in found.reason
    assert "pip install flashinfer-python" in found.way_out
