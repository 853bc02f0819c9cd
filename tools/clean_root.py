"""Follows the steps of a Dockerfile in a fresh Debian, and starts the server there, read-only.

    python tools/clean_root.py [--model DIR] [--keep DIR] [--starts 3]

Needs root and `debootstrap`, no builder of images; without them it says so and ends with status 0.
The server starts as the image's user from a read-only root, with an empty /tmp and the model
mounted for reading. Prints a JSON line; the exit status is 1 if a start takes more than 5 s to
/health, compiles a kernel, or does not drain.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.dockerfile import Bind, Image, build, entering, steps_of  # noqa: E402
from support.served import free_port, is_ready  # noqa: E402

from engine.assets import BOX_MODEL  # noqa: E402

MIRROR = "http://deb.debian.org/debian"
SUITE = "bookworm"
PYPI = "https://pypi.org/simple"
REACH_SECONDS = 10.0
MAX_START_SECONDS = 5.0
WAIT_SECONDS = 120.0
STREAM_TOKENS = 200
COMPILES = ("compiling them takes", "kernels cannot be stored")  # in the log of a start that does
NEEDED = ("debootstrap", "unshare", "chroot", "setpriv", "mount")
# Where programs of this machine find registries and what they trust. Used in steps, kept nowhere.
LENT = ("PIP_CERT", "PIP_CONFIG_FILE", "PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def torch_index(path: Path) -> dict[str, str]:
    """PyPI as a build argument where the Dockerfile's index of torch cannot be reached."""
    (default,) = (
        text.partition("=")[2]
        for keyword, text in steps_of(path)
        if keyword == "ARG" and text.startswith("TORCH_INDEX=")
    )
    try:
        urllib.request.urlopen(default, timeout=REACH_SECONDS).close()
    except OSError as error:
        print(f"{default} cannot be reached ({error}): torch comes from {PYPI}")
        return {"TORCH_INDEX": PYPI}
    return {}


def lent() -> tuple[dict[str, str], list[Bind]]:
    """Variables and mounts that steps need on this machine to reach registries."""
    variables = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    binds = [Bind(Path("/etc/resolv.conf"), "/etc/resolv.conf")]
    for name in (*LENT, *PROXIES):
        value = os.environ.get(name)
        if value is None:
            continue
        variables[name] = value
        if os.path.isabs(value) and Path(value).exists():
            variables[name] = f"/lent-{name.lower()}"
            binds.append(Bind(Path(value), variables[name]))
    return variables, binds


def made(path: Path, folder: Path, chosen: dict[str, str]) -> Image:
    """The image of a Dockerfile, from a base system that is kept in the folder."""
    base, root = folder / "base", folder / "root"
    with (folder / "build.log").open("wb") as file:
        if not (base / "etc" / "debian_version").exists():
            bootstrap = ["debootstrap", "--variant=minbase", SUITE, str(base), MIRROR]
            subprocess.run(bootstrap, check=True, stdout=file, stderr=file)
        shutil.rmtree(root, ignore_errors=True)
        subprocess.run(["cp", "-a", str(base), str(root)], check=True)
        variables, binds = lent()
        image = build(path, ROOT, root, chosen, variables, binds, file)
    for bind in binds:  # empty places for mounts
        place = root / bind.target.lstrip("/")
        if bind.target.startswith("/lent-"):
            place.rmdir() if place.is_dir() else place.unlink()
    return image


