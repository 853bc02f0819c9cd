"""`tools/lines.py` and `tools/words.py` count by package, and what tools write apart."""

from __future__ import annotations

from tools.lines import count
from tools.words import search


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


def test_words_are_found_in_names_comments_and_at_the_beginning_of_docstrings():
    source = '''"""Of a thing."""

ASKED_FOR = 1


class ToldLater:
    """Tasked with besides."""

    _num_said: int  # so
    # many of them
'''
    found = [(one.package, one.word, one.line) for one in search([("engine/sched/x/y.py", source)])]
    assert sorted(found, key=lambda one: one[2]) == [
        ("engine/sched", "Of ...", 1),
        ("engine/sched", "asked", 3),
        ("engine/sched", "told", 6),
        ("engine/sched", "said", 9),
        ("engine/sched", "so many", 9),
    ]
