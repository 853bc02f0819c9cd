"""Random models with windows or chunks in random engines: tokens equal to transformers.

Whatever is drawn: windows shorter and longer than blocks, orders of layers, chunks of prompts,
prefix hits, small pools, several answers, drafts, penalties, aborts, pauses and resets. The step
log is replayed.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from e2e.random_windows import (
    FAMILIES,
    Options,
    RandomModel,
    draw_options,
    draw_params,
    draw_prompts,
    start,
    with_small_pool,
)
from e2e.references import Tally

from engine import LLMEngine, RequestOutput, SamplingParams
from engine.core.replay import replay
from engine.models.families import FAMILIES as NATIVE

Requests = dict[str, tuple[list[int], SamplingParams]]
QUICK = ("Gemma3TextConfig", "Llama4TextConfig")


class Session:
    """The requests of one engine, in waves, with what a user does meanwhile."""

    def __init__(self, engine: LLMEngine, dice: random.Random) -> None:
        self.engine = engine
        self._dice = dice
        self._outputs: dict[str, RequestOutput] = {}
        self._pause_left = 0  # steps

    def run(self, requests: Requests) -> dict[str, RequestOutput]:
        """Add the requests one after the other; returns the outputs of those not aborted."""
        dice, engine, waiting, aborted = self._dice, self.engine, list(requests), set()
        self._outputs.clear()
        while waiting or engine.has_unfinished_requests():
            for name in [waiting.pop(0) for _ in range(min(len(waiting), dice.randrange(3)))]:
                prompt, params = requests[name]
                engine.add_request(name, prompt, params, priority=dice.randrange(3))
            self._interfere()
            running = requests.keys() - set(waiting) - self._outputs.keys() - aborted
            if running and dice.random() < 0.02:
                aborted.add(name := dice.choice(sorted(running)))
                engine.abort_request(name)
            self._step()
        while self._pause_left:
            self._step()
        return {name: self._outputs[name] for name in requests if name not in aborted}

    def _interfere(self) -> None:
        chance = self._dice.random()
        if chance < 0.02 and not self._pause_left:
            self.engine.pause(self._dice.choice(("all", "new")))
            self._pause_left = 3
        elif chance < 0.04:
            self.engine.reset_prefix_cache(reset_running=chance < 0.03)

    def _step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                self._outputs[output.request_id] = output
        if self._pause_left:
            self._pause_left -= 1
            if not self._pause_left:
                self.engine.resume()


def follow_up(dice: random.Random, outputs: list[tuple[list[int], list[int]]]) -> list[list[int]]:
    """Prompts that begin as earlier ones: the same, longer and shorter."""
    made = []
    for prompt, tokens in outputs:
        text = [*prompt, *tokens]
        made.append(dice.choice((prompt, [*text, 7], text[: dice.randrange(1, len(text))])))
    return made


def check_engine(model: RandomModel, options: Options, dice: random.Random, tally: Tally) -> None:
    with start(model.path, options) as engine:
        longest = engine.session.client.decided.max_model_len
        num_new = dice.choice((3, 14, 40))
        session, done = Session(engine, dice), []
        for wave in range(dice.choice((1, 2, 3))):
            prompts = draw_prompts(dice, model.window, longest - num_new) + follow_up(dice, done)
            params = [draw_params(dice, num_new) for _ in prompts]
            requests = {
                f"{wave}-{place}": (prompt[: longest - num_new], params[place])
                for place, prompt in enumerate(prompts)
            }
            outputs, done = session.run(requests), []
            for name, output in outputs.items():
                prompt, asked = requests[name]
                for answer in output.outputs:
                    tokens = list(answer.token_ids)
                    assert len(tokens) == num_new
                    model.check(prompt, tokens, asked, tally, kept=options["kv_cache_dtype"])
                done.append((prompt, tokens))
            assert engine.stats().kv_usage == 0.0
        assert engine.reset_prefix_cache()
    assert replay(options["step_log"]).difference is None


@pytest.mark.parametrize(
    ("config_class", "num_engines"),
    [
        *((name, 1) for name in QUICK),
        *(pytest.param(name, 4, marks=pytest.mark.slow) for name in FAMILIES),
    ],
)
def test_same_tokens_as_transformers(
    config_class: str, num_engines: int, seed: int, tmp_path: Path, tally: Tally
) -> None:
    dice = random.Random(seed)
    model = RandomModel(config_class, dice, tmp_path / "model")
    draft = RandomModel(dice.choice(list(FAMILIES)), dice, tmp_path / "draft")
    name = config_class.replace("TextConfig", "Config").replace("Config", "ForCausalLM")
    for number in range(num_engines):
        drafting = dice.choice((draft.path, model.path))
        log = tmp_path / f"steps-{number}.log"
        options = draw_options(dice, drafting, log, is_native=name in NATIVE)
        if dice.random() < 0.5:
            options = with_small_pool(dice, model.path, options)
        print(model.options, options)
        check_engine(model, options, dice, tally)