@contextmanager
def started(
    image: Image, model: Path, log: Path, options: Sequence[str], caches: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[bytes], str, float]]:
    """A server from the read-only image: its process, address and seconds to /health."""
    port = free_port()
    command = [*image.entrypoint, *image.command, "--port", str(port), *options]
    line = entering(
        image, command, image.env, [Bind(model, "/model")], writable=False,
        tmpfs=("/tmp", *caches),
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    begin = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(line, stdout=file, stderr=file)
    try:
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() - begin > WAIT_SECONDS:
                raise SystemExit(f"the server is not ready:\n{log.read_text()}")
            time.sleep(0.02)
        yield process, url, time.monotonic() - begin
    finally:
        if process.poll() is None:
            # With it, all processes of its namespace end; `unshare` would leave them.
            os.kill(first_process(process), signal.SIGKILL)
        process.wait()


def first_process(outer: subprocess.Popen[bytes]) -> int:
    """The process that is number 1 in the namespace of a server."""
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
    return int(children[0])


def is_checked(image: Image, url: str) -> bool:
    """Whether the command of the image's health check succeeds."""
    command = [each.replace("http://127.0.0.1:8000", url) for each in image.check]
    return subprocess.run(entering(image, command, image.env, writable=False)).returncode == 0


def drained(process: subprocess.Popen[bytes], url: str) -> dict[str, Any]:
    """Send SIGTERM in the middle of a stream; what the stream and the process came to."""
    body = {"model": "model", "prompt": "Once", "max_tokens": STREAM_TOKENS, "stream": True}
    body |= {"ignore_eos": True}
    client = ["curl", "-sN", f"{url}/v1/completions", "-H", "Content-Type: application/json"]
    with subprocess.Popen([*client, "-d", json.dumps(body)], stdout=subprocess.PIPE) as stream:
        assert stream.stdout is not None
        stream.stdout.readline()
        begin = time.monotonic()
        os.kill(first_process(process), signal.SIGTERM)
        rest = stream.stdout.read().decode()
    status = process.wait(WAIT_SECONDS)
    return {
        "finish": "length" if '"finish_reason":"length"' in rest else rest[-200:],
        "exit_status": status,
        "seconds": round(time.monotonic() - begin, 2),
    }


def measure(image: Image, model: Path, folder: Path, starts: int) -> dict[str, Any]:
    """Start the server several times. Returns the figures of all."""
    options = ("--served-model-name", "model")
    seconds, compiled = [], 0
    for index in range(starts):
        log = folder / f"start-{index}.log"
        with started(image, model, log, options) as (process, url, took):
            seconds.append(round(took, 2))
            owner = Path(f"/proc/{first_process(process)}").stat().st_uid
            is_healthy = is_checked(image, url)
            end = drained(process, url)
        compiled += sum(log.read_text().count(each) for each in COMPILES)
    cache = image.root / image.env["HOME"].lstrip("/") / ".cache"
    return {
        "seconds_to_health": seconds,
        "median": statistics.median(seconds),
        "compiled_again": compiled,
        "user": owner,
        "owners_of_cache": sorted({each.stat().st_uid for each in [cache, *cache.rglob("*")]}),
        "health_check": is_healthy,
        "drain": end,
    }


def failures(found: dict[str, Any]) -> list[str]:
    """What of the figures breaks a promise."""
    checks = {
        f"the median start takes more than {MAX_START_SECONDS:g} s": found["median"]
        > MAX_START_SECONDS,
        "a start compiles kernels": found["compiled_again"] > 0,
        "the server runs as root": found["user"] == 0,
        "a volume that begins as ~/.cache cannot be written": found["owners_of_cache"]
        != [found["user"]],
        "the health check fails": not found["health_check"],
        "the stream is cut": found["drain"]["finish"] != "length",
        "the exit status is not 0": found["drain"]["exit_status"] != 0,
    }
    return [name for name, fails in checks.items() if fails]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, default=ROOT / "deploy" / "Dockerfile")
    parser.add_argument("--model", type=Path, default=BOX_MODEL, help="default: box")
    parser.add_argument("--keep", type=Path, help="keeps base system, root and logs here")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument(
        "--build-arg", action="append", default=[], metavar="NAME=VALUE", help="repeatable"
    )
    parsed = parser.parse_args()
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        print(f"skipped: needs root, and {', '.join(missing or NEEDED)}")
        return 0
    chosen = torch_index(parsed.file)
    chosen |= dict(each.split("=", 1) for each in parsed.build_arg)
    with tempfile.TemporaryDirectory() as temporary:
        folder = parsed.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        image = made(parsed.file, folder, chosen)
        found = {"build_seconds": round(time.monotonic() - begin)}
        found |= measure(image, parsed.model.resolve(), folder, parsed.starts)
    found["failures"] = failures(found)
    print(json.dumps(found))
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
