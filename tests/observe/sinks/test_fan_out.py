"""No sink can slow a run down or end it, and none is left out in silence."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from zmqtrain.errors import UsageError
from zmqtrain.observe.sinks import fan_out
from zmqtrain.observe.sinks.base import Figures, QuietSink, RunFacts
from zmqtrain.observe.sinks.fan_out import FanOut
from zmqtrain.observe.sinks.make import make_sinks

STEP = {"time": 1.0, "host": "a", "role": "worker", "rank": 0, "step": 0, "kind": "step", "values": {"loss": 1.0}}


class Kept(QuietSink):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.called = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.fails_in = ""
        self.threads: set[str] = set()

    def begin(self, run: RunFacts) -> None:
        self._called("begin", run.options)

    def figures(self, rows: Sequence[Figures]) -> None:
        self._called("figures", *((row.step, dict(row.values)) for row in rows))

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        self._called("end", status, summary)

    def _called(self, *what: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.got.append(what)
        self.called.set()
        assert self.may_go_on.wait(PATIENCE_S)
        if self.fails_in == what[0]:
            raise OSError("no such server\nand more")


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    kept = Kept()
    monkeypatch.setattr(fan_out, "make_sinks", lambda names: dict.fromkeys(names, kept))
    yield kept
    kept.may_go_on.set()


def begun(tmp_path: Path, **options: Any) -> FanOut:
    sinks = FanOut(["kept"], {"kept": options})
    for future in sinks.begin(RunFacts("job", tmp_path, "real", {})):
        future.result(PATIENCE_S)
    return sinks


def test_a_sink_gets_its_options_then_figures_then_the_end(sink: Kept, tmp_path: Path) -> None:
    sinks = begun(tmp_path, port=1)
    sinks.take(STEP)
    assert not sinks.end("done", {"steps": 1}, timeout_s=PATIENCE_S)
    figures = {"train/loss": 1.0, "train/samples": 0.0, "train/samples_per_s": 0.0}
    assert sink.got == [("begin", {"port": 1}), ("figures", (0, figures)), ("end", "done", {"steps": 1})]
    assert sink.threads == {"zmqtrain-kept"}


def test_a_sink_that_fails_is_switched_off_and_said_once(sink: Kept, tmp_path: Path) -> None:
    sinks = begun(tmp_path)
    sink.fails_in = "figures"
    sinks.take(STEP)
    (said,) = sinks.end("done", {}, timeout_s=PATIENCE_S)
    assert said == "warning: kept has failed, and gets no more figures: OSError: no such server. Training continues"
    assert [what[0] for what in sink.got] == ["begin", "figures"]
    sinks.take(STEP)


def test_a_sink_that_hangs_holds_nobody_up(sink: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "MOST_WAITING", 2)
    sinks = begun(tmp_path)
    sink.called.clear()
    sink.may_go_on.clear()
    sinks.take(STEP)
    assert sink.called.wait(PATIENCE_S)  # it hangs in `figures`
    for _ in range(5):
        sinks.take(STEP)
    assert sinks.said() == "warning: kept cannot keep up: figures are left out there. Training continues"
    assert sinks.said() is None
    assert sinks.end("done", {}, timeout_s=0.0) == [
        "warning: kept has not finished in time: what it had not written is missing there"
    ]


def test_what_fails_to_begin_prevents_the_run(sink: Kept, tmp_path: Path) -> None:
    sink.fails_in = "begin"
    (future,) = FanOut(["kept"]).begin(RunFacts("job", tmp_path, "real", {}))
    with pytest.raises(UsageError, match=r"\[observe\] to: kept cannot begin: OSError: no such server"):
        future.result(PATIENCE_S)


def test_unknown_sinks_are_refused() -> None:
    with pytest.raises(UsageError, match="there is no sink 'tensorbord'; did you mean 'tensorboard'"):
        make_sinks(["tensorbord"])


def test_a_missing_library_is_refused_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    monkeypatch.delitem(__import__("sys").modules, "zmqtrain.observe.sinks.wandb", raising=False)
    with pytest.raises(UsageError, match=r"wandb cannot be used here \(.*\): pip install 'zmqtrain\[wandb\]'"):
        make_sinks(["wandb"])


def test_options_that_a_sink_does_not_have_are_refused(tmp_path: Path) -> None:
    sinks = FanOut(["csv"], {"csv": {"file": "x"}})
    (future,) = sinks.begin(RunFacts("job", tmp_path, "real", {}))
    with pytest.raises(UsageError, match="csv: it has no options, but 'file' is set"):
        future.result(PATIENCE_S)
