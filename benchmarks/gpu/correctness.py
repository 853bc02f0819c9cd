"""Checks every kernel against the reference in float64, and tokens against transformers'."""

from __future__ import annotations

from dataclasses import fields
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from shapes import Step

import kernels
from engine import LLM, SamplingParams
from gpu.box import Box, Row, Rows
from kernels import AttentionMeta, reference
from kernels.bodies import triton_for
from kernels.cpu import sampling as on_cpu

LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
FP8 = torch.float8_e4m3fn
HEADS, KV_HEADS = 8, 2
STEPS = {
    "decodes": [(1, 0), (1, 16), (1, 300), (1, 63)],
    "long decodes": [(1, 5000), (1, 2047), (1, 1)],
    "drafts": [(1, 63), (4, 20), (2, 140)],
    "mixed": [(1, 20), (1, 150), (5, 0), (17, 13), (200, 61)],
}
DRY_STEPS = {"decodes": [(1, 3), (1, 40)], "mixed": [(1, 20), (5, 0), (18, 13)]}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window + softcap": {"window": 40, "softcap": 20.0},
    "sinks": {"sinks": True},
}
# Cache, head size, variant. Each compiles kernels of its own, which takes most of the time.
CASES = [
    *((torch.bfloat16, 128, variant) for variant in VARIANTS),
    *((torch.bfloat16, head_dim, "plain") for head_dim in (64, 80, 256)),
    (FP8, 128, "plain"),
    (torch.float16, 128, "plain"),
    (torch.float32, 64, "plain"),
]
DRY_CASES = [(torch.float32, 64, "window + softcap"), (torch.float16, 80, "sinks")]
TOLERATED = 1e-3  # of the largest logit: nearer than that, either token is right


