"""A headless Chromium, driven by the DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from support.patience import WAIT_SECONDS

SECONDS = 20.0  # within which a page shows what is expected
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--window-size=1280,900",
    "--no-proxy-server",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39}


def browser_path() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One tab, with all its requests, log lines and dialogs."""

    def __init__(self, socket_url: str) -> None:
        from websockets.sync.client import connect

        self._stack = ExitStack()
        connection = connect(socket_url, max_size=None, open_timeout=WAIT_SECONDS)
        self._socket = self._stack.enter_context(connection)
        self._num = 0
        self.urls: list[str] = []
        """Addresses of all requests."""
        self.problems: list[str] = []
        """Exceptions, violations of the content policy, and errors in the console."""
        self.dialogs: list[str] = []
        """Texts of alerts and questions. All are accepted."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = self._send(method, params)
        while True:
            message = json.loads(self._socket.recv(timeout=WAIT_SECONDS))
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return dict(message["result"])
            if "method" in message:
                self._note(message["method"], message["params"])

    def _send(self, method: str, params: dict[str, Any]) -> int:
        self._num += 1
        self._socket.send(json.dumps({"id": self._num, "method": method, "params": params}))
        return self._num

    def _note(self, event: str, about: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.urls.append(about["request"]["url"])
        elif event == "Page.javascriptDialogOpening":
            self.dialogs.append(about["message"])
            answer = {"accept": True, "promptText": about.get("defaultPrompt", "")}
            self._send("Page.handleJavaScriptDialog", answer)
        elif event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(about["exceptionDetails"])[:400])
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert"):
            self.problems.append(json.dumps(about["args"])[:400])
        elif event == "Log.entryAdded" and about["entry"]["source"] == "security":
            self.problems.append(about["entry"]["text"][:400])

    def run(self, script: str) -> Any:
        """The value of an expression, after its promise."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = SECONDS) -> None:
        """Wait for an expression to be true."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, (script, self.run("document.body.innerText"))
            time.sleep(0.03)

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    def reload(self) -> None:
        """Load the page again, and wait until the document before is gone."""
        self.run("window.isOld = true")
        self.call("Page.reload")
        self.until("!window.isOld && document.readyState === 'complete'")

    def click(self, selector: str) -> None:
        self.until(f"document.querySelector({selector!r})?.checkVisibility()")
        self.run(f"document.querySelector({selector!r}).click()")

    def type(self, selector: str, text: str) -> None:
        """Put a text into an empty field, as a keyboard does."""
        self.until(f"document.querySelector({selector!r})?.checkVisibility()")
        self.run(f"document.querySelector({selector!r}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        about = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        about |= {"modifiers": 8 if shift else 0, **({"text": "\r"} if key == "Enter" else {})}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def text(self, selector: str) -> str:
        found = self.run(f"document.querySelector({selector!r})?.innerText ?? ''")
        return str(found)

    def resize(self, width: int, height: int, *, scale: float = 1.0) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale}
        self.call("Emulation.setDeviceMetricsOverride", mobile=width < 600, **size)

    def colours(self, scheme: str) -> None:
        """scheme: "dark" or "light"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def shot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


class Browser:
    def __init__(self, address: str) -> None:
        self._address = address

    def tab(self) -> Tab:
        """A new tab, which shares storage with the others but for that of the tab."""
        url = f"http://{self._address}/json/new?about:blank"
        request = urllib.request.Request(url, method="PUT")
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
            return Tab(json.load(answer)["webSocketDebuggerUrl"])


@contextmanager
def started_browser(directory: Path) -> Iterator[Browser]:
    """A browser with an empty profile in ``directory``."""
    path = browser_path()
    assert path is not None
    command = [path, *OPTIONS, f"--user-data-dir={directory}", "about:blank"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    place = directory / "DevToolsActivePort"
    try:
        end = time.monotonic() + WAIT_SECONDS
        while not place.exists() or not place.read_text().strip():
            assert process.poll() is None and time.monotonic() < end, "the browser did not start"
            time.sleep(0.05)
        yield Browser(f"127.0.0.1:{place.read_text().split()[0]}")
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
