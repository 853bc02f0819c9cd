"""A logits processor by which a model writes what a test says: the tokens in the file that
``METRONOME_SCRIPT`` names, then the end of the text."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

END = 2  # <|im_end|> of the model in the box


def script(params: Any, prompt_token_ids: list[int]) -> Any:
    """Each request writes what the file has when it begins."""
    ids = json.loads(Path(os.environ["METRONOME_SCRIPT"]).read_text())

    def process(output_token_ids: list[int], logits: Any) -> Any:
        num = len(output_token_ids)
        token = ids[num] if num < len(ids) else END
        logits[:] = -1e9
        logits[token] = 10.0
        return logits

    return process
