"""From the core's columns to what users read: text, stop strings, log-probabilities, times."""

from collections.abc import Sequence

import pytest
from support import made_tokenizers as made
from support.fakes import FakeClient, counting, fake_session, replay

from engine.errors import RequestError
from engine.frontend.encoding import Prompt
from engine.frontend.session import Session
from engine.messages.params import OutputKind, SamplingParams
from engine.messages.requests import CoreOutputs, Finished, Logprob, RequestOutput, TokenLogprobs
from engine.text.token_texts import REPLACEMENT
from engine.text.tokenizer import RustBackend, Tokenizer

TOKENIZER = Tokenizer(RustBackend(made.byte_level()), {"eos_token": "</s>"}, {})
TEXT = "The quick brown fox, café 😀, jumps over the lazy dog."
IDS = TOKENIZER.encode(TEXT)
EOS = 2


def run(
    script: list[int], params: SamplingParams, prompt: str = "Say:"
) -> tuple[list[RequestOutput], FakeClient]:
    """All outputs of one request to a core that answers ``script``."""
    client = FakeClient(replay(script))
    session = fake_session(client, TOKENIZER)
    session.submit(session.inputs.process("id", prompt, params, {}))
    outputs = []
    while session.has_unfinished:
        outputs += session.step()
    return outputs, client


def submit(session: Session, prompt: Prompt, params: SamplingParams, name: str = "id") -> str:
    """The id that the request has in the core."""
    submission = session.inputs.process(name, prompt, params, {})
    session.submit(submission)
    return submission.requests[0].request_id


def last(script: list[int], params: SamplingParams) -> RequestOutput:
    return run(script, params)[0][-1]


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final"])
def test_text_is_the_decoded_output(kind: OutputKind) -> None:
    """117: pieces joined are the text; the first has one token, the last the reason."""
    outputs, _ = run(IDS, SamplingParams(max_tokens=len(IDS), output_kind=kind))
    pieces = [output.outputs[0] for output in outputs]
    if kind == "delta":
        assert "".join(piece.text for piece in pieces) == TEXT
        assert [i for piece in pieces for i in piece.token_ids] == IDS
        assert pieces[0].token_ids == IDS[:1]
    else:
        assert (pieces[-1].text, pieces[-1].token_ids) == (TEXT, IDS)
    if kind == "cumulative":
        assert all(TEXT.startswith(piece.text) for piece in pieces)
        assert [len(piece.token_ids) for piece in pieces] == list(range(1, len(IDS) + 1))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert pieces[-1].finish_reason == "length" and pieces[-1].stop_reason is None
    assert len(outputs) == (1 if kind == "final" else len(IDS))  # 124
    assert all(REPLACEMENT not in piece.text for piece in pieces)  # 118


def test_bytes_cut_off_at_the_end_are_shown() -> None:
    """118: nothing follows, so what there is of the character is shown as U+FFFD."""
    smile = TOKENIZER.encode("😀")
    output = last([*IDS[:3], *smile[:-1]], SamplingParams(max_tokens=3 + len(smile) - 1))
    assert output.outputs[0].text.endswith(REPLACEMENT)


def test_what_a_connector_says_at_the_end_reaches_the_user() -> None:
    session = fake_session(FakeClient(counting), TOKENIZER)
    core_id = submit(session, "Say:", SamplingParams(output_kind="final"))
    batch = CoreOutputs([core_id], [5], [1], 1.0)
    batch.finished = [
        Finished(
            0,
            "length",
            waits={"seats": 0.5},
            events=[("queued", 0.0), ("scheduled", 0.5)],
            kv_transfer_params={"remote": [1, 2]},
        )
    ]
    (output,) = session.outputs.process(batch)
    assert output.kv_transfer_params == {"remote": [1, 2]}
    assert output.metrics is not None and output.metrics.waits == {"seats": 0.5}
    assert output.metrics.events == [("queued", 0.0), ("scheduled", 0.5)]


STOPPING = [
    # stop, included, text kept
    ("brown", False, "The quick "),
    ("brown", True, "The quick brown"),
    ("fox, caf", False, "The quick brown "),
    ("fox, caf", True, "The quick brown fox, caf"),
    ("😀, j", False, "The quick brown fox, café "),
    (".", False, TEXT[:-1]),
]


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final"])
@pytest.mark.parametrize(("stop", "included", "kept"), STOPPING)
def test_stop_strings_cut_the_text(kind: OutputKind, stop: str, included: bool, kept: str) -> None:
    """119: over token borders; tokens up to the one that completed it; the core is told."""
    params = SamplingParams(
        max_tokens=200,
        stop=["never", stop],
        include_stop_str_in_output=included,
        output_kind=kind,
    )
    outputs, client = run(IDS, params)
    pieces = [output.outputs[0] for output in outputs]
    text = "".join(p.text for p in pieces) if kind == "delta" else pieces[-1].text
    tokens = [i for p in pieces for i in p.token_ids] if kind == "delta" else pieces[-1].token_ids
    assert text == kept
    assert stop in TOKENIZER.decode(tokens) and stop not in TOKENIZER.decode(tokens[:-1])
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", stop)
    assert client.aborted == ["id"] and not client.live


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    """119: max(stop length) - 1 characters, so that no reader sees a part of it."""
    params = SamplingParams(max_tokens=len(IDS), stop=["jumps under", "never"])
    for output in run(IDS, params)[0][:-1]:
        shown, decoded = output.outputs[0].text, TOKENIZER.decode(output.outputs[0].token_ids)
        assert decoded.startswith(shown)
        assert len(shown) <= max(0, len(decoded) - len("jumps under") + 1)
    assert last(IDS, params).outputs[0].text == TEXT


