"""The page in a real browser, where there is one: it draws what the server has, and nothing goes wrong in it."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from tests.observe.dashboard.runs import make_run
from tests.observe.dashboard.test_server import TOKEN, Control
from tests.patience import PATIENCE_S
from zmqtrain.observe.dashboard.server import make_app

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium (apt-get install chromium)")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    make_run(tmp_path)
    make_run(tmp_path, "digits-002", steps=3)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        app = make_app(tmp_path, Control(), TOKEN)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/?token={TOKEN}"
        server.should_exit = True
        thread.join()


def opened(address: str, size: str, folder: Path, patience_s: float) -> tuple[str, list[str]]:
    """The page as it is after so many seconds, and what the browser's console says."""
    assert BROWSER is not None
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        f"--window-size={size}", f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr",
        f"--virtual-time-budget={1000 * patience_s:.0f}", "--dump-dom", address,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line or "Uncaught" in line]


@pytest.mark.parametrize("size", ["1400,900", "390,900"])
def test_the_page_draws_a_run_beside_another(address: str, size: str, tmp_path: Path) -> None:
    for patience_s in (20, 100, 600):  # of the page's own time, which stands still while it waits for an answer
        page, console = opened(f"{address}#run=digits-001&other=digits-002", size, tmp_path, patience_s)
        if "mean, digits-002" in page and "&lt;b&gt;kept" in page:  # events are drawn last
            break
    assert not console
    assert re.search(r'id="title">digits-001<', page), page
    assert page.count("<canvas") == 5, "a chart each for loss, evaluation, step time, learning rate and staleness"
    assert "mean, digits-002" in page
    assert len(re.findall(r'<th scope="row">worker/', page)) == 3, "both workers, and the one that has reported its traffic"
    assert "its device computes 3.0 times as long as the others'" in page
    assert "25 % busy" in page
    assert "&lt;b&gt;kept&lt;/b&gt; &amp; done" in page, "what a run says is text"
