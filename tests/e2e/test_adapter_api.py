"""LoRARequest on ``LLM``: from files, from memory, replaced in place, next to the base."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.box_adapters import make_adapter, write_adapter

from engine import LLM, ConfigError, LoRARequest, RequestError, SamplingParams
from engine.assets import BOX_MODEL
from engine.cli.main import main
from engine.core.replay import replay

OPTIONS: dict[str, Any] = {
    "num_threads": 1,
    "dtype": "float32",
    "disable_log_stats": True,
    "num_kv_blocks": 200,
    "max_model_len": 128,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = "The colour of the sky on a clear day is the one that"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BOX_MODEL, enable_lora=True, max_loras=2, **OPTIONS) as made:
        yield made


def tokens(llm: LLM, *adapters: LoRARequest | None) -> list[list[int]]:
    """Output tokens of the same prompt with each adapter."""
    outputs = llm.generate(
        [PROMPT] * len(adapters), GREEDY, use_tqdm=False, lora_request=list(adapters)
    )
    return [output.outputs[0].token_ids for output in outputs]


def test_prompts_have_adapters_of_their_own(llm: LLM, tmp_path: Path) -> None:
    x, y, z = (
        LoRARequest(name, number, str(write_adapter(tmp_path / name, number, rank=number)))
        for number, name in enumerate("xyz", 1)
    )
    apart = [tokens(llm, each)[0] for each in (None, x, y, z)]
    assert len({tuple(each) for each in apart}) == 4
    assert tokens(llm, None, x, y, z) == apart, "one of the three waits for a slot"
    assert llm.llm_engine.list_loras() == {1, 2, 3}
    chat = llm.chat(
        [{"role": "user", "content": PROMPT}],
        GREEDY,
        use_tqdm=False,
        lora_request=x,
        chat_template="{{ messages[0].content }}",
    )
    assert chat[0].outputs[0].token_ids == apart[1]
    for adapter in (x, y, z):
        assert llm.llm_engine.remove_lora(adapter.lora_int_id)


def test_an_adapter_from_memory_is_that_of_its_files(llm: LLM, tmp_path: Path) -> None:
    config, tensors = make_adapter(7)
    stored = LoRARequest("stored", 7, str(write_adapter(tmp_path / "stored", 7)))
    (wanted,) = tokens(llm, stored)
    here = LoRARequest("here", 8, tensors=tensors, config=config)
    assert tokens(llm, here, stored) == [wanted, wanted]
    digests = {each.name: each.digest for each in llm.llm_engine.lora_adapters()}
    assert digests["here"] == digests["stored"]
    config, tensors = make_adapter(9)
    (other,) = tokens(
        llm, LoRARequest("here", 8, tensors=tensors, config=config, load_inplace=True)
    )
    assert other != wanted
    assert tokens(llm, stored) == [wanted]


def test_an_adapter_is_replaced_in_place_and_nothing_stale_is_read(
    llm: LLM, tmp_path: Path
) -> None:
    root = write_adapter(tmp_path / "one", 11)
    (before,) = tokens(llm, LoRARequest("one", 11, str(root)))
    write_adapter(root, 12)
    assert tokens(llm, LoRARequest("one", 11, str(root))) == [before], "it is loaded already"
    (after,) = tokens(llm, LoRARequest("one", 11, str(root), load_inplace=True))
    fresh = LoRARequest("two", 12, str(write_adapter(tmp_path / "two", 12)))
    assert tokens(llm, fresh) == [after] != [before]


def test_a_recorded_run_is_replayed(tmp_path: Path) -> None:
    x, y = (
        LoRARequest(name, number, str(write_adapter(tmp_path / name, number)))
        for number, name in enumerate("xy", 1)
    )
    log = tmp_path / "steps.log"
    with LLM(BOX_MODEL, enable_lora=True, max_loras=1, step_log=log, **OPTIONS) as llm:
        first = tokens(llm, x, None, y, x)
        assert first[0] == first[3] != first[2]
        with pytest.raises(RequestError, match=r"adapter 'z'.*does not exist"):
            tokens(llm, LoRARequest("z", 3, str(tmp_path / "z")))
    outcome = replay(log)
    assert outcome.difference is None and outcome.num_requests == 4


def test_a_core_in_its_own_process_takes_files_and_small_adapters_from_memory(
    tmp_path: Path,
) -> None:
    config, tensors = make_adapter(7)
    stored = LoRARequest("stored", 7, str(write_adapter(tmp_path / "stored", 7)))
    here = LoRARequest("here", 8, tensors=tensors, config=config)
    with LLM(BOX_MODEL, enable_lora=True, multiprocess=True, **OPTIONS) as llm:
        base, *others = tokens(llm, None, stored, here)
        assert others[0] == others[1] != base
        config, tensors = make_adapter(8, rank=64)
        with pytest.raises(RequestError, match="takes at most 1048576 from memory: save it"):
            tokens(llm, LoRARequest("large", 9, tensors=tensors, config=config))


def test_a_command_answers_with_an_adapter(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_adapter(tmp_path / "command", 31)
    wanted = LoRARequest("command", 31, str(root))
    (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False, lora_request=wanted)
    options = ("--num-threads", "1", "--dtype", "float32", "--num-kv-blocks", "50", "--ignore-eos")
    run = ("generate", "--model", str(BOX_MODEL), "--max-tokens", "8", *options)
    assert main([*run, "--adapter", str(root), PROMPT]) == 0
    assert capsys.readouterr().out.startswith(PROMPT + output.outputs[0].text)


def test_mistakes_end_their_own_request(llm: LLM, tmp_path: Path) -> None:
    large = LoRARequest("large", 21, str(write_adapter(tmp_path / "large", 1, rank=300)))
    with pytest.raises(ConfigError, match=r"rank.*300.*256"):
        llm.llm_engine.add_lora(large)
    good = LoRARequest("good", 22, str(write_adapter(tmp_path / "good", 1)))
    none = LoRARequest("none", 23, str(tmp_path / "none"))
    outputs = llm.generate([PROMPT] * 2, GREEDY, use_tqdm=False, lora_request=[good, none])
    first, second = (output.outputs[0] for output in outputs)
    assert len(first.token_ids) == 8
    assert (second.finish_reason, second.code) == ("error", "adapter_failed")
    assert second.error is not None and "adapter 'none'" in second.error
    with pytest.raises(RequestError, match="lora_request has 1 entries for 2 prompts"):
        llm.generate([PROMPT] * 2, GREEDY, lora_request=[good])
