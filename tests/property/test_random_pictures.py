"""Random models that see, pictures, prompts, options and schedules: the tokens of transformers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from e2e.picture_cases import Prompt, Seen, as_file, picture
from e2e.picture_situations import SIZES, submitted
from e2e.references import Tally, pool_for
from e2e.seeing_models import CASES, TEXT, Case, make_seeing_model
from e2e.test_ngram import NGRAM
from e2e.test_suffix import SUFFIX

from engine import LLM, SamplingParams
from engine.errors import RequestError
from engine.sched.policies import POLICIES

NUM_MODELS, NUM_RUNS = 2, 3
Dice = random.Random
SHARES = ("long_prefill_token_threshold", "max_mixed_prefill_tokens")
MODES = ("RGB", "RGBA", "L", "LA", "P", "CMYK", "1", "I;16")
WORDS = ("a", " picture", "?", " of many words and more", "\n", "\n\n", " so", "\n\n\n!")


def clip_or_siglip(dice: Dice, vision: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **vision,
        "num_hidden_layers": dice.choice([2, 3]),
        "num_attention_heads": dice.choice([1, 2, 4]),
        "patch_size": dice.choice([4, 8]),
    }


def llava(dice: Dice, case: Case) -> Case:
    side = dice.choice([16, 24, 32])
    size = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    options = {
        **case.options,
        "vision_feature_layer": dice.choice([-2, -1, [-2, -1], [0, -1]]),
        "vision_feature_select_strategy": dice.choice(["default", "full"]),
    }
    if "siglip" in case.vision["model_type"]:
        size = {"size": {"height": side, "width": side}}
        options["vision_feature_select_strategy"] = "full"
    elif dice.random() < 0.5:
        size["do_pad"] = case.processor.startswith("Llava")  # type: ignore[assignment]
    vision = {**clip_or_siglip(dice, case.vision), "image_size": side}
    return case._replace(vision=vision, options=options, processing=size)


def onevision(dice: Dice, case: Case) -> Case:
    side = dice.choice([16, 32])
    every = [[side * rows, side * columns] for rows in range(1, 5) for columns in range(1, 5)]
    grid = dice.sample(every, dice.randrange(2, len(every)))
    most = dice.choice([1, 2, 4, 9])
    options = {"image_grid_pinpoints": grid, "vision_aspect_ratio": f"anyres_max_{most}"}
    processing = {"size": {"height": side, "width": side}, "image_grid_pinpoints": grid}
    vision = {**clip_or_siglip(dice, case.vision), "image_size": side}
    return case._replace(vision=vision, options=options, processing=processing)


def idefics(dice: Dice, case: Case) -> Case:
    tile, scale = dice.choice([16, 32]), dice.choice([1, 2])
    processing = {
        "size": {"longest_edge": tile * dice.choice([1, 2, 3])},
        "max_image_size": {"longest_edge": tile},
        "do_image_splitting": dice.random() < 0.8,
    }
    vision = {**clip_or_siglip(dice, case.vision), "image_size": tile}
    options = {"scale_factor": scale}
    return case._replace(vision=vision, options=options, processing=processing)


def qwen(dice: Dice, case: Case) -> Case:
    patch, depth = dice.choice([4, 8]), dice.choice([2, 3])
    side = 2 * patch
    least = dice.choice([1, 4]) * side * side
    size = {"shortest_edge": least, "longest_edge": least * dice.choice([1, 9, 20])}
    vision = {**case.vision, "patch_size": patch, "depth": depth, "num_heads": dice.choice([1, 2])}
    if "window_size" in vision:
        vision["window_size"] = side * dice.choice([1, 2, 3])
        vision["fullatt_block_indexes"] = dice.sample(range(depth), 1)
    else:
        vision["num_position_embeddings"] = dice.choice([4, 16, 36])
    if "deepstack_visual_indexes" in vision:
        vision["deepstack_visual_indexes"] = sorted(dice.sample(range(depth), dice.choice([1, 2])))
    rope = dict(case.text["rope_parameters"])
    rope["mrope_section"] = dice.choice([[2, 3, 3], [4, 2, 2], [3, 3, 2]])
    text = {**case.text, "rope_parameters": rope}
    if "partial_rotary_factor" in rope and dice.random() < 0.5:
        rope["partial_rotary_factor"] = 0.5
        text["head_dim"] = 32
    processing = {**case.processing, "patch_size": patch, "size": size}
    return case._replace(vision=vision, text=text, processing=processing)


def pixtral(dice: Dice, case: Case) -> Case:
    patch = dice.choice([4, 8])
    longest = patch * dice.choice([2, 3, 4, 8])
    vision = {**case.vision, "patch_size": patch, "image_size": patch * 8}
    vision |= {"num_hidden_layers": dice.choice([1, 2, 3]), "num_attention_heads": 2}
    processing = {"size": {"longest_edge": longest}, "patch_size": patch}
    options = dict(case.options)
    if "spatial_merge_size" in options:
        options["spatial_merge_size"] = dice.choice([1, 2])
    return case._replace(vision=vision, processing=processing, options=options)


def gemma(dice: Dice, case: Case) -> Case:
    patch, side = dice.choice([(4, 32), (8, 64), (8, 32)])
    number = dice.choice([4, 16])
    kinds = ["sliding_attention", "full_attention"]
    text = {
        **case.text,
        "sliding_window": dice.choice([number, number + 1, number + 7, 50]),
        "layer_types": [dice.choice(kinds) for _ in range(3)],
    }
    vision = {**case.vision, "patch_size": patch, "image_size": side}
    options = {**case.options, "mm_tokens_per_image": number}
    processing = {"size": {"height": side, "width": side}}
    return case._replace(text=text, vision=vision, options=options, processing=processing)


FAMILIES: dict[str, Callable[[Dice, Case], Case]] = {
    "llava": llava,
    "llava-full-siglip": llava,
    "llava-layers": llava,
    "onevision": onevision,
    "smolvlm": idefics,
    "idefics3": idefics,
    "qwen2.5-vl": qwen,
    "qwen3-vl": qwen,
    "qwen3.5": qwen,
    "mistral3": pixtral,
    "pixtral": pixtral,
    "gemma3": gemma,
}


def drawn(dice: Dice, name: str) -> Case:
    """A random member of a family."""
    case = FAMILIES[name](dice, CASES[name])
    text = {**case.text, "num_key_value_heads": dice.choice([1, 2, 4])}
    if "layer_types" not in text:
        text["num_hidden_layers"] = dice.choice([2, 3, 4])
    if text.get("sliding_window") and name.startswith("llava"):
        text["sliding_window"] = dice.choice([5, 17, 24, 60])
    return case._replace(text={**text, "intermediate_size": dice.choice([48, 96])})


def pictures(dice: Dice) -> list[Any]:
    """Some pictures, among which prompts choose."""
    made: list[Any] = []
    for seed in range(dice.choice([1, 2, 4, 6])):
        width, height = (math.ceil(math.exp(dice.uniform(0, 5.5))) for _ in range(2))
        one = picture(width, height, dice.choice(MODES), seed)
        made.append(as_file(one) if one.mode != "CMYK" and dice.random() < 0.5 else one)
    return made


def prompts(dice: Dice, shown: list[Any]) -> list[Prompt]:
    """Prompts that often begin alike."""
    made = [Prompt("")]
    for _ in range(dice.choice([2, 5, 9])):
        text, seen = dice.choice(made)
        for _ in range(dice.choice([1, 1, 2, 5])):
            if dice.random() < 0.5 and len(seen) < 5:
                text, seen = f"{text}<image>", [*seen, dice.choice(shown)]
            text += dice.choice(WORDS)
        made.append(Prompt(text, seen))
    return dice.sample(made[1:], len(made) - 1)


def options(dice: Dice, seen: Seen, most: int, longest: int, lengths: list[int]) -> dict[str, Any]:
    """most: tokens of the longest picture; longest: of a prompt and its answer."""
    whole = seen.name.startswith("gemma3") or dice.random() < 0.2
    budget = dice.choice([most + 1, most + 13, 300, 500])
    if not seen.name.startswith("gemma3"):
        budget = 4096 if whole else dice.choice([1, 3, 7, 16, 33, budget])
    chosen: dict[str, Any] = {
        **SIZES,
        "max_num_batched_tokens": max(budget, 1),
        "max_num_seqs": min(max(budget, 1), dice.choice([1, 3, 8])),
        "block_size": dice.choice([4, 8, 16]),
        "async_scheduling": dice.choice([None, True, False]),
        "enable_prefix_caching": dice.random() < 0.8,
        "max_model_len": longest,
    }
    if budget == 4096:  # which the longest picture of the model has to fit
        chosen["disable_chunked_mm_input"] = True
    elif dice.random() < 0.6:
        chosen["encoder_cache_size"] = most * dice.choice([1, 1, 2])
        chosen["max_num_encoder_input_tokens"] = most
    if dice.random() < 0.3:
        chosen[dice.choice(SHARES)] = min(longest, dice.choice([1, 6, 30]))
    if dice.random() < 0.5:
        chosen["scheduling_policy"] = dice.choice(sorted(POLICIES))
    if seen.name.startswith("qwen3.5") and dice.random() < 0.6:
        chosen["state_snapshot_interval"] = chosen["block_size"] * dice.choice([1, 2, 5])
        chosen["state_snapshot_policy"] = dice.choice(["cost", "marconi", "interval"])
    if budget > 6 and dice.random() < 0.4:
        chosen |= dice.choice([NGRAM, SUFFIX])
    if dice.random() < 0.5:
        with LLM(seen.path, **chosen) as llm:
            sizes = [pool_for(llm.llm_engine, each) for each in ([longest], lengths[-2:])]
        chosen["num_kv_blocks"] = max(sizes) + dice.choice([0, 1, 4])
    return chosen


def taken(llm: LLM, seen: Seen, given: list[Prompt]) -> tuple[list[Prompt], int]:
    """The prompts whose pictures the model takes, and the most tokens of a picture."""
    kept, most = [], 16 if seen.name.startswith("gemma3") else 1
    for prompt in given:
        try:
            (request,) = submitted(llm, seen, prompt).requests
        except RequestError as error:
            assert "too long" in str(error) or "so long" in str(error) or "empty" in str(error)
            continue
        kept.append(prompt)
        most = max([most, *(item.length for item in request.media)])
    return kept, most


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAMILIES)
def test_random_pictures(tmp_path: Path, seed: int, name: str) -> None:
    dice, tally = random.Random(seed), Tally()
    for number in range(NUM_MODELS):
        key = f"{name} {seed} {number}"
        CASES[key] = drawn(dice, name)
        print(CASES[key])
        try:
            seen = Seen(key, make_seeing_model(tmp_path / str(number), key))
            for _ in range(NUM_RUNS):
                check_run(dice, seen, tally)
        finally:
            del CASES[key]
    assert tally.compared and tally.ties <= 2 + 0.002 * tally.compared


def check_run(dice: Dice, seen: Seen, tally: Tally) -> None:
    num_new = dice.choice([1, 4, 12])
    with LLM(seen.path, **SIZES) as llm:
        made, most = taken(llm, seen, prompts(dice, pictures(dice)))
    made = [each for each in made if seen.is_computed_by_transformers(each)]
    if not made:
        return
    lengths = sorted(len(seen.answer(each, num_new).prompt) for each in made)
    if lengths[-1] + num_new > TEXT["max_position_embeddings"]:
        return
    chosen = options(dice, seen, most, lengths[-1] + num_new, lengths)
    print({key: value for key, value in chosen.items() if SIZES.get(key) != value})
    order = [*made, *(dice.choice(made) for _ in range(4))]
    with LLM(seen.path, **chosen) as llm:
        for prompt, output in zip(order, outputs(dice, llm, seen, order, num_new), strict=True):
            for at, completion in enumerate(output.outputs if output is not None else ()):
                assert completion.finish_reason == "length", completion
                seen.check(output, prompt, tally, index=at)


def outputs(dice: Dice, llm: LLM, seen: Seen, order: list[Prompt], num_new: int) -> list[Any]:
    """The last output of each request, ``None`` if it was aborted. Requests come at any step."""
    greedy = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    twice = SamplingParams(n=2, top_k=1, max_tokens=num_new, ignore_eos=True)
    core, last = llm.llm_engine, dict[str, Any]()
    aborted = set()
    for index, prompt in enumerate(order):
        core.add_request(str(index), seen.given(prompt), twice if dice.random() < 0.2 else greedy)
        for _ in range(dice.choice([0, 0, 1, 3, 8])):
            last |= {out.request_id: out for out in core.step()}
        if dice.random() < 0.1:
            aborted.add(str(dice.randrange(index + 1)))
            core.abort_request(list(aborted))
    while core.has_unfinished_requests():
        last |= {out.request_id: out for out in core.step()}
    return [None if str(n) in aborted else last[str(n)] for n in range(len(order))]
