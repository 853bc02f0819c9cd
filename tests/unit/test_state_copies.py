"""Recurrent states in blocks of the KV pool: every byte has its place."""

import pytest
from support import copy_checks


@pytest.mark.parametrize("parts", copy_checks.PARTS)
@pytest.mark.parametrize("shapes", copy_checks.SHAPES)
def test_a_state_survives_in_any_blocks(shapes, parts):
    copy_checks.check_states_in_blocks(shapes, parts)
