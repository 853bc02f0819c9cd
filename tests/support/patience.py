"""How long tests wait. None depends on how busy its machine is: what hangs is ended by the limit
that pyproject.toml sets for each test."""

from __future__ import annotations

WAIT_SECONDS = 300.0  # for what a quiet machine does in a moment
SOON_SECONDS = 30.0  # for what happens "at once", where otherwise it took minutes or for ever
