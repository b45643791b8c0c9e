"""What the page and the terminal show of a search for settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.observe.dashboard.runs import make_run
from tests.observe.dashboard.test_screen import shown
from zmqtrain.observe.dashboard.follow import Followed, seen
from zmqtrain.observe.dashboard.search import MOST_ROWS, SearchState
from zmqtrain.observe.run_directory import TRAINING
from zmqtrain.tune.trial import Outcome, Setting, Trial


def line(what: str, **values: Any) -> dict[str, Any]:
    values = {"strategy": "omnivore", "reason": f"why {what}", **values}
    return {"time": 99.0, "host": "", "role": "tune", "rank": None, "step": None, "kind": what, "values": values}


def begins(number: int, groups: int = 2) -> dict[str, Any]:
    return line("trial begins", **Trial(number, Setting(groups, 0.6, 0.1), 12, "probe", "race", "it may be better").to_value())


def ends(number: int, losses: tuple[float, float] = (2.0, 1.5)) -> dict[str, Any]:
    outcome = Outcome(11, 3.0, *losses).to_value()
    return {
        **begins(number),
        "kind": "trial",
        "values": {**begins(number)["values"], "reason": "it may be better", "outcome": outcome},
    }


def make_search(parent: Path, *lines: dict[str, Any]) -> Path:
    path = parent / "spirals-001"
    path.mkdir()
    (path / "topology.toml").write_text('[job]\nname = "spirals"\n[compute]\ngroups = "auto"\ngroup_size = 2\n')
    add(path, *lines)
    return path


def add(path: Path, *lines: dict[str, Any]) -> None:
    with (path / "events.jsonl").open("a") as events:
        events.writelines(json.dumps(each) + "\n" for each in lines)


def test_trials_and_decisions_in_their_order() -> None:
    search = SearchState()
    assert search.to_dict() is None
    for each in (line("saturation"), begins(1), ends(1), begins(2), ends(2, (2.0, float("inf"))), begins(3)):
        search.add(json.loads(json.dumps(each)))
    told = search.to_dict()
    assert told is not None
    assert [(row["what"], row["reason"]) for row in told["rows"]] == [
        ("saturation", "why saturation"),
        ("trial", "it may be better"),
        ("trial", "it may be better"),
    ]
    assert [row.get("loss", "no trial") for row in told["rows"]] == ["no trial", 1.5, None]
    assert told["trials"] == 2
    assert (told["now"]["number"], told["now"]["groups"], told["now"]["phase"]) == (3, 2, "race")
    for number in range(4, MOST_ROWS + 4):
        search.add(ends(number))
    told = search.to_dict()
    assert told is not None
    assert (len(told["rows"]), told["trials"], told["now"]) == (MOST_ROWS, MOST_ROWS + 2, None)


def test_the_trial_that_trains_is_shown_and_then_the_job(tmp_path: Path) -> None:
    path = make_search(tmp_path, line("saturation"), begins(1))
    run = Followed(path)

    def look() -> dict[str, Any]:
        return seen(run, lambda _: {"status": "running"})

    state = look()
    assert (state["trial"], state["workers"], state["groups"]) == (None, [], "auto"), "its folder is not there yet"
    (path / "omnivore").mkdir()
    make_run(path / "omnivore", "001", steps=3)
    state = look()
    assert (state["trial"], [worker["step"] for worker in state["workers"][:2]], state["groups"]) == ("omnivore/001", [2, 2], 2)
    fed = [item["n"] for item in run.feed(0)]
    assert fed == list(range(1, len(fed) + 1))
    assert {item["kind"] for item in run.feed(0)} >= {"saturation", "trial begins", "join"}
    make_run(path / "omnivore", "002", steps=5)
    add(path, ends(1), begins(2))
    state = look()
    assert (state["trial"], state["workers"][0]["step"], state["search"]["trials"]) == ("omnivore/002", 4, 1)
    assert run.feed(fed[-1])[0]["n"] == fed[-1] + 1, "a reader misses nothing when another trial is shown"
    add(path, ends(2))
    make_run(path / "omnivore", "003", steps=4)
    (path / TRAINING).symlink_to("omnivore/003")
    assert look()["workers"][0]["step"] == 3, "the job's own training"
    assert look()["search"]["trials"] == 2
    assert run.broken == 0


def test_simulated_trials_have_no_events_of_their_own(tmp_path: Path) -> None:
    path = make_search(tmp_path, begins(1))
    (path / "omnivore" / "001" / "checkpoints").mkdir(parents=True)
    state = seen(Followed(path), lambda _: {"status": "running"})
    assert (state["trial"], state["workers"], state["search"]["now"]["number"]) == (None, [], 1)


def test_a_terminal_shows_the_newest_trials(tmp_path: Path) -> None:
    text = "\n".join(shown(make_search(tmp_path, begins(1), ends(1), line("grid"), begins(2)), 120))
    assert "search: 1 trial, now trial 2 (race): 2 groups, momentum 0.6, learning rate 0.1, 12 updates" in text
    assert "  trial 1 (race): 2 groups, momentum 0.6, learning rate 0.1: loss 2 to 1.5 in 11 updates, 3.0 s" in text
    assert "  grid: why grid" in text
    assert "samples/s" not in text, "nothing trains that could be seen"
