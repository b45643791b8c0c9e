"""A headless Chromium that is driven by chromedriver, for measurements and tests of pages."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import Request, urlopen

from zmqtrain.errors import ZmqTrainError

_PATIENCE_S = 120.0


class Browser:
    """A headless Chromium, by the WebDriver protocol."""

    def __init__(self, address: str, chromium: str) -> None:
        self._address = address
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1400,900"]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": chromium, "args": options},
            "goog:loggingPrefs": {"browser": "ALL"},
            "timeouts": {"script": round(1000 * _PATIENCE_S)},
        }
        made = self._request("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self._address = f"{address}/{made['sessionId']}"

    @classmethod
    @contextmanager
    def opened(cls, chromium: str, chromedriver: str) -> Iterator[Browser]:
        """A browser, until the end of the block."""
        with socket.create_server(("127.0.0.1", 0)) as free:  # with --port=0 it may choose one that it cannot have
            port = free.getsockname()[1]
        with subprocess.Popen([chromedriver, f"--port={port}"], stdout=subprocess.PIPE, text=True) as driver:
            assert driver.stdout is not None
            try:
                if not any("started successfully" in line for line in driver.stdout):
                    raise ZmqTrainError("chromedriver has not started")
                browser = cls(f"http://127.0.0.1:{port}/session", chromium)
                try:
                    yield browser
                finally:
                    browser._request("DELETE", "")
            finally:
                driver.terminate()

    def show(self, url: str) -> None:
        """Open an address."""
        self._request("POST", "/url", {"url": url})

    def asked(self, script: str, *arguments: Any) -> Any:
        """What a script passes to its last argument."""
        return self._request("POST", "/execute/async", {"script": script, "args": list(arguments)})

    def value(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self._request("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def press(self, *keys: str) -> None:
        """Press keys one after another: characters, or those of WebDriver (tab is ``\\ue004``)."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._request("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def devtools(self, command: str, **parameters: Any) -> Any:
        """The answer to a command of Chromium's DevTools protocol."""
        return self._request("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def screenshot(self) -> bytes:
        """What is seen, as PNG."""
        return base64.b64decode(self._request("GET", "/screenshot"))

    def console(self) -> list[str]:
        """What the console has said since the last call."""
        return [str(entry["message"]) for entry in self._request("POST", "/se/log", {"type": "browser"})]

    def _request(self, method: str, path: str, value: dict[str, Any] | None = None) -> Any:
        data = None if value is None else json.dumps(value).encode()
        request = Request(self._address + path, data=data, method=method, headers={"content-type": "application/json"})
        with urlopen(request, timeout=_PATIENCE_S) as answer:
            return json.load(answer)["value"]
