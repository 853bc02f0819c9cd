"""Random tiny models whose layers have windows or chunks, and random engines to run them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from e2e.general_models import general_config
from e2e.references import Tally
from e2e.tiny_models import FULL, SLIDING, VOCAB, random_model, reference, save
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from engine import EngineArgs, LLMEngine, SamplingParams
from engine.config.kv_groups import request_blocks
from kernels.reference.kv_rows import decode_rows, encode_rows

Options = dict[str, Any]
CHUNKED = "chunked_attention"
WINDOWS = (1, 2, 3, 5, 8, 17)
KEPT = {"auto": (None, 1e-4), "bfloat16": (torch.bfloat16, 4e-3), "int8": (torch.int8, 1e-2)}
"""Values of ``kv_cache_dtype``: the type of the cache, and the largest relative margin by which a
token may miss the best logit. A last bit that differs before rounding may be a step after it."""
EXPERTS: Options = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}


def _types(dice: random.Random, num: int, *, ends_full: bool = False) -> list[str]:
    types = [dice.choice((SLIDING, FULL)) for _ in range(num)]
    return [*types[:-1], FULL] if ends_full else types


def _typed(**more: Any) -> Callable[[random.Random, Options], Options]:
    """A family whose config.json has the type of each layer."""
    return lambda dice, base: {"layer_types": _types(dice, base["num_hidden_layers"]), **more}


def _plain(**more: Any) -> Callable[[random.Random, Options], Options]:
    """A family with the same window in all layers."""
    return lambda dice, base: more


def _qwen(dice: random.Random, base: Options) -> Options:
    num = base["num_hidden_layers"]
    types = {"layer_types": _types(dice, num)} if dice.random() < 0.5 else {}
    windows = {"use_sliding_window": True, "max_window_layers": dice.randrange(num + 1)}
    return {**EXPERTS, **windows, **types}


def _smollm3(dice: random.Random, base: Options) -> Options:
    num = base["num_hidden_layers"]
    ropes = [dice.choice((0, 1)) for _ in range(num)]
    types = {"layer_types": _types(dice, num)} if dice.random() < 0.5 else {}
    return {"use_sliding_window": dice.random() < 0.7, "no_rope_layers": ropes, **types}


def _shared(dice: random.Random, ends_full: bool) -> Options:
    """Types of layers of which the last read the caches of earlier layers."""
    num, num_shared = dice.choice((3, 4, 5, 6)), dice.choice((0, 0, 1, 2))
    types = _types(dice, num, ends_full=ends_full)
    if not set(types) <= set(types[: num - num_shared]):
        num_shared = 0
    return {"num_hidden_layers": num, "layer_types": types, "num_kv_shared_layers": num_shared}


def _gemma3n(dice: random.Random, base: Options) -> Options:
    shared = _shared(dice, ends_full=False)
    sparsity = [dice.choice((0.0, 0.5)) for _ in range(shared["num_hidden_layers"])]
    sizes = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
    return {**shared, **sizes, "laurel_rank": 8, "activation_sparsity_pattern": sparsity}


def _gemma4(dice: random.Random, base: Options) -> Options:
    sizes = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
    heads = {"global_head_dim": dice.choice((16, 32)), "attention_k_eq_v": dice.random() < 0.4}
    if heads["attention_k_eq_v"]:
        heads["num_global_key_value_heads"] = dice.choice((1, 2))
    return {**_shared(dice, ends_full=True), **sizes, **heads}


def _llama4(dice: random.Random, base: Options) -> Options:
    num = base["num_hidden_layers"]
    types = [CHUNKED if kind == SLIDING else FULL for kind in _types(dice, num)]
    ropes = [1, *(dice.choice((0, 1)) for _ in range(num - 1))]
    scaling = {"floor_scale": dice.choice((2, 16, 64)), "attn_scale": dice.choice((0.1, 1.0))}
    size = dice.choice((2, 3, 5, 8, 16, 17, 32))
    return {
        **scaling,
        "layer_types": types,
        "no_rope_layers": ropes,
        "attention_chunk_size": size,
        "attn_temperature_tuning": dice.random() < 0.8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
    }


def _mimo(dice: random.Random, base: Options) -> Options:
    types = _types(dice, base["num_hidden_layers"])
    heads = {"num_key_value_heads": 1, "head_dim": 16, "v_head_dim": dice.choice((8, 16))}
    return {**EXPERTS, **heads, "layer_types": types}


def _ministral3(dice: random.Random, base: Options) -> Options:
    """Rotary embeddings of yarn, and queries that are scaled by position."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": dice.choice((8, 16, 64)),
        "llama_4_scaling_beta": dice.choice((0.0, 0.1, 0.5)),
    }
    return {"rope_parameters": rope}


