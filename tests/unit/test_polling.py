"""How long a core waits for messages: what may be asked, and what is done with it."""

import pytest

from engine.config.args import EngineArgs
from engine.config.core import MAX_POLL_MS, PollConfig
from engine.core.polling import poll_timeout_ms
from engine.errors import ConfigError

VARIABLE = "METRONOME_DECODE_POLL_TIMEOUT_MS"


def decided(**options: object) -> PollConfig:
    return EngineArgs(**options).create_config().polling


def test_nothing_asked_waits_never_while_there_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert decided() == PollConfig(decode_poll_timeout_ms=0, idle_wait_ms=1000)


@pytest.mark.parametrize("value", [0, 1, 25, MAX_POLL_MS])
def test_option_and_variable_mean_the_same(monkeypatch: pytest.MonkeyPatch, value: int) -> None:
    monkeypatch.setenv(VARIABLE, str(value))
    assert decided().decode_poll_timeout_ms == value
    monkeypatch.setenv(VARIABLE, "7")
    assert decided(decode_poll_timeout_ms=value).decode_poll_timeout_ms == value


@pytest.mark.parametrize(
    "value", ["", " ", "-1", "1.5", "1e3", "soon", "0x10", "+1", " 1", "²", "9" * 40]
)
def test_a_wrong_variable_is_named_with_value_and_range(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError) as caught:
        decided()
    for part in (VARIABLE, repr(value), f"0..{MAX_POLL_MS}"):
        assert part in str(caught.value)


def test_more_digits_than_python_reads_are_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "9" * 5000)
    with pytest.raises(ConfigError, match=f"{VARIABLE} is '9999"):
        decided()


@pytest.mark.parametrize("value", [-1, MAX_POLL_MS + 1, 1.5, "1", True])
def test_a_wrong_option_is_named_with_value_and_range(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        decided(decode_poll_timeout_ms=value)
    assert "decode_poll_timeout_ms" in str(caught.value) and str(value) in str(caught.value)


def test_only_the_first_poll_of_a_drain_waits_and_never_before_a_prompt() -> None:
    config = EngineArgs(decode_poll_timeout_ms=3, idle_wait_ms=500).create_config()
    assert poll_timeout_ms(config, "decode") == 3
    assert poll_timeout_ms(config, "prefill") == 0
    assert poll_timeout_ms(config, "none") == 500
