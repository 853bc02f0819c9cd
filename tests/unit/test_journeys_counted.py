"""What counts as a file of a journey, and as a circle of imports."""

from types import CodeType

from tools.budgets import circles
from tools.journeys import IDLE, files_of, name_of

SOURCE = """
squares = [i * i for i in range(3)]
class Kept:
    doubles = {i: 2 * i for i in range(3)}
    def method(self):
        return [i for i in range(3)]
    other = lambda self: 0
"""


def all_code(code: CodeType) -> list[CodeType]:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return [code, *(found for part in inner for found in all_code(part))]


def test_functions_count_and_what_defines_them_does_not() -> None:
    names = map(name_of, all_code(compile(SOURCE, "/any/engine/kv/kept.py", "exec")))
    found = {name for name in names if name is not None}
    assert {"kv/kept.py Kept.method", "kv/kept.py Kept.<lambda>"} <= found
    # Python 3.12 has no function of its own for a comprehension.
    assert found - {"kv/kept.py Kept.method.<locals>.<listcomp>"} == {
        "kv/kept.py Kept.method",
        "kv/kept.py Kept.<lambda>",
    }
    elsewhere = all_code(compile(SOURCE, "/any/kernels/kept.py", "exec"))
    assert not any(map(name_of, elsewhere))


def test_a_file_counts_that_is_in_every_round_and_not_for_idling_alone() -> None:
    notes = [
        "1 a.py run",
        "1 b.py wait",
        "1 c.py tick",
        "1 d.py wait",
        "1 d.py work",
        "2 a.py run",
        "2 b.py wait",
        "2 d.py wait",
        "2 d.py work",
        f"{IDLE + 1} b.py wait",
        f"{IDLE + 2} d.py wait",
    ]
    assert files_of(notes) == ["a.py", "d.py"]


def test_circles_are_found_and_what_hangs_on_them_is_not_in_them() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"g"}}
    assert circles({**imports, "g": {"f", "a"}}) == [["a", "b", "c"], ["f", "g"]]
