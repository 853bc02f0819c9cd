"""Situations in which a model that reads pictures must answer as transformers does. Each is a
function of the model, a tally of tokens, and an empty directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from e2e.picture_cases import NUM_NEW, Prompt, Seen, as_file, picture
from e2e.references import Tally, pool_for
from PIL import Image

from engine import (
    LLM,
    AsyncLLMEngine,
    EngineArgs,
    SamplingParams,
)
from engine.errors import RequestError
from engine.frontend.prompt import RequestOptions, Submission

Situation = Callable[[Seen, Tally, Path], None]
SIZES: dict[str, Any] = {
    "num_threads": 1,
    "max_num_seqs": 16,
    "num_kv_blocks": 400,
    "block_size": 8,
    "log_level": "error",
}
SITUATIONS: dict[str, Situation] = {}
A, B, C, D = (picture(40 + 9 * n, 62 - 7 * n, seed=n) for n in range(4))
WIDE, TALL, POINT = picture(128, 20), picture(21, 120), picture(1, 1)
MIXED = (
    Prompt("what is <image> this?", [A]),
    Prompt("none"),
    Prompt("<image><image>", [POINT, TALL]),
    Prompt("a <image> b <image> c <image>", [WIDE, B, A]),
    Prompt("and no picture here, but a long text that takes several chunks to compute"),
    Prompt("\n<image>\n\n<image>\n\n\n?", [C, C]),
)


def situation(name: str, into: dict[str, Situation] = SITUATIONS) -> Callable[..., Situation]:
    def keep(function: Situation) -> Situation:
        into[name] = function
        return function

    return keep


def greedy(num_new: int = NUM_NEW, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, **options)


def say(llm: LLM, seen: Seen, prompts: Sequence[Prompt], params: Any, **more: Any) -> list[Any]:
    return llm.generate([seen.given(each) for each in prompts], params, use_tqdm=False, **more)


def check(
    llm: LLM, seen: Seen, prompts: Sequence[Prompt], tally: Tally, num_new: int = NUM_NEW
) -> list[Any]:
    """All prompts at once have transformers' answers. Returns the outputs."""
    outputs = say(llm, seen, prompts, greedy(num_new))
    for output, prompt in zip(outputs, prompts, strict=True):
        seen.check(output, prompt, tally)
    return outputs


@contextmanager
def engine(seen: Seen, **options: Any) -> Iterator[LLM]:
    options = {**SIZES, **options}
    budget = options.get("max_num_batched_tokens", 10**4)
    options["max_num_seqs"] = min(options["max_num_seqs"], budget)
    with LLM(seen.path, **options) as llm:
        yield llm


def preemptions(llm: LLM) -> int:
    stats = llm.llm_engine.stats()
    assert stats is not None
    return stats.num_preemptions


# Pictures


def files() -> dict[str, bytes]:
    """Pictures of all kinds, as files."""
    exif = Image.Exif()
    modes = ("RGB", "RGBA", "L", "LA", "P", "1", "I;16")
    made = {f"PNG {mode}": as_file(picture(50, 35, mode)) for mode in modes}
    shades = picture(50, 35).quantize(16)
    made["PNG with a transparent colour"] = as_file(shades, transparency=3)
    made["PNG with transparent colours"] = as_file(shades, transparency=bytes(range(0, 256, 16)))
    made["PNG RGB with a transparent colour"] = as_file(picture(50, 35), transparency=(1, 2, 3))
    for turn in range(1, 9):
        exif[0x0112] = turn
        made[f"JPEG turned {turn}"] = as_file(picture(60, 31), "JPEG", exif=exif)
    exif[0x0112] = 6
    made["PNG turned"] = as_file(picture(60, 31), exif=exif)
    made["WEBP turned"] = as_file(picture(60, 31), "WEBP", exif=exif)
    for mode in ("L", "CMYK", "YCbCr"):
        made[f"JPEG {mode}"] = as_file(picture(50, 35, mode), "JPEG")
    made["JPEG in parts"] = as_file(picture(50, 35), "JPEG", progressive=True)
    made["BMP"] = as_file(picture(50, 35), "BMP")
    made["BMP of two colours"] = as_file(picture(50, 35, "1"), "BMP")
    frames = [picture(45, 33, seed=n) for n in range(3)]
    for kind in ("GIF", "WEBP", "PNG"):
        made[f"animated {kind}"] = as_file(
            frames[0], kind, save_all=True, append_images=frames[1:], duration=50
        )
    see_through = [picture(45, 33, "RGBA", seed=n) for n in range(2)]
    made["animated GIF with transparency"] = as_file(
        see_through[0], "GIF", save_all=True, append_images=see_through[1:], disposal=2
    )
    made["GIF with a transparent colour"] = as_file(shades, "GIF", transparency=5)
    made["WEBP"] = as_file(picture(50, 35, "RGBA"), "WEBP", lossless=True)
    return made


