"""Resources of the engine, by name, on the model in the box: they change steps and no tokens."""

from e2e.box_engine import SIZES, greedy, run

from engine import EngineArgs, LLMEngine
from examples.resources.ready import BlockAlignment

CADENCE = "examples.resources.ready.PipelineCadence"


def test_a_cadence_and_an_alignment_change_no_tokens(llm_engine: LLMEngine) -> None:
    args = EngineArgs(
        **{**SIZES, "max_num_batched_tokens": 32},
        resources=[CADENCE, BlockAlignment(16)],
        async_scheduling=True,
    )
    params = {str(i): greedy() for i in range(8)}
    with LLMEngine.from_engine_args(args) as other:
        found, right = run(other, params), run(llm_engine, params)
    for name in params:
        assert found[name][-1].outputs[0].token_ids == right[name][-1].outputs[0].token_ids


def test_a_scheduler_of_ones_own_gives_the_same_tokens(llm_engine: LLMEngine) -> None:
    args = EngineArgs(
        **{**SIZES, "max_num_batched_tokens": 256},
        scheduler_cls="examples.schedulers.one_at_a_time.OneAtATime",
    )
    params = {str(i): greedy() for i in range(3)}
    with LLMEngine.from_engine_args(args) as other:
        found, right = run(other, params), run(llm_engine, params)
    for name in params:
        assert found[name][-1].outputs[0].token_ids == right[name][-1].outputs[0].token_ids
