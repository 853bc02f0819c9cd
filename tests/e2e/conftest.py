"""Fixtures of the end-to-end tests."""

import pytest
import transformers
from e2e.tiny_models import TinyModels

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))