def test_stop_string_completed_by_the_last_token() -> None:
    """The reason is the string, although the core says length; nothing is left to abort."""
    outputs, client = run(IDS, SamplingParams(max_tokens=len(IDS), stop=["dog."]))
    assert outputs[-1].outputs[0].stop_reason == "dog."
    assert client.aborted == []


def test_min_tokens_ignores_earlier_stop_strings() -> None:
    """20: a stop string that was complete too early is text like any other."""
    second = IDS + TOKENIZER.encode(" again brown")
    early = last(second, SamplingParams(max_tokens=200, stop=["brown"], min_tokens=len(IDS)))
    assert early.outputs[0].text == TEXT + " again "


def test_stop_tokens_are_no_text() -> None:
    """120: unless asked for; the id is kept either way."""
    script = [*IDS[:4], EOS]
    for included in (False, True):
        params = SamplingParams(
            max_tokens=50,
            stop_token_ids=[EOS],
            include_stop_str_in_output=included,
            skip_special_tokens=False,
        )
        completion = last(script, params).outputs[0]
        assert completion.token_ids == script
        assert completion.text == TOKENIZER.decode(script[: 5 if included else 4], False)
        assert (completion.finish_reason, completion.stop_reason) == ("stop", EOS)


def test_end_of_text_has_no_stop_reason() -> None:
    completion = last([*IDS[:4], EOS], SamplingParams(max_tokens=50)).outputs[0]
    assert completion.text == TOKENIZER.decode(IDS[:4])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    other = last([*IDS[:4], EOS], SamplingParams(max_tokens=6, ignore_eos=True)).outputs[0]
    assert (other.finish_reason, len(other.token_ids)) == ("length", 6)


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final"])
def test_logprobs(kind: OutputKind) -> None:
    """121: one entry a token, the sampled one first; cumulative is the sum."""
    outputs, _ = run(IDS, SamplingParams(max_tokens=5, logprobs=1, output_kind=kind))
    pieces = [output.outputs[0] for output in outputs]
    entries = [e for p in pieces for e in p.logprobs] if kind == "delta" else pieces[-1].logprobs
    assert entries is not None and len(entries) == 5
    for token_id, entry in zip(IDS[:5], entries, strict=True):
        assert list(entry) == [token_id, 1]
        assert entry[token_id] == Logprob(-0.5, 3, TOKENIZER.decode([token_id]))
        assert entry[1] == Logprob(-0.25, 1, "<s>")
    assert pieces[-1].cumulative_logprob == pytest.approx(-2.5)


def test_sampled_token_among_the_likely_ones_stands_once() -> None:
    session = fake_session(FakeClient(counting), TOKENIZER)
    core_id = submit(session, "x", SamplingParams(logprobs=2))
    entry = TokenLogprobs([7, 8, 7], [-2.0, -1.0, -2.0], 2)
    (output,) = session.outputs.process(
        CoreOutputs([core_id], [7], None, 1.0, logprobs={0: [entry]})
    )
    assert output.outputs[0].logprobs is not None
    position = output.outputs[0].logprobs[0]
    assert {i: p.rank for i, p in position.items()} == {7: 2, 8: 1}


@pytest.mark.parametrize("kind", ["cumulative", "delta"])
@pytest.mark.parametrize("start", [0, 2])
def test_prompt_logprobs(kind: OutputKind, start: int) -> None:
    """121: nothing predicts the first token; positions not asked for are None."""
    session = fake_session(FakeClient(counting), TOKENIZER)
    params = SamplingParams(prompt_logprobs=0, prompt_logprobs_start=start, output_kind=kind)
    core_id = submit(session, [5, 6, 7, 8], params)
    entries = [TokenLogprobs([i], [-1.0], 4) for i in [5, 6, 7, 8][max(1, start) :]]
    batch = CoreOutputs([core_id], [9], None, 1.0, prompt_logprobs={0: entries})
    found = session.outputs.process(batch)[0].prompt_logprobs
    assert found is not None and len(found) == 4
    assert [p is None for p in found] == [i < max(1, start) for i in range(4)]
    assert found[3] == {8: Logprob(-1.0, 4, TOKENIZER.decode([8]))}
    again = session.outputs.process(CoreOutputs([core_id], [9], None, 1.0))[0].prompt_logprobs
    assert again == (None if kind == "delta" else found)


