"""A model whose answers are written beforehand: a tiny random model, and a logits processor.

The answer is chosen by how many results of tools the prompt holds, which the chat template marks
with a token of its own; a prompt without tools (a title, a summary) is answered with `ok`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TOOLS, RESULT = "<|tools|>", "<|result|>"
MARKERS = (TOOLS, RESULT, "<tool_call>", "</tool_call>")
LENGTH = 262_144
TEMPLATE = """\
{%- if tools %}<|tools|><|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one by <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}{% if message.role == 'tool' %}<|result|>{% endif %}<|im_start|>
{{- message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SCRIPT = "METRONOME_TEST_SCRIPT"
"""The environment variable with the path of the script."""
END = 2  # the box's token for the end of a text


def make_model(box: Path, path: Path, answers: Sequence[str]) -> Path:
    """Write the tiny model and its script; returns the script's path. Load it with
    ``--load-format dummy``."""
    from tokenizers import Tokenizer

    path.mkdir()
    tokenizer = json.loads((box / "tokenizer.json").read_text())
    first = 1 + max(max(each["id"] for each in tokenizer["added_tokens"]), 4095)
    for number, marker in enumerate(MARKERS):
        tokenizer["added_tokens"].append(
            {
                "id": first + number,
                "content": marker,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": marker in (TOOLS, RESULT),
            }
        )
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    about = json.loads((box / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**about, "chat_template": TEMPLATE}))
    config = json.loads((box / "config.json").read_text())
    config |= {
        "vocab_size": first + 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": LENGTH,
    }
    (path / "config.json").write_text(json.dumps(config))
    encode = Tokenizer.from_file(str(path / "tokenizer.json")).encode
    ids = [encode(text, add_special_tokens=False).ids for text in ("ok", *answers)]
    script = path / "script.json"
    script.write_text(json.dumps({"tools": first, "result": first + 1, "answers": ids}))
    return script


def processor(params: Any, prompt_token_ids: Sequence[int]) -> Callable[..., Any]:
    """The factory for ``--logits-processors``."""
    script = json.loads(Path(os.environ[SCRIPT]).read_text())
    prompt = list(prompt_token_ids)
    plain, *answers = script["answers"]
    chosen = plain
    if script["tools"] in prompt:
        chosen = answers[min(prompt.count(script["result"]), len(answers) - 1)]

    def process(output_token_ids: Sequence[int], logits: Any) -> Any:
        at = len(output_token_ids)
        logits[:] = -1e9
        logits[chosen[at] if at < len(chosen) else END] = 10.0
        return logits

    return process
