"""The dashboard in a terminal: what the page shows, from the same state, and its buttons as keys."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Group, RenderableType
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Label, OptionList, Select, Static, TabbedContent, TabPane
from textual.worker import get_current_worker

from zmqtrain.errors import ZmqTrainError
from zmqtrain.observe.dashboard import panels
from zmqtrain.observe.dashboard.control import Control
from zmqtrain.observe.dashboard.follow import Followed, listed, seen
from zmqtrain.observe.dashboard.plot import Axis
from zmqtrain.observe.dashboard.screen import WIDE, Screen, events_table, line, title, workers_table
from zmqtrain.observe.dashboard.state import Json
from zmqtrain.observe.terminal import brief, duration

#: Seconds between two looks at the run.
LOOK_S = 1.0
#: Workers that are shown if nobody asks for some of them, and lines of a log.
MOST_WORKERS, MOST_LINES = 40, 1000
#: The width from which on two runs are beside each other, and not one below the other.
TWO_WIDE = 160
_STOP = "All workers continue to a common step and keep a checkpoint there, if the run keeps any. --resume continues from it."
_DRAIN = "Its workers end as lost ones do, but nobody waits for them; the others train on. Only elastic runs can do without a host."


class Asked(ModalScreen[str | None]):
    """A question with a list of answers, of which the first is to do nothing. Gives the answer that was chosen, or ``None``."""

    DEFAULT_CSS = """
    Asked { align: center middle; }
    Asked > Vertical { width: 64; max-width: 95%; height: auto; max-height: 90%; border: round $primary; padding: 0 1; }
    Asked OptionList { height: auto; max-height: 12; margin-top: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,n", "leave", "No")]

    def __init__(self, question: str, text: str, nothing: str, answers: Iterable[str]) -> None:
        super().__init__()
        self._question, self._text, self._nothing, self._answers = question, text, nothing, list(answers)

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Label(line(self._question, "bold"))
            yield Static(line(self._text))
            yield OptionList(*map(line, (self._nothing, *self._answers)))

    @on(OptionList.OptionSelected)
    def answer(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._answers[event.option_index - 1] if event.option_index else None)

    def action_leave(self) -> None:
        self.dismiss(None)


class Top(App[None]):
    """The runs of a folder, one of them at a time, or two beside each other."""

    TITLE = "zmqtrain"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layers: base over; }
    #title { height: 1; }
    #said { height: auto; max-height: 3; color: $warning; }
    .filters { height: 1; }
    .filters Input { width: 1fr; }
    .filters Select { width: 22; }
    TabbedContent { height: 1fr; }
    TabPane { padding: 0; }
    ContentTabs { height: 2; }
    #both { height: 1fr; }
    #both.wide { layout: horizontal; }
    #both.wide > #this { margin-right: 2; }
    #both > Static { height: 1fr; width: 1fr; }
    #list { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("c", "checkpoint", "Checkpoint"),
        Binding("s", "stop", "Stop…"),
        Binding("d", "drain", "Drain…"),
        Binding("r", "pane('runs')", "Runs"),
        Binding("b", "beside", "Beside"),
        Binding("x", "axis", "Axis"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("escape", "unfocus", show=False),
        *(Binding(str(number), f"pane('{name}')", show=False) for number, name in enumerate(
            ("run", "curves", "workers", "hosts", "traffic", "search", "events", "runs"), 1)),
    ]  # fmt: skip

    def __init__(self, folder: Path, run: str, control: Control, *, look_s: float = LOOK_S) -> None:
        """
        Args:
            folder: where the runs are.
            run: the one to show first; empty: the newest.
            control: what the keys ask of a run.
            look_s: the time between two looks; 0: only `look` looks.
        """
        super().__init__(ansi_color=True)
        self._folder, self._control, self._look_s = folder, control, look_s
        self._shown, self._beside = run, ""
        self._followed: dict[str, Followed] = {}
        self._states: dict[str, Json] = {}
        self._runs: list[Json] = []
        self._drawn: list[Any] = []
        self._offered: dict[str, list[tuple[str, str]]] = {}
        self._axis: Axis = "step"
        self._tail: tuple[str, str, int | None, deque[str]] = "", "", None, deque()  # run, role, where to go on, lines

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        yield Static(id="said")
        with TabbedContent(initial="run"):
            with TabPane("1 Run", id="run"), Vertical(id="both"):
                yield Static(id="this")
                yield Static(id="other")
            with TabPane("2 Curves", id="curves"), VerticalScroll():
                yield Static(id="in-curves")
            with TabPane("3 Workers", id="workers"):
                with Horizontal(classes="filters"):
                    yield Input(placeholder="show only: a worker, a host, or group 3", id="wanted", compact=True)
                with VerticalScroll():
                    yield Static(id="in-workers")
            with TabPane("4 Hosts", id="hosts"), VerticalScroll():
                yield Static(id="in-hosts")
            with TabPane("5 Traffic", id="traffic"), VerticalScroll():
                yield Static(id="in-traffic")
            with TabPane("6 Search", id="search"), VerticalScroll():
                yield Static(id="in-search")
            with TabPane("7 Events", id="events"):
                with Horizontal(classes="filters"):
                    yield Select[str]((), prompt="events", id="source", compact=True)
                    yield Select[str]((), prompt="all kinds", id="kind", compact=True)
                    yield Select[str]((), prompt="all members", id="peer", compact=True)
                    yield Input(placeholder="text", id="text", compact=True)
                with VerticalScroll(id="feed"):
                    yield Static(id="in-events")
            with TabPane("8 Runs", id="runs"):
                yield Static("Enter shows a run, b lays it beside the one that is shown.")
                yield DataTable[Any](id="list", cursor_type="row")
        yield Footer()

    def on_mount(self) -> None:
        self.theme = "ansi-dark"  # the terminal's own colours
        self.query_one("#list", DataTable).add_columns("run", "", "status", "steps", "time", "results")
        self._say("")
        self.set_focus(None)
        self.look()
        if self._look_s:
            self.set_interval(self._look_s, self.look)

    # Looking --------------------------------------------------------------------------------------------------------------------

    @work(thread=True, exclusive=True, group="look", exit_on_error=True)
    def look(self) -> None:
        """Read what is new, and show it; until a long file has been read, again and again."""
        worker, reading = get_current_worker(), True
        while reading and not worker.is_cancelled:
            runs = listed(self._folder, self._control.state)
            name = self._shown or (runs[0]["name"] if runs else "")
            states = {each: seen(self._follow(each), self._control.state) for each in {name, self._beside} - {""}}
            reading = any(state["reading"] for state in states.values())
            if not worker.is_cancelled:
                self.call_from_thread(self._took, name, runs, states)

    def _follow(self, name: str) -> Followed:
        if name not in self._followed:
            self._followed[name] = Followed(self._folder / name)
        return self._followed[name]

    def _took(self, name: str, runs: list[Json], states: dict[str, Json]) -> None:
        self._shown = self._shown or name
        if runs != self._runs:
            self._runs = runs
            self._list()
        news = [(each, self._follow(each).version, state["status"], state["reading"]) for each, state in sorted(states.items())]
        self._states |= states
        if news != self._drawn or self._chosen("#source"):  # a log grows without events
            self._drawn = news
            self.draw()

    def _list(self) -> None:
        table = self.query_one("#list", DataTable)
        at = self._at_cursor() or self._shown
        table.clear()
        for run in self._runs:
            mark = "shown" if run["name"] == self._shown else "beside" if run["name"] == self._beside else ""
            results = run["eval"] or ({"loss": run["loss"]} if run["loss"] is not None else {})
            words = "  ".join(f"{name.removeprefix('eval_')} {brief(value)}" for name, value in results.items())
            time = "" if run["seconds"] is None else duration(run["seconds"])
            steps = "" if run["steps"] is None else f"{run['steps']:,}"
            table.add_row(*map(line, (run["name"], mark, run["status"], steps, time, words)), key=run["name"])
        table.move_cursor(row=next((row for row, run in enumerate(self._runs) if run["name"] == at), 0))

    def _at_cursor(self) -> str:
        """The run at the cursor of the list; empty if there is none."""
        table = self.query_one("#list", DataTable)
        return str(table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value) if table.row_count else ""

    @on(TabbedContent.TabActivated)
    @on(Input.Changed)
    @on(Select.Changed)
    def draw(self) -> None:
        """Draw the panel that is seen."""
        if (state := self._states.get(self._shown)) is None:
            self.query_one("#title", Static).update(line(f"no run in {self._folder} yet"))
            return
        other = self._states.get(self._beside)
        self.query_one("#title", Static).update(title(state))
        pane = self.query_one(TabbedContent).active
        wide = self.size.width >= WIDE
        drawn: dict[str, Callable[[], Iterable[RenderableType]]] = {
            "curves": lambda: panels.curves(state, other, self._axis),
            "workers": lambda: [workers_table(state, MOST_WORKERS, wide=wide, plain=False, wanted=self._value("#wanted"))],
            "hosts": lambda: panels.hosts(state),
            "traffic": lambda: panels.traffic(state),
            "search": lambda: panels.search(state),
            "events": lambda: [self._events(state)],
        }
        if pane in drawn:
            self.query_one(f"#in-{pane}", Static).update(Group(*drawn[pane]()))
        elif pane == "run":
            self.query_one("#this", Static).update(Screen(state, self._follow(self._shown).feed(0), titled=other is not None))
            beside = self.query_one("#other", Static)
            beside.display = other is not None
            if other is not None:
                beside.update(Screen(other, self._follow(self._beside).feed(0)))

    def _value(self, selector: str) -> str:
        return str(self.query_one(selector, Input).value).strip()

    def _events(self, state: Json) -> RenderableType:
        """The events that are asked for, the newest first; or a log, which shows its end unless the reader has scrolled up."""
        run = self._follow(self._shown)
        feed = run.feed(0)
        self._offer("#source", [(f"log of {role}", role) for role in state["logs"]])
        for name in ("kind", "peer"):
            self._offer(f"#{name}", [(value, value) for value in sorted({str(item[name]) for item in feed})])
        text, role = self._value("#text").lower(), self._chosen("#source")
        for name in ("kind", "peer"):
            self.query_one(f"#{name}").disabled = bool(role)
        if role:
            return self._lines(run, role, text)
        kind, peer = self._chosen("#kind"), self._chosen("#peer")
        wanted = [
            item for item in feed if kind in ("", item["kind"]) and peer in ("", item["peer"]) and text in item["text"].lower()
        ]
        return events_table(wanted, whole=True)

    def _lines(self, run: Followed, role: str, text: str) -> RenderableType:
        of, at, start, lines = self._tail
        box = self.query_one("#feed", VerticalScroll)
        if (of, at) != (self._shown, role):
            start, lines = None, deque(maxlen=MOST_LINES)
        if start is None or box.is_vertical_scroll_end:
            self.call_after_refresh(box.scroll_end, animate=False)
        found = run.log(role, start)
        if found is not None:
            lines.extend(found["text"].splitlines())
            start = found["next"]
        self._tail = self._shown, role, start, lines
        shown = [each for each in lines if text in each.lower()]
        return line("nothing", "dim") if not shown else Group(*map(line, shown))

    def _offer(self, selector: str, options: list[tuple[str, str]]) -> None:
        """Set what can be chosen, if it differs; what was chosen stays."""
        select = self.query_one(selector, Select)
        if self._offered.get(selector) == options:
            return
        chosen = self._chosen(selector)
        self._offered[selector] = options
        with select.prevent(Select.Changed):
            select.set_options(options)
            if chosen in [value for _, value in options]:
                select.value = chosen

    def _chosen(self, selector: str) -> str:
        select = self.query_one(selector, Select)
        return "" if select.is_blank() else str(select.value)

    # Keys -----------------------------------------------------------------------------------------------------------------------

    def on_resize(self, event: Resize) -> None:
        self.query_one("#both").set_class(event.size.width >= TWO_WIDE, "wide")
        self.draw()

    def action_pane(self, name: str) -> None:
        self.query_one(TabbedContent).active = name
        scrolls = [*self.query(f"#{name} VerticalScroll"), *self.query(f"#{name} DataTable")]
        self.set_focus(scrolls[0] if scrolls else None)  # its keys are the arrows and pages

    def action_axis(self) -> None:
        self._axis = "at" if self._axis == "step" else "step"
        self.action_pane("curves")
        self.draw()

    def action_filter(self) -> None:
        pane = self.query_one(TabbedContent).active
        if pane != "workers":
            self.action_pane("events")
        self.query_one("#wanted" if pane == "workers" else "#text").focus()

    def action_unfocus(self) -> None:
        self.action_pane(self.query_one(TabbedContent).active)

    @on(DataTable.RowSelected)
    def run_chosen(self, event: DataTable.RowSelected) -> None:
        """Show the run whose row was selected."""
        self._shown = str(event.row_key.value)
        self._beside = "" if self._beside == self._shown else self._beside
        self._changed()

    def action_beside(self) -> None:
        """Lay the run at the cursor beside the one that is shown, or take it away again."""
        table = self.query_one("#list", DataTable)
        if self.focused is not table:
            self.action_pane("runs")
            return
        name = self._at_cursor()
        if name == self._shown:
            self._say("this run is shown already: choose another one to be beside it")
            return
        self._beside = "" if name == self._beside else name
        self._changed()

    def _changed(self) -> None:
        self._say("")
        self._list()
        self.action_pane("run")
        self._drawn = []
        self.look()

    def action_checkpoint(self) -> None:
        self._ask(self._control.checkpoint)

    def action_stop(self) -> None:
        def answered(answer: str | None) -> None:
            if answer is not None:
                self._ask(self._control.stop)

        self.push_screen(Asked(f"Stop {self._shown}?", _STOP, "Let it train", ["Stop it"]), answered)

    def action_drain(self) -> None:
        state = self._states.get(self._shown)
        if state is None or len(state["hosts"]) < 2:
            self._say(f"{self._shown} has no host that it could do without")
            return

        def answered(host: str | None) -> None:
            if host is not None:
                self.push_screen(
                    Asked(f"Drain {host}?", _DRAIN, "Keep it", [f"Drain {host}"]), lambda sure: self._drain(sure, host)
                )

        self.push_screen(Asked("Drain a host?", "Which one?", "None", [str(host) for host in state["hosts"]]), answered)

    def _drain(self, sure: str | None, host: str) -> None:
        if sure is not None:
            self._ask(lambda path: self._control.drain(path, host))

    @work(thread=True, group="ask")
    def _ask(self, act: Callable[[Path], str]) -> None:
        self.call_from_thread(self._say, "…")
        try:
            said = act(self._folder / self._shown)
        except ZmqTrainError as error:
            said = str(error)
        self.call_from_thread(self._say, said)

    def _say(self, text: str) -> None:
        said = self.query_one("#said", Static)
        said.display = bool(text)
        said.update(line(text))
