"""These tests want Triton's interpreter, set before Triton is imported; see triton_interpreter."""

from support import triton_interpreter

collect_ignore_glob = [] if triton_interpreter.IS_INTERPRETING else ["test_*.py"]
if triton_interpreter.IS_INTERPRETING:
    triton_interpreter.repair()
