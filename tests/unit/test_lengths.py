"""What is known of output lengths, and what predictors make of it."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from support.simulate import expected as tokens
from support.simulate import make_request, make_run

from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError, RequestError
from engine.sched import LengthHistory
from engine.sched.plugins.find import choose
from engine.sched.predict.lengths import PREDICTORS, HistoryPredictor, find_predictor


def history(*lengths: int, window: int = 1000) -> LengthHistory:
    made = LengthHistory(window)
    for length in lengths:
        made.add(length)
    return made


def test_only_the_last_lengths_count():
    made = history(*range(1, 21), window=5)
    assert len(made) == 5
    assert (made.mean(), made.quantile(0.0), made.quantile(1.0)) == (18, 16, 20)


def test_questions_are_about_lengths_above_what_was_generated():
    made = history(1, 2, 2, 10, 30)
    assert made.mean() == 9
    assert made.mean(above=2) == 20
    assert [made.quantile(q) for q in (0.0, 0.2, 0.5, 0.6, 0.8, 1.0)] == [1, 1, 2, 2, 10, 30]
    assert made.quantile(0.5, above=2) == 10
    assert made.mean(above=30) is made.quantile(0.5, above=30) is None
    assert made.sample(random.Random(0), above=30) is None


def test_samples_follow_what_was_seen(seed):
    rng = random.Random(seed)
    made = history(*[4] * 10, *[8] * 30, *[16] * 10)
    seen = Counter(made.sample(rng, above=4) for _ in range(4000))
    assert set(seen) == {8, 16}
    assert abs(seen[8] / 4000 - 0.75) < 0.05


def test_the_history_agrees_with_a_plain_list(seed):
    rng = random.Random(seed)
    made, plain = LengthHistory(50), []
    for _ in range(300):
        length = rng.randint(1, 40)
        made.add(length)
        plain = [*plain, length][-50:]
        above = rng.randint(0, 40)
        kept = [length for length in plain if length > above]
        assert made.mean(above) == (pytest.approx(sum(kept) / len(kept)) if kept else None)
        assert made.quantile(0.5, above) == (
            sorted(kept)[max(0, -(-len(kept) // 2) - 1)] if kept else None
        )


def waiting_request(**fields):
    run = make_run()
    run.add(make_request("r", [1] * 10, 50, **fields))
    return next(iter(run.scheduler.view.unfinished))


def test_shipped_predictors_answer_within_what_the_request_may_become():
    req = waiting_request(hints={"output_tokens": 70})
    lengths = LengthHistory()
    found = {name: find_predictor(name, lengths) for name in PREDICTORS}
    assert {name: predictor.name for name, predictor in found.items()} == {
        name: name for name in PREDICTORS
    }
    assert [found[name].predict(req) for name in ("none", "history", "oracle")] == [50, 50, 50]
    for length in (3, 5, 400):
        lengths.add(length)
    assert found["history"].predict(req) == 50  # the mean is 136
    assert find_predictor("history", history(20, 30)).predict(req) == 25


def test_predictions_move_with_what_was_generated():
    run = make_run(length_predictor="history")
    view = run.scheduler.view
    for length in (2, 4, 30):
        view.lengths.add(length)
    run.add(make_request("r", [1] * 10, 50))
    req = next(iter(view.unfinished))
    seen = []
    while run.step():
        seen.append((req.num_output, view.predict(req)))
    assert seen[:3] == [(1, 12), (2, 17), (3, 17)]
    assert seen[3:6] == [(4, 30), (5, 30), (6, 30)]
    assert seen[30][1] == 50, "longer than all that were seen"


@pytest.mark.parametrize("hints", [None, {}, {"output_tokens": "7"}, {"output_tokens": 0}])
def test_an_oracle_that_was_told_nothing_says_so(hints):
    oracle = find_predictor("oracle", LengthHistory())
    wrong = r"hints\['output_tokens'\] of request 'r'.*positive integer"
    with pytest.raises(RequestError, match=wrong):
        oracle.predict(waiting_request(hints=hints))


class Seven:
    """A predictor as a stranger writes it."""

    name = "seven"

    def __init__(self, lengths: LengthHistory) -> None:
        self.lengths = lengths

    def predict(self, req) -> int:
        return 7


class Broken(Seven):
    def __init__(self, lengths: LengthHistory) -> None:
        raise OSError("no such file")


def test_predictors_are_found_by_name_class_and_object():
    lengths = LengthHistory()
    req, own = waiting_request(), Seven(LengthHistory())
    for given in (Seven, f"{__name__}.Seven", own):
        found = find_predictor(given, lengths)
        assert (found.name, found.predict(req)) == ("seven", 7)
    assert find_predictor(HistoryPredictor, lengths).lengths is lengths
    found = find_predictor("engine.sched.predict.lengths.HistoryPredictor", lengths)
    assert found.name == "history"


def test_a_wrong_predictor_is_refused_with_what_there_is():
    lengths = LengthHistory()
    with pytest.raises(ConfigError, match="'magic' is not known; there are: history, none, oracle"):
        find_predictor("magic", lengths)
    with pytest.raises(ConfigError, match=r"cannot load 'no\.such\.Thing'"):
        find_predictor("no.such.Thing", lengths)
    with pytest.raises(ConfigError, match="must have a name and a method predict"):
        find_predictor(LengthHistory(), lengths)
    with pytest.raises(ConfigError, match="cannot be created: OSError: no such file"):
        find_predictor(Broken, lengths)


def test_a_wrong_predictor_is_refused_before_the_model_is_loaded():
    for wrong in ("magic", "os.path", LengthHistory, 5, None):
        with pytest.raises(ConfigError, match="length_predictor"):
            choose(SchedulerConfig(length_predictor=wrong))


class Answers(Seven):
    """Says what it was told to say."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def predict(self, req) -> int:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(("answer", "used"), [(0, 1), (-5, 1), (10**30, 50), (6.6, 7)])
def test_what_a_predictor_answers_is_brought_into_range(answer, used, caplog):
    run = make_run(length_predictor=Answers(answer))
    run.add(make_request("r", [1] * 10, 50))
    assert run.scheduler.view.predict(run.scheduler.roster.by_id["r"]) == used
    assert not caplog.messages


@pytest.mark.parametrize("rubbish", [None, "7", float("nan"), float("inf"), [7], KeyError("x")])
def test_rubbish_of_a_predictor_hurts_nobody(rubbish, caplog):
    run = make_run(length_predictor=Answers(rubbish), policy="ltr")
    for name in "abcdef":
        run.add(make_request(name, [ord(name)] * 10, 50))
        assert run.scheduler.view.predict(run.scheduler.roster.by_id[name]) == 50
    run.drain()
    assert run.outputs == {name: tokens([ord(name)] * 10, 50) for name in "abcdef"}
    assert not run.scheduler.guard.faults.messages, "it is not the policy's fault"
    assert len(caplog.messages) == 3, "the first ones are logged"
    assert "length predictor seven, request a: " in caplog.messages[0]


def test_requests_that_a_predictor_refuses_leave_the_policy_alone():
    """Else a client that forgets a hint could have the policy left out for everybody."""
    run = make_run(policy="blendserve", length_predictor="oracle", max_policy_faults=0)
    for name in "abc":
        with pytest.raises(RequestError, match="output_tokens"):
            run.add(make_request(name, [1, 2], 5))
    assert not run.scheduler.guard.faults.messages
