"""n sequences of one request: who sees what when, and what an abort takes with it."""

import pytest
from support.fakes import FakeClient, fake_session

from engine.messages.params import OutputKind, SamplingParams
from engine.messages.requests import AddRequest, RequestOutput


def staggered(request: AddRequest, position: int) -> int:
    """Child i is stopped by token 2 after i + 1 tokens."""
    child = int(request.request_id.partition("/")[0])
    return 2 if position == child else 10 + child


def outputs_of(kind: OutputKind, n: int = 3) -> tuple[list[RequestOutput], FakeClient]:
    client = FakeClient(staggered)
    session = fake_session(client)
    params = SamplingParams(n=n, output_kind=kind, stop_token_ids=[2])
    session.submit(session.inputs.process("id", [5, 6], params, {}))
    outputs = []
    while session.has_unfinished:
        outputs += session.step()
    return outputs, client


EXPECTED = [[2], [11, 2], [12, 12, 2]]


def test_final_comes_once_with_all_in_order() -> None:
    """123, 124."""
    outputs, _ = outputs_of("final")
    (output,) = outputs
    assert output.finished and output.request_id == "id"
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert [completion.token_ids for completion in output.outputs] == EXPECTED


def test_cumulative_shows_all_in_every_output() -> None:
    outputs, _ = outputs_of("cumulative")
    assert [[len(c.token_ids) for c in output.outputs] for output in outputs] == [
        [1, 1, 1],
        [1, 2, 2],
        [1, 2, 3],
    ]
    assert [output.finished for output in outputs] == [False, False, True]
    reasons = [completion.finish_reason for completion in outputs[0].outputs]
    assert reasons == ["stop", None, None]


def test_deltas_show_who_moved() -> None:
    outputs, _ = outputs_of("delta")
    assert [[c.index for c in output.outputs] for output in outputs] == [[0, 1, 2], [1, 2], [2]]
    for index, expected in enumerate(EXPECTED):
        own = [c.token_ids for o in outputs for c in o.outputs if c.index == index]
        assert [token for ids in own for token in ids] == expected
        ends = [c.finish_reason for o in outputs for c in o.outputs if c.index == index]
        assert [end for end in ends if end] == ["stop"]


def test_prompt_counts_once() -> None:
    client = FakeClient(staggered)
    session = fake_session(client)
    session.submit(session.inputs.process("id", [5, 6], SamplingParams(n=3, max_tokens=2), {}))
    session.step()
    assert session.outputs.counts.prompt_tokens == 2
    assert session.outputs.counts.generation_tokens == 3


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final"])
def test_abort_takes_all(kind: OutputKind) -> None:
    """123: sequences that had finished keep their reason."""
    client = FakeClient(staggered)
    session = fake_session(client)
    params = SamplingParams(n=3, output_kind=kind, stop_token_ids=[2])
    session.submit(session.inputs.process("id", [5, 6], params, {}))
    session.step()
    (output,) = session.abort(["id"])
    assert output.finished and not client.live and not session.has_unfinished
    assert client.aborted == ["id", "id"]
    reasons = {completion.index: completion.finish_reason for completion in output.outputs}
    assert reasons == {1: "abort", 2: "abort"} | ({} if kind == "delta" else {0: "stop"})


def test_no_two_sequences_have_the_same_id_in_the_core() -> None:
    """Whatever users call their requests, and however often they use an id."""
    session = fake_session(FakeClient(staggered))
    names = ["id", "1/id", "0/id", "id", "", "x" * 5000]
    made = [session.inputs.process(name, [5], SamplingParams(n=2), {}) for name in names]
    ids = [request.request_id for submission in made for request in submission.requests]
    assert len(set(ids)) == 12 and max(map(len, ids)) < 100
    assert not session.submit_all(made[:3]).keys()
    errors = session.submit_all([made[3], made[4], made[1]])
    assert list(errors) == [0, 2] and "'id' is in use" in str(errors[0])
