"""Compares the tokenizers of GGUF files with those from which the files were made.

    python tools/gguf_tokenizers.py DIR=PRE [DIR=PRE ...] [FILE.gguf=DIR ...] [--texts 2000]

DIR is a model directory with tokenizer.json, PRE the name of its pre-tokenizer in GGUF files
(``qwen2``, ``llama-bpe``, ...), or ``llama`` for tokenizers that write spaces as letters: its
tokenizer is written into a GGUF file as llama.cpp's converter does. FILE is a real file, DIR the
directory to compare it with.

A line for each: texts with other ids, id lists with other texts, whether the chat templates are
equal, and the processor time to write the tokenizer and to load it, next to the original's. The
exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.gguf_tokenizers import differences, many_texts, write_gguf  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from engine.config.model import read_json  # noqa: E402
from engine.gguf.header import read_gguf  # noqa: E402
from engine.gguf.vocabulary import write_tokenizer  # noqa: E402
from engine.text.chat import read_templates  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", nargs="+", metavar="DIR=PRE or FILE=DIR")
    parser.add_argument("--texts", type=int, default=2000)
    arguments = parser.parse_args()
    return max(compare(*pair.rsplit("=", 1), arguments.texts) for pair in arguments.pairs)


def compare(what: str, other: str, num_texts: int) -> int:
    """Compare one pair and print the differences. Returns 1 if there are any."""
    with tempfile.TemporaryDirectory() as temporary:
        derived = Path(temporary)
        root, file = Path(other), Path(what)
        if not file.is_file():
            root, file = Path(what), write_gguf(Path(what), derived / "made.gguf", other, 0)
        header = read_gguf(file)
        start = time.process_time()
        write_tokenizer(header, derived)
        writing = time.process_time() - start
        (original, loading), (ours, our_loading) = load(root), load(derived)
        names = [token.content for token in original.get_added_tokens_decoder().values()]
        found = differences(original, ours, many_texts(num_texts, names), num_texts)
        if templates(root) != templates(derived):
            found.append("the chat templates differ")
    print(
        f"{what}: {num_texts} texts and lists of ids, {len(found)} differences; written in "
        f"{writing:.2f} s, loaded in {our_loading:.2f} s, the original in {loading:.2f} s"
    )
    for line in found[:10]:
        print(f"    {line}")
    return int(bool(found))


def load(root: Path) -> tuple[Tokenizer, float]:
    start = time.process_time()
    tokenizer = Tokenizer.from_file(str(root / "tokenizer.json"))
    return tokenizer, time.process_time() - start


def templates(root: Path) -> dict[str, str]:
    return read_templates(root, read_json(root / "tokenizer_config.json") or {})


if __name__ == "__main__":
    sys.exit(main())