@situation("kinds of files")
def kinds_of_files(seen: Seen, tally: Tally, root: Path) -> None:
    made = files()
    names = list(made)
    prompts = [
        Prompt("<image> ".join(["", "", "", ""]), [made[name] for name in names[at : at + 3]])
        for at in range(0, len(names) - len(names) % 3, 3)
    ]
    prompts.append(Prompt("<image>", [made[names[-1]]]))
    with engine(seen) as llm:
        check(llm, seen, prompts, tally, num_new=3)


@situation("kinds of PIL images")
def kinds_of_images(seen: Seen, tally: Tally, root: Path) -> None:
    modes = ("RGBA", "L", "LA", "P", "1", "I;16", "CMYK", "YCbCr", "HSV", "LAB", "F", "I")
    prompts = [Prompt(f"{mode} <image>", [picture(30, 45, mode)]) for mode in modes]
    turned = picture(60, 31)
    turned.getexif()[0x0112] = 8
    prompts.append(Prompt("turned <image>", [turned]))
    # The same colours with and without a transparent one, which image processors make white.
    shades = picture(50, 35).quantize(16)
    see_through = shades.copy()
    see_through.info["transparency"] = 3
    prompts += [Prompt("<image>", [shades]), Prompt("<image>", [see_through])]
    with engine(seen) as llm:
        check(llm, seen, prompts, tally, num_new=3)


@situation("sizes")
def sizes(seen: Seen, tally: Tally, root: Path) -> None:
    plain = [(4000, 3000), (3000, 4000), (1, 1), (2, 1), (1, 3), (1, 30), (90, 1), (640, 480)]
    random = [(33, 31), (32, 32), (31, 33), (127, 128), (64, 257), (65, 17), (500, 20)]
    prompts = [
        Prompt("<image>?", [Image.radial_gradient("L").resize(size).convert("RGB")])
        for size in (*plain, *random)
    ]
    taken = []
    with engine(seen) as llm:
        for prompt in prompts:
            try:
                submitted(llm, seen, prompt)
                taken.append(prompt)
            except RequestError as error:
                assert "too long" in str(error) or "so long" in str(error)
                with pytest.raises((ValueError, ZeroDivisionError)):
                    seen.inputs(prompt)
        for output, prompt in zip(say(llm, seen, taken, greedy(3)), taken, strict=True):
            if seen.is_computed_by_transformers(prompt):
                seen.check(output, prompt, tally)
            assert len(output.outputs[0].token_ids) == 3
    assert len(taken) > 12


@situation("0 to 8 pictures")
def numbers(seen: Seen, tally: Tally, root: Path) -> None:
    pictures = [A, B, POINT, C, A, WIDE, D, TALL]
    prompts = [Prompt("x<image>" * n + f" {n}", pictures[:n]) for n in range(9)]
    with engine(seen, max_num_batched_tokens=200) as llm:
        check(llm, seen, prompts, tally, num_new=4)


@situation("several turns")
def turns(seen: Seen, tally: Tally, root: Path) -> None:
    """A chat whose answers are part of the next prompt, with a picture in each turn."""
    with engine(seen) as llm:
        text, pictures, chat = "", [], []
        for number, image in enumerate((A, B, None, A)):
            parts = [] if image is None else [{"type": "image", "image": image}]
            content = [*parts, {"type": "text", "text": f"what {number}"}]
            chat.append({"role": "user", "content": content})
            pictures += [] if image is None else [image]
            text += f"user: {'' if image is None else '<image>'}what {number}"
            if seen.mark != "<image>":  # the template has the plain token
                chat[-1]["content"] = f"{'' if image is None else seen.mark}what {number}"
                ids = [text + "a:"]
                prompt = Prompt(*ids, pictures)
                (output,) = say(llm, seen, [prompt], greedy(5))
            else:
                prompt = Prompt(text + "a:", pictures)
                (output,) = llm.chat([chat], greedy(5), use_tqdm=False)
            seen.check(output, prompt, tally)
            if number:
                assert output.num_cached_tokens > 0
            chat.append({"role": "a", "content": f"answer {number}"})
            text += f"a: answer {number}"


