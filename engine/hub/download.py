"""Downloads a repository into the cache of the Hugging Face ecosystem, or finds it there.

Files are fetched one by one in the calling thread, so that an interrupt acts immediately.
huggingface_hub fetches the parts of a large file in parallel; its lock per file lets several
processes share a download. An interrupted download never counts as complete, because the requested
revision is linked to the files at the very end.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath

from huggingface_hub import (
    HfApi,
    constants,
    get_token,
    hf_hub_download,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import LocalEntryNotFoundError

from engine.config.model import read_json
from engine.errors import ModelError
from engine.hub import files, gguf_files, reasons
from engine.hub.files import Repository

logger = logging.getLogger("engine.hub")

MAX_MOVES = 3  # changes of a branch during its download
REQUEST_SECONDS = 10.0


def download(repository: Repository) -> Path:
    """Return the local directory of a repository, or its GGUF file, fetching it if needed.

    Raises ``ModelError`` with the reason and what to do."""
    return Download(repository).run()


class Download:
    """The download of one repository."""

    def __init__(self, repository: Repository, endpoint: str | None = None) -> None:
        """Prepare a download. endpoint: address of the hub; ``HF_ENDPOINT`` by default."""
        self.repository = repository
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self.cache = Path(repository.cache or constants.HF_HUB_CACHE)
        self.is_offline = bool(constants.HF_HUB_OFFLINE)
        self._token: str | bool = False

    def run(self) -> Path:
        if self.is_offline:
            return self._cached(None)
        self._token = self._token_to_send()
        for _ in range(MAX_MOVES):
            try:
                commit, sizes = self._listing()
            except Exception as error:
                if reasons.is_final(error):
                    raise self._explained(error) from error
                return self._cached(error)
            try:
                root = self._fetch(commit, sizes)
            except ModelError:
                raise
            except Exception as error:
                raise self._explained(error) from error
            if root.name == commit:
                return self._place(root, sizes)
        raise ModelError(f"{self._where()} changed while it was fetched; set a revision")

    def _token_to_send(self) -> str | bool:
        """Return the access token to send to the hub; ``False``: send none."""
        repository = self.repository.token
        if isinstance(repository, str):
            return repository.strip()
        if repository is False or (repository is None and constants.HF_HUB_DISABLE_IMPLICIT_TOKEN):
            return False
        found = get_token()
        if found is None and repository is True:
            raise ModelError(
                "hf_token is True, but this machine has none: set HF_TOKEN, run `hf auth login`, "
                "or set hf_token to the token itself"
            )
        return found or False

    def _listing(self) -> tuple[str, dict[str, int]]:
        """Return the commit of the requested revision, and its files with sizes in bytes."""
        info = HfApi(endpoint=self.endpoint, token=self._token).model_info(
            self.repository.name,
            revision=self.repository.revision,
            files_metadata=True,
            timeout=REQUEST_SECONDS,
        )
        return str(info.sha), {file.rfilename: file.size or 0 for file in info.siblings or ()}

    def _fetch(self, commit: str, sizes: dict[str, int]) -> Path:
        """Fetch missing files and return the directory of the repository's files. If the revision
        has moved since ``commit`` was looked up, this is the directory of the newer commit."""
        repository = self.repository
        if repository.gguf is not None:
            anchor, *wanted = gguf_files.choose(repository, sizes)
        else:
            anchor, wanted = self._files_of_directory(commit, sizes)
        todo = [name for name in wanted if name != anchor and self._lookup(name, commit) is None]
        self._announce([*todo, anchor], commit, sizes)
        for name in todo:
            self._get(name, commit)
        depth = len(PurePosixPath(anchor).parts)
        return Path(self._get(anchor, repository.revision)).parents[depth - 1]

    def _files_of_directory(self, commit: str, sizes: dict[str, int]) -> tuple[str, list[str]]:
        """Return the name of the file to fetch last, and the names of all files to fetch."""
        repository = self.repository
        if repository.is_adapter:
            if absent := [name for name in files.ADAPTER if name not in sizes]:
                raise ModelError(
                    f"{self._where()} has no {' and no '.join(absent)}; name a LoRA adapter that "
                    "peft has stored in safetensors"
                )
            return files.ADAPTER[0], list(files.ADAPTER)
        if repository.has_weights:
            reasons.check_weights(repository, self.endpoint, sizes)
        patterns = [
            *files.CONFIG,
            *(files.TOKENIZER if repository.has_tokenizer else ()),
            *(files.CODE if repository.has_code else ()),
        ]
        wanted = [*files.matching(sizes, patterns), *self._weights(commit, sizes)]
        anchor = next((name for name in files.ANCHORS if name in sizes), None)
        if anchor is None or (repository.option == "model" and anchor != files.ANCHORS[0]):
            if ggufs := gguf_files.models_of(sizes):
                raise reasons.only_gguf(repository, list(ggufs))
            raise ModelError(
                f"{self._where()} has no config.json; name a model in the layout of transformers"
            )
        return anchor, wanted

    def _place(self, root: Path, names: Iterable[str]) -> Path:
        """Return the GGUF file in the directory of a repository, or the directory."""
        if self.repository.gguf is None:
            return root
        return root / gguf_files.choose(self.repository, names)[0]

    def _weights(self, commit: str, sizes: dict[str, int]) -> list[str]:
        """Return the names of the weight files to fetch. A weight index, if there is one, lists
        them."""
        if not self.repository.has_weights:
            return []
        modules = files.matching(sizes, files.MODULE_WEIGHTS)
        if files.INDEX not in sizes:
            return [*files.weights_at_top(sizes), *modules]
        names = files.weights_of_index(read_json(Path(self._get(files.INDEX, commit))))
        if absent := [name for name in names if name not in sizes]:
            raise ModelError(
                f"{self._where()} is incomplete: its {files.INDEX} names {', '.join(absent[:3])}, "
                "which the repository lacks; set another revision"
            )
        return [*names, *modules]

    def _announce(self, names: Iterable[str], commit: str, sizes: dict[str, int]) -> None:
        """Log what will be fetched. Raises ``ModelError`` if it does not fit on the disk."""
        new = [name for name in names if self._lookup(name, commit) is None]
        if not new:
            return
        num_bytes = sum(sizes[name] for name in new)
        reasons.check_room(self._where(), self.cache, num_bytes, _free_bytes(self.cache))
        logger.info(
            "%s: fetching %d files, %s, from %s to %s",
            self.repository.name,
            len(new),
            reasons.readable(num_bytes),
            self.endpoint,
            self.cache,
        )

    def _get(self, name: str, revision: str | None) -> str:
        return hf_hub_download(
            self.repository.name,
            name,
            revision=revision,
            cache_dir=self.cache,
            token=self._token,
            endpoint=self.endpoint,
        )

    def _lookup(self, name: str, revision: str | None) -> Path | None:
        """Return the path of a file in the cache, ``None`` if it is not there."""
        found = try_to_load_from_cache(
            self.repository.name, name, cache_dir=self.cache, revision=revision
        )
        return Path(found) if isinstance(found, str) else None

    def _cached(self, error: Exception | None) -> Path:
        """Return the repository's directory in the cache, for use without the hub. Raises
        ``ModelError`` if files are missing. error: why the hub failed; ``None`` when offline."""
        root = self._cached_root()
        missing = None if root is None else self._missing(root)
        if root is None or missing:
            if error is None:
                raise reasons.not_cached(self._where(), self.cache, missing)
            raise self._explained(error) from error
        if error is not None:
            logger.warning(
                "%s: using what was fetched before, because %s",
                self.repository.name,
                reasons.first_line(error, self._token),
            )
        return self._place(root, _names_below(root))

    def _cached_root(self) -> Path | None:
        """Return the repository's directory in the cache, ``None`` if it is not cached."""
        if self.repository.gguf is None:
            anchors = files.ADAPTER[:1] if self.repository.is_adapter else files.ANCHORS
            places = (self._lookup(name, self.repository.revision) for name in anchors)
            return next((place.parent for place in places if place is not None), None)
        with suppress(LocalEntryNotFoundError):
            return Path(
                snapshot_download(
                    self.repository.name,
                    revision=self.repository.revision,
                    cache_dir=self.cache,
                    local_files_only=True,
                )
            )
        return None

    def _missing(self, root: Path) -> list[str]:
        if self.repository.gguf is not None:
            wanted = self.repository.gguf
            models = gguf_files.models_of(_names_below(root))
            return [] if gguf_files.fitting(wanted, models) else [f"a GGUF file {wanted!r}"]
        if self.repository.is_adapter:
            return files.missing_of_adapter(root)
        weights = files.missing_weights(root) if self.repository.has_weights else []
        return weights + (files.missing_tokenizer(root) if self.repository.has_tokenizer else [])

    def _where(self) -> str:
        return reasons.spelled(self.repository)

    def _explained(self, error: Exception) -> ModelError:
        if reasons.is_unknown_revision(error):
            return reasons.unknown_revision(self.repository, self.endpoint, self._revisions())
        return reasons.explained(error, self.repository, self.endpoint, self.cache, self._token)

    def _revisions(self) -> list[str]:
        """Return the names of branches and tags, [] if they are unavailable."""
        try:
            refs = HfApi(endpoint=self.endpoint, token=self._token).list_repo_refs(
                self.repository.name
            )
        except Exception:
            return []
        return [ref.name for ref in (*refs.branches, *refs.tags)]


def _names_below(root: Path) -> list[str]:
    """Return the names of all files below a directory."""
    return [file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file()]


def _free_bytes(directory: Path) -> int:
    """Return the free bytes of the disk on which a directory is, or will be created."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return shutil.disk_usage(directory).free
