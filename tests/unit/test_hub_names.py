"""A directory or a name? What is asked by directory never reaches for a hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.assets import BOX_MODEL
from engine.cli.main import main
from engine.config.args import EngineArgs
from engine.config.model import ModelConfig, ModelInfo, is_hub_name
from engine.errors import ConfigError
from engine.hub import files
from engine.hub.fetch import fetched
from engine.hub.files import Repository
from engine.llm import LLM

TOKEN = "hf_aSecretThatMustNotShow"
NAMES = [
    *("Qwen/Qwen3-0.6B", "gpt2", "a/b", "org/my_model-v1.5", "meta-llama/Llama-3.2-1B"),
    *("org/tiny-GGUF:Q4_K_M", "org/tiny:UD-Q4_K_XL", "org/tiny:Q8_0/tiny-00001-of-00002.gguf"),
]
PATHS = [
    *("/models/m", "./m", "../m", "~/m", ".", "", "a/b/c", "models/m/", "C:\\m", "a b", "-m"),
    *("tiny.gguf", "models/tiny.GGUF", "org/tiny:", "org/tiny:/x", ":Q4_0", "org/tiny:Q4 0"),
    *("https://huggingface.co/a/b", "a/b@main", "a//b", "/a", "a/", "org/m--x", "org/m..x", "m.\n"),
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Repository]:
    """What would be downloaded; its directory is /cache/NAME."""
    repositories: list[Repository] = []

    def download(repository: Repository) -> Path:
        repositories.append(repository)
        return Path("/cache") / repository.name

    monkeypatch.setattr("engine.hub.download.download", download)
    return repositories


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name(name)
    (tmp_path / name).mkdir(parents=True)
    assert not is_hub_name(name)  # what lies here comes first


@pytest.mark.parametrize("path", PATHS)
def test_paths(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_hub_name(path)


@pytest.mark.parametrize("path", ["/nowhere/m", "./m", "~/no-such-model", Path("org/m"), "a/b/c"])
@pytest.mark.parametrize("is_tokenizer", [False, True])
def test_a_path_that_leads_nowhere_is_not_looked_up(
    path: str | Path, is_tokenizer: bool, asked: list[Repository]
) -> None:
    options = {"model": BOX_MODEL, "tokenizer": path} if is_tokenizer else {"model": path}
    with pytest.raises(ConfigError, match=r"does not exist"):
        LLM(**options)
    assert asked == []


def test_a_directory_stays_as_it_is(asked: list[Repository]) -> None:
    config = ModelConfig(model=str(BOX_MODEL), tokenizer=str(BOX_MODEL), hf_token=TOKEN)
    there = fetched(config, for_core=True, for_text=True)
    assert (there.model, there.tokenizer, asked) == (str(BOX_MODEL), str(BOX_MODEL), [])


def test_a_directory_has_no_revisions(asked: list[Repository]) -> None:
    here = str(BOX_MODEL)
    with pytest.raises(ConfigError, match=r"^revision is 'v1', but model is .* leave revision out"):
        LLM(here, revision="v1")
    with pytest.raises(ConfigError, match=r"^tokenizer_revision is 'v1', but tokenizer is "):
        LLM(here, tokenizer_revision="v1")
    with pytest.raises(ConfigError, match=r"^tokenizer_revision is 'v1', but tokenizer is "):
        fetched(
            ModelConfig(model="org/m", tokenizer=here, tokenizer_revision="v1"),
            for_core=True,
            for_text=True,
        )


def wishes(repository: Repository) -> tuple[str, str, str | None, bool, bool]:
    return (
        repository.option,
        repository.name,
        repository.revision,
        repository.has_weights,
        repository.has_tokenizer,
    )


def test_who_needs_what(asked: list[Repository]) -> None:
    config = ModelConfig(model="org/m", revision="v1", hf_token=TOKEN, download_dir="/d")
    both = fetched(config, for_core=True, for_text=True)
    core = fetched(config, for_core=True, for_text=False)
    front = fetched(config, for_core=False, for_text=True)
    assert [wishes(each) for each in asked] == [
        ("model", "org/m", "v1", True, True),
        ("model", "org/m", "v1", True, False),
        ("model", "org/m", "v1", False, True),
    ]
    assert {each.token for each in asked} == {TOKEN} and {each.cache for each in asked} == {"/d"}
    assert both == core == front
    assert fetched(config, for_core=False, for_text=False).model == "org/m"  # nothing is needed
    assert len(asked) == 3


def test_a_tokenizer_of_its_own(asked: list[Repository]) -> None:
    config = ModelConfig(model="org/m", tokenizer="org/t", revision="v1", load_format="dummy")
    there = fetched(config, for_core=True, for_text=True)
    assert (there.model, there.tokenizer) == ("/cache/org/m", "/cache/org/t")
    fetched(config, for_core=False, for_text=True)
    assert [wishes(each) for each in asked] == [
        ("model", "org/m", "v1", False, False),
        ("tokenizer", "org/t", None, False, True),
        ("model", "org/m", "v1", False, False),  # for generation_config.json
        ("tokenizer", "org/t", None, False, True),
    ]


def test_a_tokenizer_of_another_revision(asked: list[Repository]) -> None:
    config = ModelConfig(model="org/m", tokenizer_revision="v2")
    there = fetched(config, for_core=True, for_text=True)
    assert there.tokenizer == "/cache/org/m"
    assert [wishes(each) for each in asked] == [
        ("model", "org/m", None, True, False),
        ("tokenizer", "org/m", "v2", False, True),
    ]


def test_what_is_handed_on_has_no_token_and_is_not_fetched_again(asked: list[Repository]) -> None:
    config = ModelConfig(
        model="org/m", tokenizer="org/t", revision="a", tokenizer_revision="b", hf_token=TOKEN
    )
    there = fetched(config, for_core=True, for_text=True)
    assert (there.hf_token, there.revision, there.tokenizer_revision) == (None, None, None)
    assert fetched(there, for_core=True, for_text=True) == there
    assert len(asked) == 2


def test_no_token_is_shown() -> None:
    args = EngineArgs(model="org/m", hf_token=TOKEN)
    config = args.create_config()
    shown = [repr(args), repr(config), repr(config.model)]
    shown.append(repr(Repository(option="model", name="org/m", token=TOKEN)))
    assert config.model.hf_token == TOKEN and TOKEN not in "".join(shown)


@pytest.mark.parametrize("token", [TOKEN.encode(), [TOKEN], f"{TOKEN}\n{TOKEN}", f"{TOKEN} ü", ""])
def test_a_token_that_is_none_is_refused_without_showing_it(token: object) -> None:
    with pytest.raises(ConfigError, match=r"^hf_token is .*must be ") as caught:
        LLM("org/m", hf_token=token)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("option", ["revision", "tokenizer_revision", "download_dir"])
def test_empty_options_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is ''"):
        LLM("org/m", **{option: ""})


def test_the_options_of_a_hub_are_those_of_the_core_or_of_those_who_use_it(
    asked: list[Repository], capsys: pytest.CaptureFixture[str]
) -> None:
    args = EngineArgs(
        core_address="ipc:///c", revision="v1", tokenizer_revision="v2", hf_token=TOKEN
    )
    args.create_config()
    assert main(["core", "--tokenizer-revision", "v1"]) == 2
    assert "--tokenizer-revision is for clients of a core" in capsys.readouterr().err


def test_the_name_of_a_cached_model_is_that_of_its_repository() -> None:
    snapshot = Path("/cache/models--Qwen--Qwen3-0.6B/snapshots") / ("a" * 40)
    assert ModelInfo(path=snapshot, architecture="", model_type="", hf={}).name == "Qwen/Qwen3-0.6B"
    for path in ("/models/m", "/models--a--b/m", "/"):
        assert ModelInfo(path=Path(path), architecture="", model_type="", hf={}).name == path


def test_weights_at_the_top_are_those_the_loader_reads(tmp_path: Path) -> None:
    from engine.models.checkpoint import find_files

    for names in (
        ["model.safetensors", "model.fp16.safetensors"],
        ["a.safetensors", "b.safetensors", "consolidated.safetensors"],
    ):
        root = tmp_path / names[0]
        root.mkdir()
        for name in names:
            (root / name).touch()
        assert files.weights_at_top(names) == [file.name for file in find_files(root)]
