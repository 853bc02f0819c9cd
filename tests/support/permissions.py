"""Root is bound by no permissions: children of tests are started so that they are."""

from __future__ import annotations

import sys

_DROP = """
import ctypes, os, sys
for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP; fails for other users
os.execv(sys.argv[1], sys.argv[1:])
"""


def bound(*command: str) -> list[str]:
    """The command, run by a process that may only do what permissions allow, whoever it is."""
    return [sys.executable, "-c", _DROP, *command]