FAMILIES: dict[str, Callable[[random.Random, Options], Options]] = {
    "Gemma2Config": _typed(query_pre_attn_scalar=16, attn_logit_softcapping=2.0),
    "Gemma3TextConfig": _typed(query_pre_attn_scalar=16),
    "Gemma3nTextConfig": _gemma3n,
    "Gemma4TextConfig": _gemma4,
    "Gemma4UnifiedTextConfig": _gemma4,
    "MistralConfig": _plain(),
    "MinistralConfig": _typed(),
    "Ministral3Config": _ministral3,
    "MixtralConfig": _plain(num_local_experts=4),
    "Phi3Config": _plain(head_dim=None),
    "PhimoeConfig": _plain(num_local_experts=4),
    "GptOssConfig": _typed(num_local_experts=4, num_experts_per_tok=2),
    "Cohere2Config": _typed(),
    "Cohere2MoeConfig": _typed(**EXPERTS),
    "Olmo3Config": _typed(),
    "MiMoV2FlashConfig": _mimo,
    "Llama4TextConfig": _llama4,
    "Qwen2Config": _qwen,
    "Qwen2MoeConfig": _qwen,
    "Qwen3Config": _qwen,
    "Qwen3MoeConfig": _qwen,
    "Starcoder2Config": _plain(),
    "VaultGemmaConfig": _typed(),
    "Exaone4Config": _typed(),
    "ExaoneMoeConfig": _typed(**EXPERTS),
    "SmolLM3Config": _smollm3,
    "AfmoeConfig": _typed(**EXPERTS, num_dense_layers=1),
    "BeamConfig": _typed(**EXPERTS),
    "CwmConfig": _typed(),
    "Dots1Config": _typed(**EXPERTS),
    "FlintConfig": _typed(**EXPERTS, mlp_only_layers=[0]),
    "GraniteSWAConfig": _typed(),
    "GraniteMoeSWAConfig": _typed(**EXPERTS),
    "IQuestCoderConfig": _typed(),
    "Kolibri1Config": _typed(**EXPERTS),
    "LagunaConfig": _typed(**EXPERTS),
    "Lfm3Config": _typed(**EXPERTS),
    "MellumConfig": _typed(**EXPERTS),
}


class RandomModel:
    """A random model of a family, in a directory and as transformers loads it."""

    def __init__(self, config_class: str, dice: random.Random, path: Path) -> None:
        heads = dice.choice((2, 4))
        base = {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "num_hidden_layers": dice.choice((1, 2, 3, 4, 5)),
            "num_attention_heads": heads,
            "num_key_value_heads": dice.choice((1, 2, heads)),
            "head_dim": dice.choice((16, 16, 32)),
            "sliding_window": dice.choice(WINDOWS),
        }
        self.options = {**base, **FAMILIES[config_class](dice, base)}
        given = {key: value for key, value in self.options.items() if value is not None}
        save(random_model(general_config(config_class, given), dice.randrange(1000)), path)
        self.path = path
        self.window: int = given.get("attention_chunk_size", given["sliding_window"])
        self._model: PreTrainedModel = reference(path)

    def check(
        self,
        prompt: list[int],
        tokens: list[int],
        params: SamplingParams,
        tally: Tally,
        *,
        kept: str,
    ) -> None:
        """Assert that each token is the likeliest one after those before it, or nearly so. kept: a
        key of KEPT."""
        cell, most = KEPT[kept]
        logits = self._logits([*prompt, *tokens[:-1]], cell)[len(prompt) - 1 :]
        for place, (raw, token) in enumerate(zip(logits, tokens, strict=True)):
            row = _edited(raw, prompt, tokens[:place], params)
            margin = float((row.max() - row[token]) / row.abs().max())
            tally.compared += 1
            tally.ties += margin > 0
            assert margin < most, (
                f"token {place} after {len(prompt)} is {token}, transformers says "
                f"{int(row.argmax())} by a margin of {margin:.2e}"
            )

    @torch.inference_mode()
    def _logits(self, ids: list[int], cell: torch.dtype | None) -> torch.Tensor:
        """Logits [N, V], with keys and values stored in rows of ``cell`` numbers if it is given."""
        cache = None if cell is None else RoundingCache(self._model.config, cell)
        given = torch.tensor([ids])
        found = self._model(given, past_key_values=cache, use_cache=cache is not None)
        return found.logits[0].float()


