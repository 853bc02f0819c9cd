"""Hostile GGUF files; `tools/fuzz_gguf.py` is the long form."""

from tools.fuzz_gguf import fuzz


def test_hostile_files_are_read_or_refused_with_a_reason(seed: int) -> None:
    result = fuzz(300, seed)
    assert result.files == 300
    assert result.read > 20
    assert result.refused > 150
    assert len(result.reasons) > 50
    assert result.grown_mib < 64, "a wrong count made the reader take memory"