# Batches, chunks, blocks


@situation("together")
def together(seen: Seen, tally: Tally, root: Path) -> None:
    with engine(seen) as llm:
        check(llm, seen, MIXED, tally)
        check(llm, seen, MIXED[::-1], tally)


@situation("chunks")
def chunks(seen: Seen, tally: Tally, root: Path) -> None:
    for size in (1, 5, 7, 13):
        with engine(seen, max_num_batched_tokens=max(size, seen.least_budget)) as llm:
            check(llm, seen, MIXED[:4] if size == 1 else MIXED, tally)


@situation("small shares")
def small_shares(seen: Seen, tally: Tally, root: Path) -> None:
    """A step, or one that also decodes, takes fewer tokens of a prompt than a picture has."""
    for limit in ("long_prefill_token_threshold", "max_mixed_prefill_tokens"):
        for options in ({}, {"disable_chunked_mm_input": True}):
            with engine(seen, **{limit: 6}, **options) as llm:
                check(llm, seen, MIXED, tally)


@situation("two steps in flight")
def in_flight(seen: Seen, tally: Tally, root: Path) -> None:
    for options in ({"async_scheduling": True}, {"async_scheduling": False}):
        with engine(seen, max_num_batched_tokens=37, **options) as llm:
            check(llm, seen, MIXED, tally)


@situation("without prefix cache")
def no_prefix_cache(seen: Seen, tally: Tally, root: Path) -> None:
    with engine(seen, enable_prefix_caching=False, max_num_batched_tokens=50) as llm:
        check(llm, seen, MIXED, tally)
        outputs = check(llm, seen, MIXED, tally)
    assert not any(output.num_cached_tokens for output in outputs)


def tight(seen: Seen, prompts: Sequence[Prompt], num_new: int, **options: Any) -> dict[str, int]:
    """Options with a pool of blocks that holds the longest three prompts, but not all of their
    answers."""
    lengths = sorted(len(seen.answer(each, num_new).prompt) for each in prompts)
    longest = lengths[-1] + num_new
    with engine(seen, **options) as llm:
        sizes = [
            pool_for(llm.llm_engine, each) for each in ([n + 3 for n in lengths[-3:]], [longest])
        ]
    return {"num_kv_blocks": max(sizes), "max_model_len": longest}


