"""guidellm: a small load of two streams. The second argument is the model's directory."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import cells

SECONDS = 300


def stream(url: str) -> None:
    with tempfile.TemporaryDirectory() as path:
        command = [
            sys.executable, "-m", "guidellm", "run",
            "--backend",
            f"kind=openai_http,target={url},model={cells.NAME},validate_backend=False",
            "--tokenizer", f"kind=hf_auto,model={sys.argv[2]}",
            "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
            "--profile", "kind=concurrent,streams=2",
            "--constraint", "kind=max_requests,count=8",
        ]  # fmt: skip
        run = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=path, timeout=SECONDS
        )
        assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]


if __name__ == "__main__":
    cells.run({"stream": stream})
