"""Cases that once broke a rule are kept, one a line, and run again."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ConfigError
from policylab.verify.draw import draw_case
from policylab.verify.swarm import Broken, FoundCase, Swarm, keep, read_corpus, replay_corpus


def test_what_is_kept_is_read_and_run_again(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    assert read_corpus(path) == []
    for seed in (3, 4):
        keep(
            FoundCase(seed, draw_case(seed), Broken(f"broke {seed}", "here", 1)),
            draw_case(seed),
            path,
        )
    kept = read_corpus(path)
    assert [each.case for each in kept] == [draw_case(3), draw_case(4)]
    assert [each.note for each in kept] == ["seed 3: broke 3", "seed 4: broke 4"]
    report = replay_corpus(Swarm(), path)
    assert report.num_runs == 2 and not report.found


@pytest.mark.parametrize("content", [b"{}\n", b"no case\n", b"\xff\xfe\n"])
def test_a_file_that_is_no_corpus_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"corpus\.jsonl is not a corpus of cases"):
        read_corpus(path)
