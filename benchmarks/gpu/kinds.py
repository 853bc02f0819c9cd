"""Measures decode steps of models that differ from a plain decoder in one respect: sliding windows,
quantised weights, experts, a draft model or structured outputs. Weights are random."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from shapes import config_directory
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine import LLM, SamplingParams, StructuredOutputsParams
from engine.models.families import FAMILIES
from engine.models.work import ModelWork, Shapes
from gpu.box import Box, Row, Rows, share
from gpu.engines import Load, decode_seconds, engine_at, prompt_of, run

GIB = 1 << 30
KV_BYTES = 2  # of a number in the cache
PROMPT_TOKENS = 2048  # least number of prompt tokens in a step
# Bytes of a weight; 4 bits have 16 bits of scale for each 32 weights.
WEIGHT_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2 / 32}
Config = dict[str, Any]

COMMON: Config = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
    "eos_token_id": 2,
}
GEMMA3_1B: Config = {
    **COMMON,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "vocab_size": 262_144,
    "tie_word_embeddings": True,
}
LLAMA_8B: Config = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B: Config = {  # a quarter of the layers
    **COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
}
# What a dry run makes smaller.
SMALL: Config = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}


def engine_for(box: Box, root: str, **options: Any) -> AbstractContextManager[LLM]:
    """An engine for up to 64 requests on random weights."""
    return engine_at(box, root, **({} if box.is_dry else {"max_num_seqs": 64}), **options)


def config_of(box: Box, published: Config) -> Config:
    """The config.json of a model, with small sizes in a dry run."""
    small = {key: value for key, value in SMALL.items() if key in published}
    return {**published, **small} if box.is_dry else published


def floor_of(box: Box, config: Config, loads: Sequence[Load], weight_bytes: float) -> float:
    """Least seconds of a decode step of these requests, half of whose tokens exist. The output
    layer has 16 bits."""
    spec = FAMILIES[config["architectures"][0]](config)
    new = np.ones(len(loads), dtype=np.int64)
    context = np.array([len(load.prompt) + load.num_new // 2 for load in loads])
    head = config["vocab_size"] * config["hidden_size"]

    def work(cell: float) -> ModelWork:
        return Shapes(spec).work(new, context, (cell, KV_BYTES), num_logits=len(loads))

    num_bytes = work(weight_bytes).bytes + (2 - weight_bytes) * head
    return max(num_bytes / box.ceilings.bytes, work(2).operations / box.ceilings.operations)


def loads_of(box: Box, num: int, length: int, num_new: int = 48) -> list[Load]:
    """Requests of one length, or a few tokens in a dry run."""
    length, num_new = (5, 3) if box.is_dry else (length, num_new)
    return [Load(prompt_of(length, index), num_new) for index in range(num)]


def start_row(what: str, began: float) -> Row:
    return {"what": f"start, {what}", "ms": 1e3 * (time.perf_counter() - began)}


def step_row(what: str, loads: Sequence[Load], seconds: float, floor: float) -> Row:
    return {
        "what": what,
        "requests": len(loads),
        "context": len(loads[0].prompt),
        "ms": 1e3 * seconds,
        "tok/s": len(loads) / seconds,
        "floor ms": 1e3 * floor,
        "%": share(floor, seconds),
    }


def steps(
    box: Box, config: Config, what: str, length: int, weights: str = "bfloat16", **options: Any
) -> Rows:
    """Start an engine, and measure its decode steps after prompts of ``length`` tokens."""
    began = time.perf_counter()
    with config_directory(config) as root, engine_for(box, root, **options) as llm:
        yield start_row(what, began)
        for num in box.sizes((1, 64), (2,)):
            # Long enough that all requests decode together after the last prompt's step.
            loads = loads_of(box, num, length, 48 + num * length // PROMPT_TOKENS)
            taken = decode_seconds(run(llm, loads), num)
            floor = floor_of(box, config, loads, WEIGHT_BYTES[weights])
            yield step_row(what, loads, taken, floor) | held_of(llm, loads, options)


def held_of(llm: LLM, loads: Sequence[Load], options: Config) -> Row:
    """MiB of keys and values of these requests while they decode, if the size of the pool is given
    in bytes."""
    if (pool := options.get("kv_cache_memory_bytes")) is None:
        return {}
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    for index, load in enumerate(loads):
        engine.add_request(f"held {index}", load.prompt, params)
    held = first = 0
    while engine.has_unfinished_requests():
        first += sum(len(out.outputs[0].token_ids) == 2 for out in engine.step())
        if first == len(loads) and not held:
            held = sum(group.num_blocks for group in engine.stats().kv_groups)
    each = pool / engine.session.client.decided.num_kv_blocks
    return {"KV MiB": held * each / (1 << 20)}


def windows(box: Box) -> Rows:
    """Gemma 3 1B after 8,192 tokens, and the same sizes if every layer kept all tokens."""
    config = config_of(box, GEMMA3_1B)
    full = {**config, "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    pool = {"kv_cache_memory_bytes": (24 * GIB if not box.is_dry else 1 << 20)}
    pool |= {"num_kv_blocks": None} | ({} if box.is_dry else {"max_model_len": 9216})
    for what, each in (("Gemma 3 1B, windows of 512", config), ("all tokens", full)):
        yield from steps(box, each, what, 8192, **pool)


def quantised(box: Box) -> Rows:
    """Llama 3.1 8B with weights of each format, after 1,024 tokens."""
    config = config_of(box, LLAMA_8B)
    for weights in WEIGHT_BYTES:
        given = {} if weights == "bfloat16" else {"quantization": weights}
        yield from steps(box, config, f"Llama 8B, {weights}", 1024, weights, **given)


def experts(box: Box) -> Rows:
    """12 layers of Qwen3-30B-A3B, after 1,024 tokens."""
    config = config_of(box, QWEN3_30B_A3B)
    for weights in ("bfloat16", "int4"):
        given = {} if weights == "bfloat16" else {"quantization": weights}
        yield from steps(box, config, f"128 experts, {weights}", 1024, weights, **given)


def drafts(box: Box) -> Rows:
    """A model without drafts, and with a draft model of the same weights, which is always right."""
    shape = next(iter(box.shapes().values()))
    with config_directory(shape.hf_config(4096)) as root:
        drafting = {"method": "draft_model", "model": root, "num_speculative_tokens": 3}
        for what, given in (("no drafts", {}), ("drafts", {"speculative_config": drafting})):
            with engine_for(box, root, **given) as llm:
                for num in box.sizes((1, 64), (2,)):
                    loads = loads_of(box, num, 256, 128)
                    run(llm, loads)
                    before = llm.llm_engine.stats().counters
                    marks = run(llm, loads)
                    taken = marks[-1][0] - marks[0][0]
                    after = llm.llm_engine.stats().counters
                    drafted, accepted = (
                        after.get(name, 0) - before.get(name, 0)
                        for name in ("drafts.num_draft_tokens", "drafts.num_accepted_tokens")
                    )
                    yield {
                        "what": what,
                        "requests": num,
                        "tok/s": marks[-1][1] / taken,
                        "steps": len(marks) - 1,
                        "drafted": drafted,
                        "accepted": accepted,
                    }


def grammars(box: Box) -> Rows:
    """Texts with and without a JSON schema."""
    shape = next(iter(box.shapes().values()))
    digits = {"type": "string", "pattern": "[0-9]{200}"}
    form = StructuredOutputsParams(
        json={"type": "object", "properties": {"n": digits}, "required": ["n"]}
    )
    num_new = 12 if box.is_dry else 128
    with config_directory(shape.hf_config(4096)) as root:
        byte_tokenizer().save(str(Path(root) / "tokenizer.json"))
        with engine_for(box, root, skip_tokenizer_init=False) as llm:
            for num in box.sizes((1, 64), (2,)):
                for what, given in (("any text", None), ("JSON schema", form)):
                    params = SamplingParams(
                        temperature=0,
                        max_tokens=num_new,
                        ignore_eos=given is None,
                        structured_outputs=given,
                    )
                    texts = [{"prompt_token_ids": prompt_of(9, i)} for i in range(num)]
                    llm.generate(texts, params, use_tqdm=False)  # compiles the grammar
                    began = time.perf_counter()
                    outs = llm.generate(texts, params, use_tqdm=False)
                    taken = time.perf_counter() - began
                    count = sum(len(out.outputs[0].token_ids) for out in outs)
                    if not count:
                        raise ValueError(f"{what}: no tokens, {outs[0].outputs[0]}")
                    right = sum(out.outputs[0].text.lstrip().startswith("{") for out in outs)
                    yield {
                        "what": what,
                        "requests": num,
                        "tok/s": count / taken,
                        "objects": right,
                    }


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose tokens are the 256 bytes, after three special tokens."""
    names = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    made.add_special_tokens(names[:3])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made
