"""Damaged messages, for decoders and for a live core; `tools/fuzz_wire.py` is the long form."""

from tools.fuzz_wire import fuzz_core, fuzz_decoders


def test_decoders_answer_damaged_frames_with_wire_errors_only(seed: int) -> None:
    result = fuzz_decoders(100_000, seed)
    assert result.frames == 100_000
    assert 0 < result.messages < result.refused
    assert result.grown_mib < 64, "a wrong length made a decoder take memory"


def test_a_core_serves_on_among_hostile_clients(seed: int) -> None:
    result = fuzz_core(1000, seed)
    assert result.healthy_finished and result.answers
    assert not result.num_left
