"""``trace.json``: spans as a Chrome trace, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from typing import Any

from zmqtrain.observe.peer_order import peer_order

#: The rows of each role, in this order from the top.
CATEGORIES = ("compute", "send", "receive", "wait")


class Trace:
    """Collects spans. A process per role, a thread per category. Nested compute is drawn on the span around it (a bucket's
    backward on the whole backward); other simultaneous spans get rows of their own below."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, dict[str, Any]]] = []
        self._known: set[str] = set()
        self._ended: set[str] = set()

    def add(self, peer: str, span: dict[str, Any]) -> None:
        """``span``: time and seconds, name, category, step, values."""
        if peer not in self._ended:
            self._known.add(peer)
            self._spans.append((peer, span))

    def again(self, peer: str) -> None:
        """There is another process of this role. Each begins with spans, and any number may follow one another in a long run: those
        of the first one are kept."""
        if peer in self._known:
            self._ended.add(peer)

    def to_json(self) -> str:
        """Return the whole trace as JSON."""
        return json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"}, separators=(",", ":"))

    def events(self) -> list[dict[str, Any]]:
        """As Chrome trace events; times in microseconds from the first span."""
        spans = sorted(self._spans, key=lambda item: (item[1]["time"], -item[1]["seconds"]))
        start = spans[0][1]["time"] if spans else 0.0
        peers = sorted({peer for peer, _ in spans}, key=peer_order)
        processes = {peer: number for number, peer in enumerate(peers, 1)}
        rows: dict[tuple[str, str], list[list[float]]] = {}  # for each row of a category: the ends of the nested spans
        result: list[dict[str, Any]] = []
        for peer, number in processes.items():
            result.append({"ph": "M", "pid": number, "tid": 0, "name": "process_name", "args": {"name": peer}})
            result.append({"ph": "M", "pid": number, "tid": 0, "name": "process_sort_index", "args": {"sort_index": number}})
        named: set[tuple[int, int]] = set()
        for peer, span in spans:
            category = span["category"]
            begin, end = span["time"], span["time"] + span["seconds"]
            row = _row(rows.setdefault((peer, category), []), begin, end, nested=category == "compute")
            base = CATEGORIES.index(category) if category in CATEGORIES else len(CATEGORIES)
            thread = base * 100 + row
            if (processes[peer], thread) not in named:
                named.add((processes[peer], thread))
                title = category if row == 0 else f"{category} {row + 1}"
                result.append({"ph": "M", "pid": processes[peer], "tid": thread, "name": "thread_name", "args": {"name": title}})
            result.append(
                {
                    "ph": "X",
                    "pid": processes[peer],
                    "tid": thread,
                    "name": span["name"],
                    "cat": category,
                    "ts": round((begin - start) * 1e6, 3),
                    "dur": round(span["seconds"] * 1e6, 3),
                    "args": {"step": span["step"], **span.get("values", {})},
                }
            )
        return result


def _row(rows: list[list[float]], begin: float, end: float, *, nested: bool) -> int:
    """The first row on which the span overlaps nothing or, if ``nested``, lies within what is there; a Chrome trace allows nothing
    else."""
    for number, ends in enumerate(rows):
        while ends and ends[-1] <= begin:
            ends.pop()
        if not ends or (nested and end <= ends[-1]):
            ends.append(end)
            return number
    rows.append([end])
    return len(rows) - 1