@situation("preempted")
def preempted(seen: Seen, tally: Tally, root: Path) -> None:
    for options in ({}, {"async_scheduling": True, "max_num_batched_tokens": 45}):
        prompts = [
            Prompt(f"{n}<image>" + "x" * 30, [picture(40, 30, seed=n // 2)]) for n in range(6)
        ]
        with engine(seen, **options, **tight(seen, prompts, 40, **options)) as llm:
            check(llm, seen, prompts, tally, 40)
            assert preemptions(llm) > 0 or seen.has_window


@situation("prefix hits")
def prefix_hits(seen: Seen, tally: Tally, root: Path) -> None:
    """Cached prefixes end before, within and after pictures, and reach across some."""
    start = "a text of more than two blocks"
    prompts = [
        Prompt(f"{start}<image>", [A]),
        Prompt(f"{start}<image>", [B]),  # before
        Prompt(f"{start}<image> and", [A]),  # within or after
        Prompt(f"{start}<image> and so on until<image>", [A, C]),
        Prompt(f"{start}<image> and so on until<image>", [A, D]),  # across the first
        Prompt(f"{start}<image> and so on until<image>", [B, C]),  # nothing of the second
        Prompt(f"{start}<image> and so on until<image> the end", [A, C]),  # across both
        Prompt(f"{start}<image> and so on until the end", [A]),
        Prompt(f"{start} and no picture"),
        Prompt(f"<image>{start}", [A]),
        Prompt(f"<image>{start}", [A]),
    ]
    for budget in (max(21, seen.least_budget), 400):
        with engine(seen, max_num_batched_tokens=budget, block_size=4) as llm:
            outputs = [check(llm, seen, [each], tally)[0] for each in prompts]
            check(llm, seen, prompts, tally)
        cached = [output.num_cached_tokens for output in outputs]
        assert cached[0] == 0 and all(cached[2:8]), cached
        if not seen.name.startswith("qwen3.5"):  # which keeps states at few positions
            assert all(cached[1:9]) and cached[10], cached
            assert cached[6] > cached[4] > cached[1], cached


@situation("encoder cache hits")
def encoder_hits(seen: Seen, tally: Tally, root: Path) -> None:
    """The same pictures come after other texts, in one batch and later."""
    prompts = [Prompt(f"{n} text<image><image>", [A, A] if n % 2 else [A, B]) for n in range(5)]
    with engine(seen, max_num_batched_tokens=64) as llm:
        check(llm, seen, prompts, tally)
        check(llm, seen, [Prompt("later <image>", [B])], tally)


@situation("small encoder cache")
def small_encoder_cache(seen: Seen, tally: Tally, root: Path) -> None:
    """One picture at a time is encoded and kept, so that all pictures evict each other."""
    pictures = [A, B, POINT, C, A]
    prompts = [Prompt(f"{n}<image> and <image>", [pictures[n], A]) for n in range(4)]
    longest = max(item for each in prompts for item in items_of(seen, each))
    for budget in (max(29, seen.least_budget), 300):
        options = {"max_num_encoder_input_tokens": longest, "encoder_cache_size": longest}
        with engine(seen, max_num_batched_tokens=budget, **options) as llm:
            check(llm, seen, prompts, tally)
            check(llm, seen, prompts[::-1], tally)


def items_of(seen: Seen, prompt: Prompt) -> list[int]:
    """The number of tokens of each picture."""
    with engine(seen) as llm:
        return [item.length for item in submitted(llm, seen, prompt).requests[0].media]


def submitted(llm: LLM, seen: Seen, prompt: Prompt) -> Submission:
    """The request as the core gets it."""
    inputs = llm.llm_engine.session.inputs
    return inputs.process("x", seen.given(prompt), greedy(), RequestOptions())


@situation("small cache, preempted")
def small_cache_preempted(seen: Seen, tally: Tally, root: Path) -> None:
    prompts = [
        Prompt(f"{n}<image>" + "x" * 20 + "<image>", [picture(40, 30, seed=n // 2), B])
        for n in range(5)
    ]
    longest = max(item for each in prompts for item in items_of(seen, each))
    options = {"max_num_encoder_input_tokens": longest, "encoder_cache_size": longest}
    budget = max(40, seen.least_budget)
    options |= {"max_num_batched_tokens": budget, **tight(seen, prompts, 25)}
    with engine(seen, **options) as llm:
        check(llm, seen, prompts, tally, 25)
        assert preemptions(llm) > 0 or seen.has_window


@situation("aborted")
def aborted(seen: Seen, tally: Tally, root: Path) -> None:
    """Requests end at any step, among others with the same picture."""
    with engine(seen, max_num_batched_tokens=max(19, seen.least_budget)) as llm:
        core = llm.llm_engine
        for wait in range(5):
            for n in range(4):
                prompt = Prompt(f"{n}<image>{wait}<image>", [A, (B, C)[n % 2]])
                core.add_request(f"{wait}-{n}", seen.given(prompt), greedy())
            for _ in range(wait):
                core.step()
            core.abort_request([f"{wait}-{n}" for n in range(3)])
            last = {}
            while core.has_unfinished_requests():
                for out in core.step():
                    last[out.request_id] = out
            seen.check(last[f"{wait}-3"], Prompt(f"3<image>{wait}<image>", [A, C]), tally)


@situation("asynchronous")
def asynchronous(seen: Seen, tally: Tally, root: Path) -> None:
    """Requests come while others run, and some are left early."""
    options = {**SIZES, "max_num_seqs": 4, "max_num_batched_tokens": 40}
    running = AsyncLLMEngine.from_engine_args(EngineArgs(model=seen.path, **options))

    async def run(number: int, prompt: Prompt) -> Any:
        await asyncio.sleep(0.002 * number)
        last = None
        async for output in running.generate(seen.given(prompt), greedy(), str(number)):
            last = output
            if number % 4 == 1:
                break
        return last

    async def all_of(prompts: Sequence[Prompt]) -> list[Any]:
        return await asyncio.gather(*(run(n, prompt) for n, prompt in enumerate(prompts)))

    prompts = [*MIXED, *MIXED[::-1]]
    try:
        outputs = asyncio.run(all_of(prompts))
    finally:
        running.shutdown()
    for number, (output, prompt) in enumerate(zip(outputs, prompts, strict=True)):
        seen.check(output, prompt, tally)
        assert output.finished or number % 4 == 1
