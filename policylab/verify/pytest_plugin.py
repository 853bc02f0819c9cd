"""A pytest plug-in: the fixture ``metronome_policy`` checks a policy; its marker has the
options.

@pytest.mark.metronome_policy(steps=100_000)
def test_my_policy(metronome_policy):
    metronome_policy("my_package.MyPolicy")
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from policylab.verify.swarm import Report


class CheckPolicy(Protocol):
    """The type of the fixture: ``check_policy`` with defaults from the marker."""

    def __call__(self, policy: object, **how: object) -> Report: ...


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "metronome_policy(steps, seed, options, max_wait): options with which the fixture checks "
        "policies",
    )


@pytest.fixture
def metronome_policy(request: pytest.FixtureRequest) -> CheckPolicy:
    """A function that checks a policy: ``policylab.verify.testing.check_policy``, with defaults
    from the marker."""
    # Imported here, since pytest loads this module in every project.
    from policylab.verify.testing import check_policy

    marker = request.node.get_closest_marker("metronome_policy")
    return partial(check_policy, **(marker.kwargs if marker else {}))
