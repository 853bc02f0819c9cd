"""GGUF files with the other options of a model: how they are named, drafts, dtypes, tokenizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e.gguf_models import GgufModels, Kind
from e2e.references import engine_for, prompts, run
from support.fake_hub import FakeHub
from support.made_gguf import MadeGguf
from support.patience import WAIT_SECONDS
from support.permissions import bound
from tokenizers import Tokenizer, models

from engine import LLM, SamplingParams
from engine.cli.main import main
from engine.config.model import ModelConfig, read_model_info
from engine.errors import ConfigError
from engine.gguf.directory import directory_of
from engine.hub.fetch import fetched
from engine.server.names import names_of

PROMPTS = prompts()[:3]
SIZES = {
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "num_kv_blocks": 64,
    "num_threads": 1,
    "log_level": "error",
}


@pytest.fixture(scope="module")
def gguf_models(tmp_path_factory: pytest.TempPathFactory) -> GgufModels:
    return GgufModels(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def file(gguf_models: GgufModels) -> Path:
    return gguf_models.get("llama", Kind.Q8_0).file


@pytest.fixture(scope="module")
def tokens(file: Path) -> list[list[int]]:
    with engine_for(str(file), dtype="float32") as engine:
        return run(engine, PROMPTS)[0]


def tokens_of(path: str, **options: object) -> list[list[int]]:
    with engine_for(path, **{"dtype": "float32", **options}) as engine:
        return run(engine, PROMPTS)[0]


def test_a_file_may_be_named_in_any_way(
    file: Path, tokens: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("here.gguf", "CAPITALS.GGUF", "without-ending", "two words.Q8_0.gguf"):
        shutil.copy(file, tmp_path / name)
    os.symlink(file, "link.gguf")
    for name in ("here.gguf", "./CAPITALS.GGUF", "without-ending", "~/two words.Q8_0.gguf"):
        root = fetched(ModelConfig(model=name), for_core=True, for_text=False).model
        assert read_model_info(root).name == Path(name).stem
    assert tokens_of("link.gguf") == tokens
    llm = LLM("~/CAPITALS.GGUF", dtype="float32", **SIZES)
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, detokenize=False)
    made = llm.generate([{"prompt_token_ids": PROMPTS[0]}], params)
    assert made[0].outputs[0].token_ids == tokens[0]


def test_split_files(gguf_models: GgufModels, tokens: list[list[int]], tmp_path: Path) -> None:
    made = MadeGguf(gguf_models.source("llama"), Kind.Q8_0)
    first, *others = made.write_split(tmp_path / "tiny", 3)
    assert tokens_of(str(first)) == tokens
    assert names_of(str(first)).listed == ("tiny",)
    with pytest.raises(ConfigError, match=r"is part 2 of 3: give the first part, .*00001-of-00003"):
        LLM(str(others[0]), **SIZES)
    others[1].unlink()
    with pytest.raises(ConfigError, match=r"lacks its parts tiny-00003-of-00003.gguf"):
        LLM(str(first), **SIZES)


def test_the_served_name_is_that_of_the_file(file: Path, tmp_path: Path) -> None:
    names = names_of(str(file))
    assert names.listed == ("llama-Q8_0",)
    assert names.has(str(file))
    assert names_of("org/tiny-GGUF:Q8_0").listed == ("org/tiny-GGUF:Q8_0",)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_invariant": True},
        {"async_scheduling": True},
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"multiprocess": True},
    ],
    ids=str,
)
def test_the_tokens_are_the_same(
    file: Path, tokens: list[list[int]], options: dict[str, object]
) -> None:
    assert tokens_of(str(file), **options) == tokens


def test_a_draft_model_may_be_a_file(file: Path, tokens: list[list[int]]) -> None:
    drafts = {"method": "draft_model", "model": str(file), "num_speculative_tokens": 2}
    with engine_for(str(file), dtype="float32", speculative_config=drafts) as engine:
        assert run(engine, PROMPTS)[0] == tokens
        assert engine.stats().counters["drafts.num_accepted_tokens"] > 0
    missing = {**drafts, "model": f"{file}.gguf"}
    with pytest.raises(ConfigError, match=r"speculative_config: the model file .* does not exist"):
        engine_for(str(file), speculative_config=missing)


def test_weights_may_be_made_up_or_quantised_again_to_int8_alone(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [len(each) for each in tokens_of(str(file), quantization="int8")] == [14, 14, 14]
    made_up = tokens_of(str(file), load_format="dummy")
    assert made_up == tokens_of(str(file), load_format="dummy")
    message = r"llama-Q8_0.gguf has weights of type Q8_0, and quantization='int4' would quantize"
    with pytest.raises(ConfigError, match=message):
        engine_for(str(file), quantization="int4")
    assert main(["quantize", str(file), str(file.parent / "out")]) != 0
    assert f"{file} is a GGUF file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")],
)
def test_the_dtype_follows_from_the_types_of_tensors(
    gguf_models: GgufModels, kind: str, dtype: str
) -> None:
    path = gguf_models.get("llama", Kind[kind]).file
    root = fetched(ModelConfig(model=str(path)), for_core=True, for_text=False).model
    assert read_model_info(root).dtype == dtype
    assert [len(each) for each in tokens_of(str(path), dtype="auto")] == [14, 14, 14]


def test_a_file_with_some_quantised_matrices_is_computed_in_bfloat16(
    gguf_models: GgufModels, tmp_path: Path
) -> None:
    made = MadeGguf(gguf_models.source("llama"), Kind.F32, {"ffn_down": Kind.Q8_0})
    assert read_model_info(directory_of(str(made.write(tmp_path / "x.gguf")))).dtype == "bfloat16"


def test_experts_may_be_stored_one_by_one(gguf_models: GgufModels, tmp_path: Path) -> None:
    made = MadeGguf(gguf_models.source("mixtral"), Kind.Q8_0)
    stacked = tokens_of(str(made.write(tmp_path / "stacked.gguf")))
    for name in [name for name in made.tensors if "_exps" in name]:
        packed, kind = made.tensors.pop(name)
        for expert, matrix in enumerate(packed):
            made.tensors[name.replace("_exps", f".{expert}")] = matrix, kind
    assert tokens_of(str(made.write(tmp_path / "old.gguf"))) == stacked


def test_a_tokenizer_may_be_named(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer.ggml.model is missing.*; set tokenizer to"):
        LLM(str(file), **{**SIZES, "skip_tokenizer_init": False})
    named = {**SIZES, "skip_tokenizer_init": False, "tokenizer": str(tokenizer_of(tmp_path))}
    assert LLM(str(file), **named).generate(["ab"], SamplingParams(max_tokens=2), use_tqdm=False)


def tokenizer_of(place: Path) -> Path:
    """The directory of a tokenizer of 300 bytes and pairs."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {f"pair{index}": index for index in range(256, 300)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    place.mkdir(exist_ok=True)
    tokenizer.save(str(place / "tokenizer.json"))
    return place


