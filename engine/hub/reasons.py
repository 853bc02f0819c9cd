"""Errors about repositories on a hub, with the value and what to do. No message shows a token."""

from __future__ import annotations

import errno
from collections.abc import Collection
from pathlib import Path

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from engine.errors import ModelError
from engine.hub import files, gguf_files
from engine.hub.files import Repository

LOGIN = "hf_token, HF_TOKEN or `hf auth login`"
MAX_LISTED = 10
MAX_LINE = 200


def spelled(repository: Repository) -> str:
    """Return a repository's name for errors: the option, its value and the revision."""
    name = repository.name + (f":{repository.gguf}" if repository.gguf else "")
    of_revision = "" if repository.revision is None else f" at revision {repository.revision!r}"
    return f"{repository.option} {name!r}{of_revision}"


def is_final(error: Exception) -> bool:
    """True for an error that a cached repository must not hide: a wrong revision or name."""
    return isinstance(error, RevisionNotFoundError | HFValidationError)


def is_unknown_revision(error: Exception) -> bool:
    return isinstance(error, RevisionNotFoundError)


def unknown_revision(repository: Repository, endpoint: str, known: Collection[str]) -> ModelError:
    option = "revision" if repository.option == "model" else "tokenizer_revision"
    listed = f"; it has: {', '.join(list(known)[:MAX_LISTED])}" if known else ""
    return ModelError(
        f"{option} is {repository.revision!r}, and {repository.name!r} has no such branch, tag or "
        f"commit{listed}; all are listed at {endpoint}/{repository.name}/tree/main"
    )


def explained(
    error: Exception, repository: Repository, endpoint: str, cache: Path, token: str | bool
) -> ModelError:
    """Convert an error of huggingface_hub or the system to a ``ModelError`` with advice."""
    where, page = spelled(repository), f"{endpoint}/{repository.name}"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    message = first_line(error, token)
    if isinstance(error, GatedRepoError):
        return ModelError(_gated(where, page, isinstance(token, str)))
    if isinstance(error, RepositoryNotFoundError):
        shown = "to this token" if isinstance(token, str) else "without a token"
        return ModelError(
            f"{where} is neither a directory in {Path.cwd()} nor a repository that {endpoint} "
            f"shows {shown}: check the spelling; for a private one set a token that may read it "
            f"({LOGIN})"
        )
    if status == 401:
        return ModelError(
            f"{where}: {endpoint} does not accept the token: make a new one at "
            f"{endpoint}/settings/tokens ({LOGIN}), or set hf_token=False for a public model"
        )
    if status is not None:
        return ModelError(
            f"{where}: {endpoint} answers with status {status} ({message}); try again later, or "
            "set HF_HUB_OFFLINE=1 to use what was fetched before"
        )
    if isinstance(error, OSError) and not isinstance(error, LocalEntryNotFoundError):
        return _of_system(error, where, cache, message)
    return ModelError(
        f"{where} could not be fetched from {endpoint} ({message}): check the connection, proxies "
        f"and HF_ENDPOINT, then try again; complete files are kept in {cache}. Without a network "
        "give the path of a local directory"
    )


def _gated(where: str, page: str, has_token: bool) -> str:
    if has_token:
        return (
            f"{where} is gated, and the account of the token may not read it: ask for access at "
            f"{page} (and let the token read gated repositories), or set a token of another "
            f"account ({LOGIN})"
        )
    return (
        f"{where} is gated: accept its licence at {page}, then set a token of that account "
        f"({LOGIN})"
    )


def _of_system(error: OSError, where: str, cache: Path, message: str) -> ModelError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelError(
            f"{where}: the disk of {cache} is full; make room, or set download_dir on another disk"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return ModelError(
            f"{where}: {cache} cannot be written ({message}); set download_dir or HF_HOME to a "
            "writable directory"
        )
    return ModelError(
        f"{where}: the download failed ({message}); try again: complete files are kept in {cache}"
    )


def not_cached(where: str, cache: Path, missing: list[str] | None) -> ModelError:
    """Make the error for missing files when offline. missing: their names; ``None``: all files."""
    if missing is None:
        has = f"{cache} does not have it: unset HF_HUB_OFFLINE for one start, which fetches it"
    else:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        has = (
            f"{cache} lacks {', '.join(missing[:3])}{more}: unset HF_HUB_OFFLINE for one start, "
            "which fetches the rest"
        )
    return ModelError(
        f"{where}: HF_HUB_OFFLINE is set, and {has}, or set download_dir, or give the "
        "path of a local directory"
    )


def check_weights(repository: Repository, endpoint: str, names: Collection[str]) -> None:
    """Raise ``ModelError``, before anything is fetched, if the weights are not safetensors."""
    if files.INDEX in names or files.weights_at_top(names):
        return
    where = spelled(repository)
    if ggufs := gguf_files.models_of(names):
        raise only_gguf(repository, list(ggufs))
    if pickles := files.of_kind(names, ".bin", ".pt", ".pth", ".ckpt"):
        raise ModelError(
            f"{where} has weights only as pickles ({pickles[0]}), which can run code when they are "
            "read and are never fetched: use a repository with safetensors, or the revision of a "
            f'conversion ("refs/pr/N", listed at {endpoint}/{repository.name}/discussions), or '
            "convert it yourself with transformers: AutoModelForCausalLM.from_pretrained(name)"
            ".save_pretrained(path)"
        )
    raise ModelError(
        f"{where} has no *.safetensors weights; use a repository that has some, or "
        'load_format="dummy" for random weights'
    )


def only_gguf(repository: Repository, names: list[str]) -> ModelError:
    """Make the error for a repository of GGUF files from which the name chooses none."""
    return ModelError(
        f"{spelled(repository)} has weights only as GGUF: choose one with "
        f"{gguf_files.options(repository, names)}"
    )


def check_room(where: str, cache: Path, num_bytes: int, num_free: int) -> None:
    """Raise ``ModelError`` if ``num_bytes`` to fetch exceed the free bytes of the cache's disk."""
    if num_bytes > num_free:
        raise ModelError(
            f"{where} needs {readable(num_bytes)} more, and the disk of {cache} has "
            f"{readable(num_free)} free; make room, or set download_dir on another disk"
        )


def readable(num_bytes: int) -> str:
    if num_bytes < 1 << 20:
        return f"{num_bytes / 1024:.1f} KiB"
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / (1 << 30):.2f} GiB"


def first_line(error: Exception, token: str | bool) -> str:
    """Return the first line of an error, shortened and without the token."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if isinstance(token, str) and token:
        text = text.replace(token, "***")
    return text[:MAX_LINE]