class RoundingCache(DynamicCache):
    """Keys and values as a cache of another type gives them back."""

    def __init__(self, config: PreTrainedConfig, cell: torch.dtype) -> None:
        super().__init__(config=config)
        self._cell = cell

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **more: Any) -> Any:
        rounded = [
            decode_rows(encode_rows(states, self._cell)).float() for states in (keys, values)
        ]
        return super().update(*rounded, *args, **more)


def _edited(
    row: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams
) -> torch.Tensor:
    """Logits [V] after penalties."""
    row, penalty = row.clone(), params.repetition_penalty
    for token in {*prompt, *output} if penalty != 1 else ():
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token in set(output):
        row[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return row


def draw_options(dice: random.Random, draft: Path, log: Path, *, is_native: bool) -> Options:
    """Options of an engine. ``draft``: directory of a draft model; ``log``: file of a step log."""
    num_drafts, num_seqs = dice.choice((1, 2, 3, 5)), dice.choice((1, 2, 4, 8))
    options: Options = {
        "max_model_len": dice.choice((96, 128, 160)),
        "block_size": dice.choice((1, 4, 8, 16, 32)),
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": max(num_seqs, num_drafts + 1, dice.choice((5, 7, 16, 33, 256))),
        "num_kv_blocks": 400,
        "async_scheduling": dice.random() < 0.5,
        "enable_prefix_caching": dice.random() < 0.8,
        "scheduling_policy": dice.choice(("fcfs", "fcfs", "priority", "residual-sjf")),
        "enforce_eager": dice.random() < 0.3,
        "kv_cache_dtype": dice.choice(("auto", "auto", *KEPT)),
        "batch_invariant": dice.choice((None, None, True)) if is_native else None,
        "step_log": log,
    }
    methods: list[Options | None] = [
        None,
        {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        {"method": "suffix"},
        {"method": "draft_model", "model": str(draft)},
    ]
    method, size = dice.choice(methods), {"num_speculative_tokens": num_drafts}
    drafting = method and {**method, **size, "adaptive": dice.random() < 0.3}
    return {**options, "speculative_config": drafting}


def start(path: Path, options: Options) -> LLMEngine:
    given = {"skip_tokenizer_init": True, "log_level": "error", "dtype": "float32"}
    args = EngineArgs(model=str(path), num_threads=1, **given, **options)
    return LLMEngine.from_engine_args(args)


def with_small_pool(dice: random.Random, path: Path, options: Options) -> Options:
    """The options with a pool for one request of full length and a few blocks more."""
    with start(path, {**options, "step_log": None}) as engine:
        decided = engine.session.client.decided
    groups, size = decided.kv_groups, options["block_size"]
    longest = request_blocks(groups, size, decided.max_model_len)
    return {**options, "num_kv_blocks": longest + 1 + dice.choice((0, 1, 2, 4, 8))}


def draw_params(dice: random.Random, num_new: int) -> SamplingParams:
    """Greedy sampling of ``num_new`` tokens, in one or several answers."""
    several = {"n": dice.choice((2, 3)), "temperature": 1.0, "top_k": 1}
    return SamplingParams(
        max_tokens=num_new,
        ignore_eos=True,
        detokenize=False,
        logprobs=dice.choice((None, None, 2)),
        repetition_penalty=dice.choice((1.0, 1.0, 1.0, 1.3)),
        frequency_penalty=dice.choice((0.0, 0.0, 0.0, 0.4)),
        **(several if dice.random() < 0.3 else {"temperature": 0.0}),
    )


def draw_prompts(dice: random.Random, window: int, longest: int) -> list[list[int]]:
    """Prompts of about one, two and five windows, some repetitive, and two that begin alike."""
    lengths = [1, window - 1, window, window + 1, 2 * window, 2 * window + 3, 5 * window + 2]
    lengths += [dice.randrange(1, 70), dice.randrange(1, 70)]
    made = []
    for length in dice.sample(lengths, dice.choice((4, 6, 9))):
        size = min(max(1, length), longest)
        period = dice.choice((5, size, size))
        beat = [dice.randrange(3, 290) for _ in range(period)]
        made.append((beat * size)[:size])
    one, other = dice.choice(made), dice.choice(made)
    return [*made, [*one[: dice.randrange(1, 60)], *other][:longest]]
