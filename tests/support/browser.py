"""A headless Chromium, driven by ChromeDriver over its own protocol (W3C WebDriver)."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# As root, in a machine without a network.
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,520",
)


def is_installed() -> bool:
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


class Browser:
    def __init__(self, port: int, profile: Path) -> None:
        self._root = f"http://127.0.0.1:{port}"
        options = {"args": [*_FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "unhandledPromptBehavior": "ignore"}
        found = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._root += f"/session/{found['sessionId']}"

    def _call(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._root + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *args: object) -> Any:
        return self._call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def text(self, selector: str) -> str:
        elements = "Array.from(document.querySelectorAll(arguments[0]), e => e.innerText)"
        return str(self.run(f"return {elements}.join('\\n')", selector))

    def wait_for_text(self, selector: str, pattern: str, seconds: float = 20.0) -> str:
        deadline = time.monotonic() + seconds
        while True:
            found = self.text(selector)
            if re.search(pattern, found):
                return found
            assert time.monotonic() < deadline, f"{pattern!r} not in {selector}: {found!r}"
            time.sleep(0.1)

    def click(self, selector: str) -> None:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{next(iter(found.values()))}/click", {})

    def accept_question(self) -> str:
        text = str(self._call("GET", "/alert/text"))
        self._call("POST", "/alert/accept", {})
        return text

    def log(self) -> list[str]:
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def resize(self, width: int, height: int) -> None:
        """Gives the page, without the frame of the window, a size."""
        self._call("POST", "/window/rect", {"width": width, "height": height})
        inner = self.run("return [window.innerWidth, window.innerHeight]")
        frame = width - inner[0], height - inner[1]
        self._call("POST", "/window/rect", {"width": width + frame[0], "height": height + frame[1]})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def close(self) -> None:
        self._call("DELETE", "")


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[Browser]:
    """Starts ChromeDriver at a free port, and a browser with an empty profile."""
    command = ["chromedriver", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            for line in driver.stdout:
                if found := re.search(r"started successfully on port (\d+)", line):
                    browser = Browser(int(found[1]), directory / "profile")
                    try:
                        yield browser
                    finally:
                        browser.close()
                    return
            raise AssertionError("ChromeDriver did not start")
        finally:
            driver.terminate()
