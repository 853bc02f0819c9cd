"""What fails a request in the sampler fails it alone, and says why. Custom processors among it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.sampling import SLOTS, VOCAB, Bench, random_logits

from engine.messages.params import SamplingParams


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("flaw", ["NaN", "-NaN", "+inf", "all -inf"])
@pytest.mark.parametrize("kwargs", [{}, {"top_p": 0.9}, {"allowed_token_ids": [3, 4]}])
def test_bad_logits_fail_their_row_alone(
    seed: int, temperature: float, flaw: str, kwargs: dict[str, Any]
) -> None:
    logits = random_logits(seed, 3, VOCAB)
    bad = logits.clone()
    bits = {"NaN": 0x7FC00000, "-NaN": 0xFFC00000 - 2**32, "+inf": 0x7F800000}
    if flaw == "all -inf":
        bad[1] = -torch.inf
    else:
        bad[1, 20] = torch.tensor(bits[flaw], dtype=torch.int32).view(torch.float32)
    outputs = []
    for batch in (logits, bad):
        bench = Bench()
        for slot in range(3):
            params = SamplingParams(temperature=temperature, logprobs=1, **kwargs)
            bench.add(slot, params, [1, 2])
        outputs.append(bench.sample(batch, [0, 1, 2]))
    sound, failed = outputs
    assert sound.errors == {}
    assert set(failed.errors) == {1}
    assert flaw.removeprefix("-N").removeprefix("N") in failed.errors[1]
    assert "position 2" in failed.errors[1]
    assert failed.token_ids[[0, 2]].tolist() == sound.token_ids[[0, 2]].tolist()
    assert failed.logprobs == {row: sound.logprobs[row] for row in (0, 2)}
    assert failed.token_ids[1] == -1


def test_masks_that_leave_no_token_are_said(seed: int) -> None:
    bench = Bench()
    params = SamplingParams(allowed_token_ids=[5], min_tokens=2)
    bench.add(0, params, [1], stop_token_ids=[5])
    bench.add(1, SamplingParams(temperature=0.0), [1])
    logits = random_logits(seed, 2, VOCAB)
    out = bench.sample(logits, [0, 1])
    assert set(out.errors) == {0}
    assert "allowed_token_ids" in out.errors[0] and "min_tokens" in out.errors[0]
    assert out.token_ids[1] == logits[1].argmax()


# Custom processors


def only_even(params: SamplingParams, prompt: list[int]) -> Callable[..., torch.Tensor] | None:
    if not (params.extra_args or {}).get("only_even"):
        return None

    def process(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        masked = logits.clone()
        masked[1::2] = -torch.inf
        return masked

    return process


def breaking(params: SamplingParams, prompt: list[int]) -> Callable[..., Any] | None:
    def raises(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise KeyError("lost")

    def leaves_nan(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[0] = torch.nan
        return logits

    ways: dict[str, Callable[..., Any]] = {
        "raise": raises,
        "nan": leaves_nan,
        "short": lambda output, logits: logits[:-1],
        "none": lambda output, logits: None,
    }
    how = (params.extra_args or {}).get("break")
    if how == "at once":
        raise RuntimeError("no such thing")
    return ways[how] if how else None


def test_a_processor_serves_the_requests_that_ask_for_it(seed: int) -> None:
    bench = Bench(processors=(only_even,))
    for slot in range(SLOTS):
        extra = {"only_even": True} if slot % 2 else None
        bench.add(slot, SamplingParams(temperature=0.0, extra_args=extra), [1])
    logits = random_logits(seed, SLOTS, VOCAB)
    out = bench.sample(logits, list(range(SLOTS)))
    for slot in range(SLOTS):
        expected = 2 * logits[slot, ::2].argmax() if slot % 2 else logits[slot].argmax()
        assert out.token_ids[slot] == expected


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", ["breaking", "KeyError", "lost"]),
        ("at once", ["breaking", "RuntimeError", "no such thing"]),
        ("short", ["breaking", f"[{VOCAB - 1}]", f"[{VOCAB}]"]),
        ("none", ["breaking", "NoneType"]),
        ("nan", ["logits processor", "NaN"]),
    ],
)
def test_a_broken_processor_fails_its_request_alone(seed: int, how: str, words: list[str]) -> None:
    bench = Bench(processors=(breaking, only_even))
    bench.add(0, SamplingParams(temperature=0.0), [1])
    bench.add(1, SamplingParams(extra_args={"break": how}, logprobs=1), [1])
    logits = random_logits(seed, 2, VOCAB)
    out = bench.sample(logits, [1, 0])
    assert set(out.errors) == {0}
    assert all(word in out.errors[0] for word in words), out.errors
    assert out.token_ids[1] == logits[1].argmax()
    assert out.logprobs == {}
