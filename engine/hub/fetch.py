"""Replaces names of repositories by local directories, fetching them into the cache if needed.

The process that starts an engine does this first. The engine's other processes get directories
instead of names, and no access token.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.config.model import ModelConfig, is_hub_name
from engine.errors import ConfigError
from engine.gguf.link import is_gguf_path
from engine.hub.files import Repository


def fetched(config: ModelConfig, *, for_core: bool, for_text: bool) -> ModelConfig:
    """Return the configuration with local directories instead of names, fetching what is missing.

    for_core: fetch configuration and weights; for_text: fetch the tokenizer and the recommended
    sampling values. Raises ``ConfigError`` naming the value and what to do."""
    revision = config.tokenizer_revision
    source = config.tokenizer
    if source is None and revision not in (None, config.revision):
        source = config.model  # the same repository at another revision
    text_of_model = for_text and source is None
    model, tokenizer = config.model, source
    if is_hub_name(model):
        wants_values = for_text and config.generation_config == "auto"
        if for_core or text_of_model or wants_values:
            wants_weights = for_core and config.load_format != "dummy"
            model = _fetch(config, "model", model, config.revision, wants_weights, text_of_model)
    elif config.revision is not None:
        raise _no_revision("revision", config.revision, "model", model)
    if source is not None and for_text and is_hub_name(source):
        tokenizer = _fetch(config, "tokenizer", source, revision, False, True)
    elif revision is not None and not is_hub_name(source or config.model):
        raise _no_revision("tokenizer_revision", revision, "tokenizer", source or config.model)
    if for_core or for_text:
        model = _directory(model)
    if for_text and tokenizer is not None:
        tokenizer = _directory(tokenizer)
    return replace(
        config,
        model=model,
        tokenizer=tokenizer,
        revision=None,
        tokenizer_revision=None,
        hf_token=None,
    )


def fetched_adapter(path: str, download_dir: str | None) -> str:
    """Return the directory of a LoRA adapter, fetching it if ``path`` is a repository's name,
    ``owner/name``, and no local path. Raises ``ConfigError`` naming the value and what to do."""
    if path.count("/") != 1 or ":" in path or not is_hub_name(path):
        return path
    from engine.hub.download import download

    cache = None if download_dir is None else str(Path(download_dir).expanduser())
    return str(download(Repository(option="lora_path", name=path, cache=cache, is_adapter=True)))


def _directory(model: str) -> str:
    """Return the model directory of a GGUF file; other values unchanged."""
    if is_hub_name(model) or not is_gguf_path(model):
        return model
    # Imported here: the gguf package is needed for such files only.
    from engine.gguf.directory import directory_of

    return str(directory_of(model))


def _fetch(
    config: ModelConfig,
    option: str,
    name: str,
    revision: str | None,
    has_weights: bool,
    has_tokenizer: bool,
) -> str:
    # Imported here: the library takes a quarter of a second, and a directory does not need it.
    from engine.hub.download import download

    cache = config.download_dir
    name, _, gguf = name.partition(":")
    return str(
        download(
            Repository(
                option=option,
                name=name,
                gguf=gguf or None,
                revision=revision,
                token=config.hf_token,
                cache=None if cache is None else str(Path(cache).expanduser()),
                has_weights=has_weights,
                has_tokenizer=has_tokenizer,
                has_code=config.trust_remote_code,
            )
        )
    )


def _no_revision(option: str, revision: str, what: str, value: str) -> ConfigError:
    return ConfigError(
        f"{option} is {revision!r}, but {what} is {value!r}, a local path, which has no "
        f"revisions; leave {option} out, or name a repository"
    )
