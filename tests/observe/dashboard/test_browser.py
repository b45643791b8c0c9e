"""The page in a real browser, where there is one: every panel shows what the server has, and nothing goes wrong in it."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tests.browser import Browser
from tests.observe.dashboard.runs import add_events, make_run
from tests.observe.dashboard.test_search import begins, ends, line, make_search
from tests.observe.dashboard.test_server import TOKEN, Control
from zmqtrain.observe.dashboard.server import make_app

CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or CHROMEDRIVER is None, reason="needs Chromium and its driver (apt-get install chromium chromium-driver)"
)
TAB, ENTER, ESCAPE = "\ue004", "\ue007", "\ue00c"
#: Waits until a condition is true and nothing is left to be drawn, for at most two minutes.
_WAIT = """
const [condition, done] = arguments, began = performance.now();
const holds = new Function(`return ${condition}`);
(function look() {
  let found = false;
  // While the page begins, its names and values may not be there yet.
  try { found = holds() && !page.drawing; } catch (error) { if (error instanceof SyntaxError) throw error; }
  if (found || performance.now() - began > 1e5) done(found);
  else setTimeout(look, 20);
})();
"""
_TEXTS = """
const all = (selector) => [...document.querySelectorAll(selector)];
const texts = (elements) => [...elements].map((each) => each.textContent);
const shown = (id) => all(`#${id} tr`).map((line) => texts(line.cells));
const named = (each) => each.getAttribute("aria-label");
return {
  title: document.getElementById("title").textContent, status: document.getElementById("status").textContent,
  numbers: Object.fromEntries(all("#numbers > div").map((each) => texts(each.children))),
  workers: shown("workers"), members: shown("members"), servers: shown("servers"), traffic: shown("traffic"), feed: shown("feed"),
  trials: shown("trials"), now: document.getElementById("search-now").textContent,
  hosts: all("#hosts [role=img]").map(named),
  slow: document.getElementById("slow").textContent, gone: document.getElementById("gone").textContent,
  charts: Object.fromEntries(all(".chart[role=img]").map((each) => [each.id, named(each)])),
  stale: document.getElementById("stale-by").textContent,
};
"""


class Running(Control):
    """All runs go on."""

    def state(self, path: Path) -> dict[str, Any]:
        return {"status": "running"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser.opened(str(CHROMIUM), str(CHROMEDRIVER)) as driver:
        yield driver


@pytest.fixture
def control(request: pytest.FixtureRequest) -> Control:
    return request.param() if hasattr(request, "param") else Control()  # type: ignore[no-any-return]


@pytest.fixture
def address(browser: Browser, tmp_path: Path, control: Control) -> Iterator[str]:
    make_run(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        app = make_app(tmp_path, control, TOKEN, cookie=f"zmqtrain-{listening.getsockname()[1]}")
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/?token={TOKEN}"
        browser.show("about:blank")  # before the server ends, so that it leaves no open stream
        browser.console()
        server.should_exit = True
        thread.join()


def opened(browser: Browser, address: str, *, width: int = 1400, scheme: str = "light") -> None:
    browser.devtools("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    browser.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.show(address)


def wait(browser: Browser, condition: str) -> None:
    assert browser.asked(_WAIT, condition), condition


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (1400, "dark"), (390, "light"), (390, "dark")])
def test_a_run_that_has_ended_beside_another(browser: Browser, address: str, tmp_path: Path, width: int, scheme: str) -> None:
    make_run(tmp_path, "digits-002", steps=3)
    opened(browser, f"{address}#run=digits-001&other=digits-002", width=width, scheme=scheme)
    wait(browser, "page.compared && document.querySelectorAll('#feed td').length && page.state.workers.length")
    shown = browser.value(_TEXTS)
    assert (shown["title"], shown["status"]) == ("digits-001", "done")
    assert shown["charts"].keys() == {"loss", "eval", "split", "lr", "stale"}
    assert shown["charts"]["loss"] == "Curves; the newest values: mean 0.2, mean, digits-002 0.3333"
    assert [row[0] for row in shown["workers"]] == ["worker/0", "worker/1"]
    assert "its device computes 3.0 times as long as the others'" in shown["slow"]
    assert any("<b>kept</b> & done" in row[-1] for row in shown["feed"]), "what a run says is text"
    ground, ink, wide, seen = browser.value("""
        const { backgroundColor, color } = getComputedStyle(document.body);
        return [backgroundColor, color, document.documentElement.scrollWidth, innerWidth];""")
    light = [sum(map(int, colour[4:-1].split(","))) > 380 for colour in (ground, ink)]
    assert light == ([True, False] if scheme == "light" else [False, True])
    assert wide <= seen == width, "nothing is beyond the screen's edge"
    assert not browser.console()


@pytest.mark.parametrize("control", [Running], indirect=True)
def test_a_run_that_goes_on_without_a_worker(browser: Browser, address: str, tmp_path: Path) -> None:
    path = make_run(tmp_path, "live-001", ended=False)
    add_events(path, ("lost", 1, None, {"reason": "no heartbeat for 8 s"}))
    opened(browser, f"{address}#run=live-001")
    wait(browser, "page.run === 'live-001' && page.state.members.some((each) => each.state === 'lost')")
    shown = browser.value(_TEXTS)
    assert (shown["status"], shown["gone"]) == ("running", "worker/1 lost: no heartbeat for 8 s")
    for name, value in {
        "Step": "4..5",  # of the worker that is there, and of the furthest
        "Loss": "0.2",
        "Evaluation: accuracy": "0.75",
        "Learning rate": "0.1",
        "Newest checkpoint": "none",
    }.items():
        assert name in shown["numbers"]
        if name != "Step":
            assert shown["numbers"][name] == value
    first, second = shown["workers"]
    assert first[:8] == ["worker/0", "a", "0", "in the run, no step for 15.0 s", "4", "0.2", "8", "500 ms"]
    assert (second[0], second[3]) == ("worker/1", "lost, slow")
    assert shown["hosts"] == ["a: worker/0, group 0, in the run; worker/1, group 1, lost, slow"]
    assert shown["servers"] == [["server/0", "5", "2 KB", "0.5 (at most 3)", "25 %", ""]]
    assert shown["traffic"] == [["from", "worker/1"], ["worker/0", "2 KB"]]
    assert shown["stale"].endswith("as workers counted them: 1.00 in the mean.")
    add_events(path, ("step", 0, 6, {"loss": 0.125, "seconds": 0.5, "compute_s": 0.1, "exposed_s": 0.1, "samples": 4}))
    wait(browser, "document.querySelector('#workers td:nth-child(5)').textContent === '6'")
    assert browser.value(_TEXTS)["workers"][0][5] == "0.125", "what happens appears by itself"
    assert not browser.console()


@pytest.mark.parametrize("control", [Running], indirect=True)
def test_a_search_as_it_goes(browser: Browser, address: str, tmp_path: Path) -> None:
    make_search(tmp_path, begins(1), ends(1), line("grid"), begins(2))
    opened(browser, f"{address}#run=spirals-001")
    wait(browser, "page.state.search && document.querySelectorAll('#trials tr').length")
    shown = browser.value(_TEXTS)
    assert shown["now"] == "Now trial 2: race, 2 groups, momentum 0.6, learning rate 0.1, 12 updates. 1 trial so far."
    assert shown["trials"] == [
        ["", "grid", "why grid"],
        ["1", "race", "2", "0.6", "0.1", "11", "3.0 s", "2 to 1.5", "it may be better"],
    ]
    assert not browser.value("return document.getElementById('loss').checkVisibility()"), "nothing trains that could be seen"
    assert not browser.console()


@pytest.mark.parametrize("control", [Running], indirect=True)
def test_keys_and_names_do_without_a_mouse_and_without_eyes(browser: Browser, address: str, control: Control) -> None:
    opened(browser, f"{address}#run=digits-001")
    wait(browser, "page.state && !document.getElementById('stop').disabled")
    reached = []
    for _ in range(30):
        browser.press(TAB)
        reached.append(browser.value("return document.activeElement.id || document.activeElement.textContent"))
    wanted = ["Skip to the run", "run", "other", "axis", "checkpoint", "stop", "source", "kind", "peer", "text", "feed-scroll"]
    assert list(dict.fromkeys(each for each in reached if each in wanted)) == wanted, reached
    browser.value("document.getElementById('stop').focus()")
    browser.press(ENTER)
    wait(browser, "document.getElementById('sure').open")
    browser.press(ESCAPE)
    wait(browser, "!document.getElementById('sure').open")
    assert not control.asked, "to leave the question is to answer no"
    browser.press(ENTER)
    wait(browser, "document.getElementById('sure').open")
    browser.value("document.getElementById('yes').focus()")
    browser.press(ENTER)
    wait(browser, "document.getElementById('said').textContent === 'it stops'")
    assert control.asked == ["stop digits-001"]
    named = ("button", "combobox", "searchbox", "link", "img", "region", "table", "dialog")
    for node in browser.devtools("Accessibility.getFullAXTree")["nodes"]:
        if not node.get("ignored") and node["role"]["value"] in named:
            assert node.get("name", {}).get("value"), f"without a name for screen readers: {node}"
    assert not browser.console()