def test_a_revision_needs_a_repository(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"revision is 'main', but model is .* a local path"):
        LLM(str(file), revision="main", **SIZES)


@pytest.mark.parametrize("what", ["changed", "deleted"])
def test_a_file_that_changes_before_it_is_loaded(file: Path, tmp_path: Path, what: str) -> None:
    path = tmp_path / "x.gguf"
    shutil.copy(file, path)
    config = fetched(ModelConfig(model=str(path)), for_core=True, for_text=False)
    if what == "changed":
        path.write_bytes(path.read_bytes() + bytes(32))
    else:
        path.unlink()
    message = "has changed since" if what == "changed" else "x.gguf cannot be read: No such file"
    with pytest.raises(ConfigError, match=message):
        engine_for(config.model)


def test_a_file_that_may_not_be_read(file: Path, tmp_path: Path) -> None:
    shutil.copy(file, tmp_path / "x.gguf")
    (tmp_path / "x.gguf").chmod(0)
    command = bound(sys.executable, "-m", "engine.cli.main", "models", str(tmp_path / "x.gguf"))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )
    assert done.returncode
    assert "x.gguf cannot be read: Permission denied" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_cache_that_cannot_be_written(
    file: Path, tokens: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no-directory").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-directory"))
    assert tokens_of(str(file)) == tokens


def test_a_directory_may_be_made_by_several_at_once(file: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(directory_of, [str(file)] * 8))
    assert len(set(made)) == 1
    assert [each.name for each in made[0].parent.iterdir()] == [made[0].name]


def test_a_directory_with_files_names_them(file: Path, tmp_path: Path) -> None:
    shutil.copy(file, tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match=r"no config.json, but GGUF files: .*\(a.gguf\)"):
        LLM(str(tmp_path), **SIZES)


SCRIPT = """
from engine import LLM, SamplingParams

if __name__ == "__main__":
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, detokenize=False)
    with LLM("org/tiny-GGUF:Q8_0", dtype="float32", **{sizes}) as llm:
        made = llm.generate([{{"prompt_token_ids": {ids}}}], params, use_tqdm=False)
        print(made[0].outputs[0].token_ids)
"""


def test_a_file_of_a_hub(file: Path, tokens: list[list[int]], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(sizes=SIZES, ids=PROMPTS[0]))
    with FakeHub().running() as hub:
        hub.add("org/tiny-GGUF", {"tiny-Q8_0.gguf": file.read_bytes(), "tiny-F16.gguf": b"other"})
        done = subprocess.run(
            [sys.executable, str(tmp_path / "script.py")],
            env={**os.environ, **hub.env(tmp_path / "home")},
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        assert done.stdout.strip() == str(tokens[0]), done.stderr
        assert hub.fetched() == ["tiny-Q8_0.gguf"]


def test_models_shows_what_is_in_a_file(
    file: Path, gguf_models: GgufModels, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", str(file), str(gguf_models.source("llama"))]) == 0
    shown, directory = capsys.readouterr().out.split("\n\n")
    for part in ("llama-Q8_0", "architecture   llama", "3 layers", "Q8_0 ", "F32 ", "512 tokens"):
        assert part in shown, shown
    assert "LlamaForCausalLM" in directory
    assert main(["models", f"{file}.gguf"]) != 0
    assert "cannot be read: No such file" in capsys.readouterr().err
