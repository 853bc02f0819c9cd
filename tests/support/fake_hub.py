"""A small hub on loopback: as much of the protocol as huggingface_hub speaks to fetch a model."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

INFO = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+?)(/revision/(?P<revision>[^/]+))?")
REFS = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+?)/refs")
FILE = re.compile(r"/(?P<name>[^/]+/[^/]+?)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


class Asked(NamedTuple):
    """One request: of a file, its method and name; of anything else the path."""

    method: str
    what: str
    range: str | None
    token: str | None


@dataclass
class Repo:
    """A repository. Tests change it as they like while the hub runs."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    readers: set[str] | None = None
    """Tokens that may read its files; None: gated for nobody."""
    is_private: bool = False
    """Whether others are told that it does not exist."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes the listing claims, where they are not the true ones."""
    cuts: dict[str, int] = field(default_factory=dict)
    """By file, how many of its next transfers break off in the middle."""
    delays: dict[str, float] = field(default_factory=dict)
    """By file, seconds that each transfer waits in the middle."""
    before: dict[str, Callable[[], object]] = field(default_factory=dict)
    """By file, what happens when it is asked for the first time."""
    stalls: dict[str, threading.Event] = field(default_factory=dict)
    """By file, what is set when its transfer has come to the middle, where it stays."""

    def commit(self, files: Mapping[str, bytes], *refs: str) -> str:
        """Add a commit that these branches or tags (main, if none) point to; its hash."""
        told = json.dumps({name: hashlib.sha1(data).hexdigest() for name, data in files.items()})
        sha = hashlib.sha1(f"{len(self.commits)} {told}".encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.refs.update(dict.fromkeys(refs or ("main",), sha))
        return sha

    def find(self, revision: str) -> str | None:
        sha = self.refs.get(revision, revision)
        return sha if sha in self.commits else None


class FakeHub:
    """Repositories by name, and what was asked of them."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.asked: list[Asked] = []
        self.down_with: int | None = None
        """Status of every answer, if the hub is out of order."""
        self.down_after_cut: int | None = None
        """What becomes of ``down_with`` when a transfer has broken off."""
        self.says_when_down = ""
        self.is_over = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def add(self, name: str, files: Mapping[str, bytes]) -> Repo:
        repo = self.repos[name] = Repo()
        repo.commit(files)
        return repo

    def fetched(self, file: str | None = None) -> list[str]:
        """Files whose bytes were asked for, in order; those of one name."""
        got = [a.what for a in self.asked if a.method == "GET" and not a.what.startswith("/")]
        return [each for each in got if file in (None, each)]

    def env(self, home: Path) -> dict[str, str]:
        """What a program finds in its environment to use this hub, with a cache of its own."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def stop(self) -> None:
        self.is_over.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        self._thread.start()
        try:
            yield self
        finally:
            self.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    hub: FakeHub

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away in the middle is what some tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on standard error."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.server.hub, urlsplit(self.path).path
        token = (self.headers.get("authorization") or "").removeprefix("Bearer ") or None
        file = FILE.fullmatch(path)
        what = path if file is None else unquote(file["file"])
        hub.asked.append(Asked(self.command, what, self.headers.get("range"), token))
        if hub.down_with is not None:
            return self._refuse(hub.down_with, why=hub.says_when_down)
        found = REFS.fullmatch(path) or INFO.fullmatch(path) or file
        if found is None:
            return self._refuse(404)
        repo = hub.repos.get(found["name"])
        if repo is None or (repo.is_private and token not in (repo.readers or ())):
            return self._refuse(401 if token is None else 404, "RepoNotFound")
        if found.re is REFS:
            return self._send_refs(repo)
        revision = unquote(found["revision"] or "main")
        sha = repo.find(revision)
        if sha is None:
            return self._refuse(404, "RevisionNotFound")
        if file is None:
            return self._send_info(found["name"], repo, sha)
        if repo.readers is not None and token not in repo.readers:
            return self._refuse(401 if token is None else 403, "GatedRepo")
        if what not in repo.commits[sha]:
            return self._refuse(404, "EntryNotFound")
        return self._send_file(repo, sha, what)

    def _refuse(self, status: int, code: str | None = None, why: str = "") -> None:
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        if why or code is not None:
            self.send_header("X-Error-Message", why or f"no: {code}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_refs(self, repo: Repo) -> None:
        refs = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha}
            for name, sha in repo.refs.items()
        ]
        self._send_json({"branches": refs, "converts": [], "tags": []})

    def _send_info(self, name: str, repo: Repo, sha: str) -> None:
        siblings = [
            {"rfilename": file, "size": repo.sizes.get(file, len(data)), "blobId": _etag(data)}
            for file, data in repo.commits[sha].items()
        ]
        self._send_json({"id": name, "modelId": name, "sha": sha, "siblings": siblings})

    def _send_file(self, repo: Repo, sha: str, name: str) -> None:
        repo.before.pop(name, lambda: None)()
        data = repo.commits[sha][name]
        start = 0
        if (asked := self.headers.get("range")) is not None:
            start = int(asked.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("X-Repo-Commit", sha)
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        rest = data[start:]
        middle = len(rest) // 2
        self.wfile.write(rest[:middle])
        self.wfile.flush()
        self.server.hub.is_over.wait(repo.delays.get(name, 0.0))
        if (stall := repo.stalls.get(name)) is not None:
            stall.set()
            self.server.hub.is_over.wait(100)
        if repo.cuts.get(name, 0) > 0:
            repo.cuts[name] -= 1
            self.server.hub.down_with = self.server.hub.down_after_cut
            self.close_connection = True
            return
        self.wfile.write(rest[middle:])


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def files_of(directory: Path) -> dict[str, bytes]:
    """A directory's files, as a commit has them."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
