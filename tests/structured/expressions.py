"""A hundred regular expressions by group, of what Rust's and Python's dialects share; and those
that must be refused, with the word."""

from __future__ import annotations

from collections.abc import Iterator

EXPRESSIONS: dict[str, list[str]] = {
    "literals": [
        r"yes",
        r"yes|no|maybe",
        r"a\.b\*c\?",
        r"\[\]\{\}\(\)",
        r"\$5\.00 \+ tax",
        r"naïve|Straße|東京|🙂",
        r"(one|two|three) (fish|birds)",
        r"line one\nline two\n?",
        r"\t\tindented",
        r'"quoted"|\'quoted\'',
        r"a|ab|abc|abcd",
        r"(foo|foobar|foobarbaz)x",
        r"\\begin\{[a-z]{1,6}\}",
    ],
    "classes": [
        r"[a-z]",
        r"[a-zA-Z_][a-zA-Z0-9_]{0,15}",
        r"[^a-z]",
        r"[^\n]{1,30}",
        r"[^\"\\]{0,20}",
        r"[-+*/]",
        r"[\]\[]{2}",
        r"[ж-яё]{3,8}",
        r"[ぁ-ん]{1,5}",
        r"[\x20-\x7e]{0,24}",
        r"\d\d",
        r"\w{2,10}",
        r"\s{1,3}x",
        r"\S{1,12}",
        r"\D{1,6}",
        r"\W{1,4}",
        r"[\d.,]{1,8}",
        r"[.^$|]{2,3}",
        r"[é-ü]{2}",
    ],
    "repetitions": [
        r"a*b",
        r"a+b+",
        r"(ab)?c",
        r"(ab){3}",
        r"(ab){2,5}",
        r"x{0}y",
        r"(a{2}b{3}){2}",
        r"(a|b){4,6}",
        r"((a|b)c?){2,4}",
        r"(a*b){1,3}",
        r"a?b?c?d?",
        r"(0|1){8}",
        r"(\d{3},){0,3}\d{3}",
        r"x{1,40}",
        r"(la ){1,6}la",
        r"([ab]*c){2}",
    ],
    "lazy": [
        r"a+?b",
        r"<.{0,10}?>",
        r'".*?"',
        r"(a|b)*?c",
        r"x{2,5}?y",
        r"\d??\d",
    ],
    "groups": [
        r"(?:a|b)c",
        r"(?P<year>\d{4})-(?P<month>\d{2})",
        r"((((a))))",
        r"(a(b(c(d)?)?)?)?e",
        r"(|a|b)c",
        r"(?i:yes|no)",
        r"(?s:.{3})",
        r"^anchored$",
        r"(^a|b)c",
        r"(?:(?:red|green) ){1,2}(?:hat|shoe)s?",
    ],
    "numbers": [
        r"-?(0|[1-9]\d{0,9})",
        r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?",
        r"0x[0-9a-fA-F]{1,8}",
        r"[1-9]\d{0,2}(,\d{3}){0,3}",
        r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)(\.(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)){3}",
        r"\d{1,3}%",
        r"[IVXLCDM]{1,8}",
        r"(?:1[0-2]|[1-9]):[0-5]\d (?:am|pm)",
        r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
        r"[$€£]\d{1,6}(\.\d{2})?",
        r"(\d+)(/\d+)?",
    ],
    "identifiers": [
        r"[a-f0-9]{8}-[a-f0-9]{4}-[a-f0-9]{4}-[a-f0-9]{4}-[a-f0-9]{12}",
        r"[A-Z]{3}-\d{2,4}(!|\?)?",
        r"v\d+\.\d+\.\d+(-[a-z]+\.\d+)?",
        r"#[0-9a-fA-F]{3}([0-9a-fA-F]{3})?",
        r"[a-z0-9._-]{1,12}@[a-z0-9-]{1,10}\.(com|org|net)",
        r"https?://[a-z0-9.-]{1,16}(/[a-z0-9/]{0,12})?",
        r"/([a-z]{1,8}/){0,3}[a-z]{1,8}\.py",
        r"[a-z]+(-[a-z]+){0,3}",
        r"([A-Z][a-z]{1,6}){1,4}",
        r"[A-Z][A-Z0-9]{0,3}(_[A-Z0-9]{1,4}){0,3}",
        r"\+\d{1,3} \d{3} \d{4,7}",
    ],
    "texts": [
        r"Answer: (yes|no)\.",
        r"[A-Z][a-z ]{3,30}[.!?]",
        r"(- [a-z ]{1,12}\n){1,3}",
        r"\|( [a-z]{1,5} \|){2,4}",
        r"def [a-z_]{1,10}\(([a-z]{1,3}(, [a-z]{1,3}){0,2})?\):",
        r"SELECT [a-z, ]{1,20} FROM [a-z]{1,10};",
        r"<b>[^<>]{0,20}</b>",
        r"\{\"ok\": (true|false)\}",
        r"Thought: [^\n]{1,40}\nAction: (search|stop)\[[^\]\n]{0,20}\]",
    ],
}

REFUSED: list[tuple[str, str]] = [
    ("look-around", r"(?=a)[a-z]+"),
    ("look-around", r"(?<!x)y"),
    ("backreference", r"(a|b)\1"),
    ("lookarounds", r"\bword\b"),
    ("unclosed", r"(ab"),
]


def expressions() -> Iterator[tuple[str, str]]:
    for group, found in EXPRESSIONS.items():
        for one in found:
            yield group, one