def off_by(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, as a share of the largest number; NaN where something is NaN."""
    wanted = wanted.double().cpu()
    return float((got.double().cpu() - wanted).abs().max() / wanted.abs().max())


def judged(what: str, case: str, error: float, limit: float) -> Row:
    return {"what": what, "case": case, "error": error, "limit": limit, "ok": error <= limit}


def at_home(meta: AttentionMeta) -> AttentionMeta:
    """On the CPU, where the reference looks at it."""
    values = [getattr(meta, one.name) for one in fields(meta)]
    moved = [v.cpu() if isinstance(v, torch.Tensor) else v for v in values]
    return AttentionMeta(*moved[:9])


def attention(box: Box) -> Rows:
    for kept, head_dim, variant in DRY_CASES if box.is_dry else CASES:
        dtype = torch.bfloat16 if kept is FP8 else kept
        for label, sequences in (DRY_STEPS if box.is_dry else STEPS).items():
            step = Step(sequences, 64, box.device)
            cache = step.cache(KV_HEADS, head_dim, dtype).to(kept)
            q = torch.randn(step.num_tokens, HEADS, head_dim, dtype=dtype, device=box.device)
            name = f"{str(kept).removeprefix('torch.')}, head {head_dim}, {variant}, {label}"
            error = _attend(box, q, cache, step, VARIANTS[variant])
            yield judged("attention", name, error, LIMITS[dtype])


def _attend(
    box: Box, q: torch.Tensor, cache: torch.Tensor, step: Step, options: dict[str, Any]
) -> float:
    chosen = {"scale": q.shape[-1] ** -0.5, **options}
    if "sinks" in options:
        chosen["sinks"] = torch.randn(HEADS, device=box.device)
    if cache.dtype is FP8:
        chosen["kv_scales"] = torch.rand(2, KV_HEADS, device=box.device) + 0.5
    got = kernels.paged_attention(q, cache, step.meta(), **chosen)
    home = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in chosen.items()}
    wide = cache.float().double() if cache.dtype is FP8 else cache.double()
    variant = reference.Variant(**home)
    wanted = reference.paged_attention(q.double().cpu(), wide.cpu(), at_home(step.meta()), variant)
    return off_by(got, wanted)


def around_attention(box: Box) -> Rows:
    """The write of K and V, norms and activations."""
    dtype, dim = box.dtype, 64
    step = Step(DRY_STEPS["mixed"], 64, box.device)
    width = (HEADS + 2 * KV_HEADS) * dim
    qkv = torch.randn(step.num_tokens, width, dtype=dtype, device=box.device)
    table = torch.randn(128, dim, device=box.device)
    weights = [torch.rand(dim, dtype=dtype, device=box.device) + 0.5 for _ in range(2)]
    cache = step.cache(KV_HEADS, dim, dtype)
    before = cache.cpu().double()
    q = kernels.qkv_rope_write(
        qkv,
        cache,
        step.meta(),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=dim,
        cos_sin=table,
        q_norm=weights[0],
        k_norm=weights[1],
    )
    rope = reference.Rope(table.cpu().double(), False)
    norm = reference.HeadNorm(*(w.cpu().double() for w in weights), 1e-6, False)
    heads = (HEADS, KV_HEADS, dim)
    wanted = reference.qkv_rope_write(
        qkv.cpu().double(), before, at_home(step.meta()), heads, rope, norm
    )
    yield judged("KV write", "queries", off_by(q, wanted), LIMITS[dtype])
    yield judged("KV write", "cache", off_by(cache, before), LIMITS[dtype])

    x, y = (torch.randn(33, 512, dtype=dtype, device=box.device) for _ in range(2))
    weight = torch.rand(512, dtype=dtype, device=box.device)
    mine = kernels.add_rms_norm(x, y, weight, 1e-6)
    theirs = reference.add_rms_norm(*(t.cpu().double() for t in (x, y, weight)), 1e-6)
    for name, got, exact in zip(("normed", "sum"), mine, theirs, strict=True):
        yield judged("add + norm", name, off_by(got, exact), LIMITS[dtype])
    exact = reference.act_mul(x.cpu().double(), "silu")
    yield judged("activation", "silu", off_by(kernels.act_mul(x, "silu"), exact), LIMITS[dtype])


def sampling(box: Box) -> Rows:
    """Tokens are those of the CPU's body, which is held to a sort in float64."""
    vocab, num = (1000, 4) if box.is_dry else (151936, 256)
    rng = np.random.default_rng(0)
    logits = torch.randn(num, vocab, generator=torch.Generator().manual_seed(0)) * 3
    columns = (
        rng.choice([0.0, 0.7, 1.0], num),
        rng.choice([0, 1, 50], num).astype(np.int32),
        rng.choice([1.0, 0.9], num),
        rng.choice([0.0, 0.02], num),
        rng.integers(0, 2**64, num, dtype=np.uint64),
        rng.integers(0, 10**6, num).astype(np.int32),
    )
    there = logits.to(box.device)
    got = (triton_for(there) or on_cpu).choose_tokens(there, *columns)
    wanted = on_cpu.choose_tokens(logits, *columns)
    yield judged("sampler", f"{num} rows of {vocab}", float((got != wanted).sum()), 0.0)


def tokens(box: Box) -> Rows:
    """Greedy tokens of a tiny random model in float32, with graphs and without."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=2,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    longest, num_new = (12, 3) if box.is_dry else (300, 32)
    rng = np.random.default_rng(0)
    lengths = (5, longest) if box.is_dry else (1, 5, 64, 130, longest)
    prompts = [rng.integers(3, 300, n).tolist() for n in lengths]
    with TemporaryDirectory() as root:
        model.save_pretrained(root)
        for is_eager in (False, True):
            ours = _generate(box, root, prompts, num_new, is_eager)
            worst = max(map(lambda ids, new: gap_to_best(model, ids, new), prompts, ours))
            name = "launched call by call" if is_eager else "recorded steps"
            yield judged("greedy tokens", name, worst, TOLERATED)


def _generate(
    box: Box, root: str, prompts: list[list[int]], num_new: int, is_eager: bool
) -> list[list[int]]:
    # An engine tries its largest step when it starts, which an interpreter takes long for.
    longest, most_tokens, most_requests = (64, 32, 4) if box.is_dry else (512, 256, 8)
    llm = LLM(
        root,
        device="cuda",
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=is_eager,
        cudagraph_capture_sizes=[1, len(prompts)],
        num_kv_blocks=64,
        max_model_len=longest,
        max_num_seqs=most_requests,
        max_num_batched_tokens=most_tokens,
        log_level="error",
    )
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    try:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        llm.shutdown()
    return [list(out.outputs[0].token_ids) for out in outputs]


@torch.inference_mode()
def gap_to_best(model: torch.nn.Module, prompt: list[int], new: list[int]) -> float:
    """How far the chosen tokens' logits lie below the best, as a share of the largest."""
    logits = model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
    best, chosen = logits.max(-1).values, logits[range(len(new)), new]
    return float(((best - chosen) / logits.abs().amax(-1)).max())


def correctness(box: Box) -> Rows:
    for part in (around_attention, sampling, tokens, attention):
        yield from part(box)
