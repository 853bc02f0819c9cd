"""`tools/lines.py` and `tools/words.py` count by package, and what tools write apart."""

from __future__ import annotations

from tools.lines import count


def test_lines_count_for_the_package_in_which_a_file_stands_today():
    files = [
        ("engine/sim/run.py", "a\nb\n"),
        ("policylab/verify/case.py", "a\n"),
        ("engine/cli/worst.py", "a\n"),
        ("engine/cli/serve.py", "a\n"),
        ("tests/unit/test_a.py", "a\n" * 3),
        ("tests/speech/corpus.py", "a\n" * 5),
        ("examples/a.py", "a\n"),
        ("README.md", "three words here"),
        ("docs/options.md", "written by a tool"),
        ("docs/guide.md", "by hand <!-- members -->\n| x |\n<!-- members end --> too"),
    ]
    counts = count(files)
    assert (counts["policylab"], counts["engine + kernels"], counts["tests"]) == (4, 1, 3)
    assert counts["corpora of tests"] == 5
    assert counts["words of documents"] == 6
    assert counts["words of generated tables"] == 4 + 10
