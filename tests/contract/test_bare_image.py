"""`pytest -m gpu` starts on a machine that has what the engine needs, and of `dev` pytest alone."""

from __future__ import annotations

import os
import subprocess
import sys

# No test on a GPU may import one of these.
ABSENT = (
    *("anthropic", "coverage", "httptools", "hypothesis", "jsonschema", "lark", "mypy", "openai"),
    *("opentelemetry", "prometheus_client", "psutil", "pytest_asyncio", "pytest_timeout"),
    *("schemathesis", "scipy", "starlette", "trustme", "uvicorn", "uvloop", "xdist", "xgrammar"),
)
RUN = """
import sys, pytest
sys.modules.update(dict.fromkeys({absent}))  # as if they were not installed
sys.exit(pytest.main(["-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]))
"""


def test_gpu_tests_are_found_without_any_plug_in() -> None:
    code = RUN.format(absent=ABSENT)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for file in ("e2e/test_gpu.py", "e2e/test_gpu_quantized.py"):
        assert f"tests/{file}::" in done.stdout
