"""Models by name, against a hub on loopback: what is fetched, when, and what failures say."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from support.fake_hub import FakeHub, Repo

from engine.errors import ConfigError, ModelError
from engine.hub import reasons
from engine.hub.download import Download
from engine.hub.files import Repository

TOKEN = "hf_aSecretThatMustNotShow"
SMALL = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b'{"eos_token_id": 2}',
    "tokenizer.json": b'{"a": 1}',
    "tokenizer_config.json": b'{"eos_token": "</s>"}',
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
}
SHARDS = {f"model-0000{i}-of-00002.safetensors": bytes([i]) * 4000 for i in (1, 2)}
INDEX = (
    b'{"weight_map": {"a": "model-00001-of-00002.safetensors", '
    b'"b": "model-00002-of-00002.safetensors"}}'
)
UNWANTED = {
    "README.md": b"read me",
    "pytorch_model.bin": b"a pickle",
    "original/consolidated.00.pth": b"a pickle",
    "model.gguf": b"a format of others",
    "onnx/config.json": b"{}",
    "onnx/model.onnx": b"o",
    "fp16/model.safetensors": b"a variant",
    "consolidated.safetensors": b"Mistral's own format",
    "modeling_own.py": b"raise SystemExit",
    "training_args.bin": b"a pickle",
}
WHOLE = {**SMALL, **UNWANTED, "model.safetensors": b"weights" * 1000}
SPLIT = {**SMALL, **UNWANTED, **SHARDS, "model.safetensors.index.json": INDEX}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    huggingface_hub.close_session()  # its connections remember the proxies of their time
    with FakeHub().running() as running:
        yield running
    huggingface_hub.close_session()


@pytest.fixture
def asked(tmp_path: Path) -> Repository:
    return Repository(
        option="model",
        name="org/tiny",
        token=False,
        cache=str(tmp_path / "cache"),
        has_weights=True,
        has_tokenizer=True,
    )


Fetch = Callable[..., Path]


@pytest.fixture
def fetch(hub: FakeHub, asked: Repository) -> Fetch:
    """Download the repository; options are those of ``Repository``."""

    def run(*, is_offline: bool = False, **changes: Any) -> Path:
        hub.asked.clear()
        download = Download(replace(asked, **changes), hub.url)
        download.is_offline = is_offline
        return download.run()

    return run


def names(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


# What is fetched


def test_only_weights_configuration_and_tokenizer_are_fetched(hub: FakeHub, fetch: Fetch) -> None:
    hub.add("org/tiny", WHOLE)
    root = fetch()
    assert names(root) == {*SMALL, "model.safetensors"}
    assert all((root / name).read_bytes() == WHOLE[name] for name in names(root))
    assert sorted(hub.fetched()) == sorted(names(root))  # each once, and nothing else


def test_shards_are_those_of_the_index(hub: FakeHub, fetch: Fetch) -> None:
    hub.add("org/tiny", {**SPLIT, "model-00009-of-00009.safetensors": b"of something else"})
    assert names(fetch()) == {*SMALL, *SHARDS, "model.safetensors.index.json"}


@pytest.mark.parametrize("model", [WHOLE, SPLIT])
def test_modules_of_sentence_transformers_are_fetched_with_their_model(
    hub: FakeHub, fetch: Fetch, model: dict[str, bytes]
) -> None:
    configs = {
        "modules.json": b"[]",
        "config_sentence_transformers.json": b"{}",
        "sentence_bert_config.json": b"{}",
        "1_Pooling/config.json": b"{}",
        "2_Dense/config.json": b"{}",
    }
    unwanted = {"2_Dense/pytorch_model.bin": b"a pickle", "openvino/config.json": b"{}"}
    hub.add("org/tiny", {**model, **configs, **unwanted, "2_Dense/model.safetensors": b"dense"})
    assert names(fetch(has_weights=False)) == {*SMALL, *configs}
    found = names(fetch())
    assert found >= {*SMALL, *configs, "2_Dense/model.safetensors"}
    assert not found & (unwanted.keys() | UNWANTED.keys())


def test_an_adapter_is_fetched_alone_and_found_again(hub: FakeHub, fetch: Fetch) -> None:
    weights, config = "adapter_model.safetensors", "adapter_config.json"
    hub.add("org/tiny", {**WHOLE, config: b"{}", weights: b"products"})
    wishes = {"option": "lora_path", "is_adapter": True}
    root = fetch(**wishes)
    assert names(root) == {config, weights} and sorted(hub.fetched()) == [config, weights]
    assert fetch(is_offline=True, **wishes) == root and not hub.fetched()
    hub.add("org/other", {config: b"{}", "adapter_model.bin": b"a pickle"})
    with pytest.raises(ModelError, match=r"lora_path 'org/other' has no adapter_model.safetensors"):
        fetch(name="org/other", **wishes)


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [
        ({"has_weights": False}, set(SMALL)),
        ({"has_tokenizer": False}, {"config.json", "generation_config.json", "model.safetensors"}),
        ({"has_code": True}, {*SMALL, "model.safetensors", "modeling_own.py"}),
    ],
)
def test_what_is_not_wanted_here_stays_there(
    hub: FakeHub, fetch: Fetch, wishes: dict[str, bool], expected: set[str]
) -> None:
    hub.add("org/tiny", WHOLE)
    assert names(fetch(**wishes)) == expected


def test_the_rest_is_fetched_when_it_is_wanted(hub: FakeHub, fetch: Fetch) -> None:
    hub.add("org/tiny", WHOLE)
    front = fetch(has_weights=False)
    assert fetch() == front
    assert hub.fetched() == ["model.safetensors"]


def test_a_repository_of_a_tokenizer_needs_no_config(hub: FakeHub, fetch: Fetch) -> None:
    hub.add("org/tiny", {"tokenizer.json": b"{}", "tokenizer_config.json": b"{}"})
    root = fetch(option="tokenizer", has_weights=False)
    assert names(root) == {"tokenizer.json", "tokenizer_config.json"}
    assert fetch(option="tokenizer", has_weights=False, is_offline=True) == root


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: FakeHub, fetch: Fetch) -> None:
    repo = hub.add("org/tiny", WHOLE)
    sha = repo.commit({**WHOLE, "config.json": b'{"v": 1}'}, "v1")
    repo.commit({**WHOLE, "config.json": b'{"v": 2}'}, "refs/pr/1")
    for revision, text in (("v1", b'{"v": 1}'), (sha, b'{"v": 1}'), ("refs/pr/1", b'{"v": 2}')):
        for is_offline in (False, True):
            root = fetch(revision=revision, is_offline=is_offline)
            assert (root / "config.json").read_bytes() == text
    assert (fetch() / "config.json").read_bytes() == SMALL["config.json"]


# The cache


@pytest.mark.parametrize("files", [WHOLE, SPLIT])
def test_a_second_time_without_a_network_asks_for_nothing(
    hub: FakeHub, fetch: Fetch, files: dict[str, bytes]
) -> None:
    hub.add("org/tiny", files)
    root = fetch()
    assert fetch(is_offline=True) == root
    assert hub.asked == []


def test_a_second_time_nothing_is_fetched_and_a_new_commit_is(hub: FakeHub, fetch: Fetch) -> None:
    repo = hub.add("org/tiny", WHOLE)
    first = fetch()
    assert fetch() == first and hub.fetched() == []
    repo.commit({**WHOLE, "tokenizer.json": b'{"new": 1}'})
    second = fetch()
    assert second != first and hub.fetched() == ["tokenizer.json"]
    assert fetch(is_offline=True) == second


def test_a_branch_that_moves_meanwhile_gives_files_of_one_commit(
    hub: FakeHub, fetch: Fetch
) -> None:
    repo = hub.add("org/tiny", WHOLE)
    new = {**WHOLE, **{name: data + b" " for name, data in SMALL.items()}}
    repo.before["tokenizer.json"] = lambda: repo.commit(new)
    root = fetch()
    assert root.name == repo.refs["main"]
    assert all((root / name).read_bytes() == new[name] for name in names(root))


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_hub_that_is_down_is_done_without(
    hub: FakeHub, fetch: Fetch, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add("org/tiny", WHOLE)
    root = fetch()
    hub.down_with = status
    assert fetch() == root
    assert "using what was fetched before" in caplog.text and str(status) in caplog.text


def test_what_is_fetched_is_said_in_one_line(
    hub: FakeHub, fetch: Fetch, asked: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add("org/tiny", WHOLE)
    caplog.set_level(logging.INFO, "engine.hub")
    fetch()
    fetch()
    (line,) = (record.getMessage() for record in caplog.records if record.name == "engine.hub")
    assert line == f"org/tiny: fetching 7 files, 6.9 KiB, from {hub.url} to {asked.cache}"


# A transfer that breaks off


def test_a_transfer_that_breaks_off_goes_on_where_it_was(hub: FakeHub, fetch: Fetch) -> None:
    chunk = huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE
    weights = b"0123456789abcdef" * (chunk // 16 + 1) * 2
    repo = hub.add("org/tiny", {**WHOLE, "model.safetensors": weights})
    repo.cuts["model.safetensors"] = 1
    assert (fetch() / "model.safetensors").read_bytes() == weights
    ranges = [a.range for a in hub.asked if a.method == "GET" and a.what == "model.safetensors"]
    assert ranges == [None, f"bytes={chunk}-"]


def broken_off(hub: FakeHub, fetch: Fetch) -> Repo:
    """The second of two shards breaks off, and the hub goes down."""
    repo = hub.add("org/tiny", SPLIT)
    repo.cuts["model-00002-of-00002.safetensors"] = 1
    hub.down_after_cut = 503
    with pytest.raises(ConfigError, match=r"model 'org/tiny': .*status 503.*try again later"):
        fetch()
    return repo


def test_a_second_try_fetches_the_rest_only(hub: FakeHub, fetch: Fetch) -> None:
    broken_off(hub, fetch)
    hub.down_with = None
    root = fetch()
    assert hub.fetched() == ["model-00002-of-00002.safetensors", "config.json"]
    assert all((root / name).read_bytes() == data for name, data in SHARDS.items())


def test_half_a_download_is_no_model_without_a_network(
    hub: FakeHub, fetch: Fetch, asked: Repository
) -> None:
    broken_off(hub, fetch)
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE is set, and .* does not have it: unset"):
        fetch(is_offline=True)
    cache = Path(str(asked.cache))
    assert not list(cache.rglob("*.incomplete"))  # nothing that fills the disk unseen


@pytest.mark.parametrize(
    ("files", "gone"),
    [
        (SPLIT, "model-00001-of-00002.safetensors"),
        (WHOLE, "model.safetensors"),
        (WHOLE, "tokenizer.json"),
    ],
)
def test_a_cache_that_lacks_a_file_is_told_without_a_network_and_mended_with_one(
    hub: FakeHub, fetch: Fetch, files: dict[str, bytes], gone: str
) -> None:
    hub.add("org/tiny", files)
    root = fetch()
    (root / gone).unlink()
    with pytest.raises(ConfigError, match=rf"lacks {gone}: unset HF_HUB_OFFLINE"):
        fetch(is_offline=True)
    hub.down_with = 500
    with pytest.raises(ConfigError, match="status 500"):
        fetch()
    hub.down_with = None
    assert fetch() == root and names(root) >= {gone}


# What cannot be had


def test_a_gated_repository_names_its_page_and_how_to_give_a_token(
    hub: FakeHub, fetch: Fetch
) -> None:
    hub.add("org/tiny", WHOLE).readers = {TOKEN}
    page = re.escape(f"{hub.url}/org/tiny")
    with pytest.raises(ConfigError, match=rf"is gated: accept its licence at {page}.*hf_token"):
        fetch()
    with pytest.raises(ConfigError, match=rf"may not read it: ask for access at {page}") as caught:
        fetch(token="hf_of_another")
    assert "hf_of_another" not in told(caught.value)
    assert names(fetch(token=TOKEN)) == {*SMALL, "model.safetensors"}
    assert {request.token for request in hub.asked} == {TOKEN}


@pytest.mark.parametrize(("token", "shown"), [(False, "without a token"), (TOKEN, "to this token")])
def test_a_repository_that_is_missing_or_private(
    hub: FakeHub, fetch: Fetch, token: str | bool, shown: str
) -> None:
    hub.add("org/tiny", WHOLE).is_private = True
    for name in ("org/tiny", "org/none"):
        with pytest.raises(ConfigError) as caught:
            fetch(name=name, token=token)
        assert f"model {name!r} is neither a directory in" in str(caught.value)
        assert f"shows {shown}: check the spelling" in str(caught.value)
        assert TOKEN not in told(caught.value)


def test_a_token_of_the_environment_is_used_unless_it_is_not_to_be(
    hub: FakeHub, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/tiny", WHOLE).readers = {TOKEN}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(ConfigError, match="is gated: accept its licence"):
        fetch(token=False)
    assert {request.token for request in hub.asked} == {None}
    for token in (None, True):
        fetch(token=token)
        assert {request.token for request in hub.asked} == {TOKEN}


def test_a_token_that_this_machine_should_know_and_does_not(
    hub: FakeHub, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.hub.download.get_token", lambda: None)
    with pytest.raises(ConfigError, match=r"hf_token is True, but this machine has none: set HF"):
        fetch(token=True)


def test_a_missing_revision_names_those_there_are(hub: FakeHub, fetch: Fetch) -> None:
    hub.add("org/tiny", WHOLE).commit(WHOLE, "v1")
    fetch()
    told_of = rf"'v9', and 'org/tiny' has no such .*; it has: main, v1; .* at {hub.url}/org/tiny"
    with pytest.raises(ConfigError, match=rf"^revision is {told_of}"):
        fetch(revision="v9")
    with pytest.raises(ConfigError, match=rf"^tokenizer_revision is {told_of}"):
        fetch(revision="v9", option="tokenizer", has_weights=False)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"pytorch_model.bin": b"p"}, r"only as pickles \(pytorch_model.bin\).*refs/pr/N"),
        ({"consolidated.00.pth": b"p"}, r"only as pickles \(consolidated.00.pth\)"),
        ({"model-q4.gguf": b"g"}, r"only as GGUF: choose one with org/tiny:q4"),
        ({}, r"no \*.safetensors weights"),
        ({"consolidated.safetensors": b"w"}, r"no \*.safetensors weights"),
    ],
)
def test_weights_that_are_not_read_are_refused_before_anything_is_fetched(
    hub: FakeHub, fetch: Fetch, files: dict[str, bytes], message: str
) -> None:
    hub.add("org/tiny", {**SMALL, **files})
    with pytest.raises(ModelError, match=rf"model 'org/tiny' has .*{message}"):
        fetch()
    assert hub.fetched() == []


def test_a_repository_that_is_no_model(hub: FakeHub, fetch: Fetch) -> None:
    hub.add("org/tiny", {"model.safetensors": b"w", "README.md": b"r"})
    with pytest.raises(ModelError, match=r"'org/tiny' has no config.json; name a model"):
        fetch()


def test_an_index_that_names_what_is_not_there(hub: FakeHub, fetch: Fetch) -> None:
    files = {**SPLIT}
    del files["model-00002-of-00002.safetensors"]
    hub.add("org/tiny", files)
    with pytest.raises(
        ModelError, match=r"index.json names model-00002.* which the repository lacks"
    ):
        fetch()


def test_what_does_not_fit_on_the_disk_is_not_begun(
    hub: FakeHub, fetch: Fetch, asked: Repository
) -> None:
    hub.add("org/tiny", WHOLE).sizes["model.safetensors"] = 1 << 60
    with pytest.raises(ConfigError, match=rf"needs 1073741824.00 GiB more.*{asked.cache}.*free"):
        fetch()
    assert hub.fetched() == []


def test_a_hub_that_cannot_be_reached(asked: Repository, hub: FakeHub) -> None:
    hub.stop()
    with pytest.raises(ConfigError) as caught:
        Download(asked, hub.url).run()
    assert f"model 'org/tiny' could not be fetched from {hub.url} (ConnectError" in str(
        caught.value
    )
    assert "give the path of a local directory" in str(caught.value)


def test_a_cache_that_cannot_be_written(hub: FakeHub, fetch: Fetch, tmp_path: Path) -> None:
    hub.add("org/tiny", WHOLE)
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(ConfigError, match=r"cannot be written.*set download_dir or HF_HOME"):
        fetch(cache=str(tmp_path / "file" / "cache"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "the disk of /c is full; .*download_dir",
        ),
        (PermissionError(errno.EACCES, "Permission denied"), "/c cannot be written.*download_dir"),
        (
            OSError("Consistency check failed: 4 bytes"),
            "the download failed .*Consistency.*try again",
        ),
        (TimeoutError("timed out"), "the download failed .*try again"),
        (RuntimeError(f"Bearer {TOKEN} is illegal\nand more"), r"RuntimeError: Bearer \*\*\* is"),
    ],
)
def test_errors_of_the_system_and_the_library_lead_on(
    asked: Repository, error: Exception, message: str
) -> None:
    told_error = reasons.explained(error, asked, "http://hub", Path("/c"), TOKEN)
    assert re.search(f"model 'org/tiny'.*{message}", str(told_error))
    assert TOKEN not in str(told_error)


def told(error: BaseException) -> str:
    """An error and all that it came of, as a traceback shows them."""
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(before)
    return "\n".join(f"{each!r} {each}" for each in chain)


def test_a_refused_token_is_told_without_it(hub: FakeHub, fetch: Fetch) -> None:
    hub.add("org/tiny", WHOLE)
    hub.down_with, hub.says_when_down = 401, "Invalid credentials in Authorization header"
    with pytest.raises(ConfigError, match=r"does not accept the token.*/settings/tokens") as caught:
        fetch(token=TOKEN)
    assert TOKEN not in told(caught.value)
