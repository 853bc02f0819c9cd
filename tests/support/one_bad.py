"""Twelve requests of a model that adds up its tokens; the sixth has a token that it cannot bear."""

from __future__ import annotations

from engine.messages.params import SamplingParams
from support.simulate import Run, make_request


def says(prompt: list[int], count: int) -> list[int]:
    """What the model answers."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % 40)
    return tokens[len(prompt) :]


def check_that_one_fails_alone(run: Run, bad: int, params: SamplingParams) -> None:
    """Everybody else gets what the model answers."""
    prompts = {str(i): [i, 3, 5, 7, 2][: 2 + i % 4] for i in range(12)}
    prompts["5"] = [1, 2, bad]
    for name, prompt in prompts.items():
        run.add(make_request(name, prompt, 6, params=params))
    run.drain()
    for name, prompt in prompts.items():
        if name == "5":
            assert run.finished[name] == ("error", None)
            assert run.outputs[name] == []
        else:
            assert run.outputs[name] == says(prompt, 6), name
