"""Deprecated: moved to ``policylab.verify.testing``. The next release removes this module."""

from __future__ import annotations

import warnings

from policylab.verify.testing import NotShown as NotShown
from policylab.verify.testing import check_policy as check_policy

warnings.warn(
    "engine.verify.testing has moved to policylab.verify.testing", DeprecationWarning, stacklevel=2
)