def test_errors_are_data() -> None:
    session = fake_session(FakeClient(counting), TOKENIZER)
    core_id = submit(session, "x", SamplingParams())
    batch = CoreOutputs([core_id], [], [0], 1.0, finished=[Finished(0, "error", None, "no number")])
    (output,) = session.outputs.process(batch)
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.error) == ("error", "no number")
    assert completion.code == "request_failed"
    assert output.finished and not session.has_unfinished


def test_times_and_counts() -> None:
    """125: prompt tokens count with the first token; times follow each other."""
    client = FakeClient(counting)
    session = fake_session(client, TOKENIZER)
    for name in ("a", "b"):
        session.submit(session.inputs.process(name, [5, 6, 7], SamplingParams(max_tokens=4), {}))
    assert session.outputs.counts.prompt_tokens == 0
    outputs = []
    while session.has_unfinished:
        outputs = session.step()
    counts = session.outputs.counts
    assert (counts.prompt_tokens, counts.generation_tokens) == (6, 8)
    assert counts.finished == {"length": 2}
    metrics = outputs[0].metrics
    assert metrics is not None
    assert metrics.arrival_time == 100.0
    assert metrics.scheduled_time == 100.125
    assert metrics.first_token_time == 100.25
    assert metrics.last_token_time == metrics.finished_time == 101.0


def test_abort_says_so_and_late_tokens_are_ignored() -> None:
    client = FakeClient(counting)
    session = fake_session(client, TOKENIZER)
    core_id = submit(session, "x", SamplingParams(max_tokens=9))
    session.step()
    (output,) = session.abort(["id", "id", "unknown"])
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].token_ids == [10]
    assert client.aborted == ["id"]
    late = CoreOutputs([core_id], [11], None, 1.0, finished=[Finished(0, "abort")])
    assert submit(session, "x", SamplingParams(max_tokens=9)) != core_id
    assert session.outputs.process(late) == []
    assert session.abort(["id"])[0].outputs[0].token_ids == []
    assert session.abort(["id"]) == []


def test_an_id_is_free_again_once_its_request_has_ended() -> None:
    session = fake_session(FakeClient(counting), TOKENIZER)
    submission = session.inputs.process("id", "x", SamplingParams(max_tokens=1), {})
    session.submit(submission)
    with pytest.raises(RequestError, match="'id' is in use"):
        session.submit(submission)
    session.step()
    session.submit(submission)
    assert [output.finished for output in session.step()] == [True]


def test_a_request_the_core_refuses_leaves_nothing_behind() -> None:
    client = FakeClient(counting)
    session = fake_session(client, TOKENIZER)
    submission = session.inputs.process("id", "x", SamplingParams(n=2), {})
    client.refuse = lambda request: request.request_id == submission.requests[1].request_id
    with pytest.raises(RequestError, match="the fake core refuses"):
        session.submit(submission)
    assert not client.live and not session.has_unfinished
    client.refuse = lambda request: False
    session.submit(submission)


def test_outputs_that_come_faster_than_they_are_taken_are_shown_one_after_the_other() -> None:
    """No step waits for the texts of what came behind its own, and nothing is lost."""
    fake = Hasty(counting)
    session = fake_session(fake, TOKENIZER)
    submit(session, [5], SamplingParams(max_tokens=12), "a")
    submit(session, [5], SamplingParams(max_tokens=7, output_kind="delta"), "b")
    shown: dict[str, list[int]] = {"a": [], "b": []}
    while session.has_unfinished:
        outputs = session.step()
        assert len({output.request_id for output in outputs}) == len(outputs)
        for output in outputs:
            shown[output.request_id].append(len(output.outputs[0].token_ids))
    assert shown == {"a": list(range(1, 13)), "b": [1] * 7}
    assert fake.most_at_once > 1


class Hasty(FakeClient):
    """A core that has done five steps whenever it is asked."""

    most_at_once = 0

    def step(self) -> list[CoreOutputs]:
        batches = [batch for _ in range(5) for batch in super(Hasty, self).step()]
        self.most_at_once = max(self.most_at_once, len(batches))
        return batches


def test_what_ended_here_is_stopped_in_the_core_though_an_interrupt_came_first() -> None:
    """The next step stops it, before which the core goes on with it."""

    class Interrupted(FakeClient):
        is_interrupted = True

        def abort(self, request_ids: Sequence[str]) -> None:
            if self.is_interrupted:
                self.is_interrupted = False
                raise KeyboardInterrupt
            super().abort(request_ids)

    client = Interrupted(counting)
    session = fake_session(client)
    for name in ("a", "b"):
        submit(session, [5], SamplingParams(max_tokens=9), name)
    with pytest.raises(KeyboardInterrupt):
        session.abort(["a"])
    while session.has_unfinished:
        session.step()
    assert client.aborted == ["a"] and not client.live
