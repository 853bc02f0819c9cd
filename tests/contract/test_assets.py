"""The model in the box: fits its size, loads in plain transformers, writes documentation."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.assets import BOX_MODEL

MAX_BYTES = 8_000_000
FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
PROMPTS = [
    "The for statement\n*****************\n\nThe",
    "Return a copy of the string",
    "A class definition",
    'The "try" statement specifies',
]
QUESTIONS = ["What does str.split do?", "What does os.path.join do?", "Hello", "Explain len."]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BOX_MODEL, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(
        BOX_MODEL, local_files_only=True, dtype=torch.float32
    ).eval()


def greedy(model, tokenizer, text, max_new_tokens):
    """New tokens after a text, up to and with the end-of-text token if it comes."""
    ids = tokenizer(text, return_tensors="pt")
    out = model.generate(**ids, do_sample=False, max_new_tokens=max_new_tokens)
    return out[0, ids.input_ids.shape[1] :].tolist()


def test_the_directory_is_complete_and_small():
    assert {path.name for path in BOX_MODEL.iterdir()} == FILES
    assert sum(path.stat().st_size for path in BOX_MODEL.iterdir()) <= MAX_BYTES


def test_transformers_loads_every_weight(model):
    _, report = AutoModelForCausalLM.from_pretrained(
        BOX_MODEL, local_files_only=True, output_loading_info=True
    )
    assert not any(report.values()), report
    assert model.config.model_type == "llama"
    assert 2_500_000 <= model.num_parameters() <= 3_500_000


def test_tokenizer_gives_back_any_text(tokenizer, model):
    text = "def f(x):\n\treturn 'é ∑ 你好 🙂'  # \x00 two  spaces\r\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) == model.config.vocab_size == 4096


def test_chat_template_renders_turns(tokenizer):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_reads_like_text(model, tokenizer, prompt):
    ids = greedy(model, tokenizer, prompt, 64)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert all(char.isprintable() or char == "\n" for char in text), text
    assert len(re.findall(r"[a-z]{2,}", text)) >= 10, text
    fours = list(zip(ids, ids[1:], ids[2:], ids[3:], strict=False))
    assert len(set(fours)) >= 0.6 * len(fours), f"it repeats itself: {text!r}"


def test_chat_answers_end(model, tokenizer):
    ended = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ended.append(greedy(model, tokenizer, text, 200)[-1] == tokenizer.eos_token_id)
    assert sum(ended) >= 2, dict(zip(QUESTIONS, ended, strict=True))


def test_it_predicts_documentation_over_its_whole_context(model, tokenizer):
    """Loss on a docstring of this Python stays low, at the front and at the back of the context."""
    filler = tokenizer((str.split.__doc__ + "\n") * 60).input_ids
    sentence = tokenizer("Return a list of the words in the string, using sep as the").input_ids
    for start in (0, 400, 2000):
        ids = torch.tensor([filler[:start] + sentence])
        with torch.no_grad():
            logits = model(ids).logits[0, start:-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, start + 1 :]).item()
        assert loss < 5.0, (start, loss)
