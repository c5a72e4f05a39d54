"""Headless Chromium, controlled through pipes without a driver.

Pages see no network: every name resolves to nothing, and what they ask for is kept.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 1800.0  # ends what hangs
OPTIONS = (
    "--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps",
    "--disable-extensions", "--disable-sync", "--disable-dev-shm-usage", "--mute-audio",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--hide-scrollbars",
)  # fmt: skip


def chromium() -> str | None:
    """Path of Chromium, or None if it is not installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """An open page, with what it logged and asked the network for.

    Attributes:
        errors: Errors and warnings of its console, exceptions, and refusals of its policy.
        requests: Addresses, but for the file itself.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = session["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser for something, by the names of its DevTools protocol."""
        self._number += 1
        asked: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            asked["sessionId"] = self._session
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._hear(answer)

    def open(self, path: Path) -> None:
        self._loaded = False
        self.call("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._hear(self._read())

    def run(self, script: str) -> Any:
        """Value of an expression in the page; a promise is awaited."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True,
                         returnByValue=True)  # fmt: skip
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until an expression in the page is true."""
        end = time.monotonic() + PATIENCE_S
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"still not true: {condition}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """A key, by its name, on whatever has the focus."""
        codes = {"Enter": 13, "ArrowUp": 38, "ArrowDown": 40}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                      windowsVirtualKeyCode=codes[key], **text)  # fmt: skip

    def show(self, width: int, height: int = 900, *, theme: str = "light") -> None:
        """Be a window of this size, on a system with this theme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, *, whole: bool = True) -> bytes:
        """PNG of the page."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(taken["data"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], PATIENCE_S)
            assert ready, "the browser says nothing"
            piece = os.read(self._from, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _hear(self, event: dict[str, Any]) -> None:
        name, what = event.get("method"), event.get("params", {})
        if name == "Page.loadEventFired":
            self._loaded = True
        elif name == "Runtime.exceptionThrown":
            self.errors.append(str(what["exceptionDetails"]))
        elif name == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"):
            self.errors.append(str(what["args"]))
        elif name == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(what["entry"]["text"]))
        elif name == "Network.requestWillBeSent":
            url = what["request"]["url"]
            if what.get("type") != "Document" or not url.startswith("file:"):
                self.requests.append(url)


@contextmanager
def opened(folder: Path, *, fonts: Path | None = None) -> Iterator[Page]:
    """A page of a browser of its own, which keeps its profile in a folder.

    Args:
        folder: The folder.
        fonts: A configuration of fontconfig to use in place of the machine's.
    """
    program = chromium()
    assert program is not None
    theirs, ours = os.pipe(), os.pipe()
    command = [program, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    if os.geteuid() == 0:
        command.insert(1, "--no-sandbox")
    # It reads from its file 3 and writes to its file 4.
    shell = ["bash", "-c", f'exec "$@" 3<&{theirs[0]} 4>&{ours[1]}', "bash", *command]
    environment = {**os.environ, "HOME": str(folder)}
    if fonts is not None:
        environment["FONTCONFIG_FILE"] = str(fonts)
    process = subprocess.Popen(
        shell, pass_fds=(theirs[0], ours[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=environment,
    )  # fmt: skip
    os.close(theirs[0])
    os.close(ours[1])
    try:
        yield Page(theirs[1], ours[0])
    finally:
        os.close(theirs[1])
        os.close(ours[0])
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
