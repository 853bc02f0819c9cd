"""lm-eval over chat completions."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import cells

SECONDS = 300


def task(home: Path) -> dict[str, object]:
    """Eight sums, as lm-eval reads a task."""
    rows = [{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(8)]
    (home / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(home / "sums.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    }


def chat(url: str) -> None:
    with tempfile.TemporaryDirectory() as path:
        Path(path, "sums.yaml").write_text(json.dumps(task(Path(path))))
        about = f"model={cells.NAME},base_url={url}/v1/chat/completions,tokenizer_backend=None"
        command = [
            sys.executable, "-m", "lm_eval", "--model", "local-chat-completions",
            "--model_args", f"{about},num_concurrent=4", "--tasks", "sums",
            "--include_path", path, "--apply_chat_template", "--output_path", path,
        ]  # fmt: skip
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
        assert run.returncode == 0, run.stderr[-2000:]
        assert "exact_match" in run.stdout, run.stdout[-2000:]


if __name__ == "__main__":
    cells.run({"chat": chat})
