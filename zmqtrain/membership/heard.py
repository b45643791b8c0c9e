"""When the coordinator has heard of each host's agent, and whether this process itself has stood still meanwhile. Sans-IO."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from zmqtrain.topology.timeouts import Timeouts


class Heard:
    """The times of agents' last messages. ``now`` is the loop's clock and never goes back.

    A process that was suspended (a sleeping machine, a stopped process) finds all agents silent: their messages wait unread.
    """

    def __init__(self, timeouts: Timeouts, now: float) -> None:
        self._timeouts = timeouts
        self._times: dict[str, float] = {}  # by host
        self._last_look = now
        self._stood_still = (float("-inf"), 0.0)  # when this process had last stood still, and for how long

    def note(self, host: str, now: float) -> None:
        """The host's agent has joined or sent a message."""
        self._times[host] = now

    def ask(self, now: float, heard_at: Callable[[str], float | None]) -> None:
        """Find out about agents that have sent no message for a while whether they have shown that they are there. ``heard_at``:
        when a host's agent was last heard, if it is known."""
        for host in [host for host, heard in self._times.items() if now >= heard + self._timeouts.silent_s / 2]:
            at = heard_at(host)
            if at is not None:
                self._times[host] = max(at, self._times[host])

    def restore(self, hosts: Iterable[str], now: float) -> None:
        """The agents of these hosts were there for the coordinator before this one, and get time to find it."""
        self._times = dict.fromkeys(hosts, now + self._timeouts.lost_s)

    def forget(self, host: str) -> None:
        """The host's agent is gone."""
        self._times.pop(host, None)

    def deadlines(self) -> list[float]:
        """When the next agent counts as silent; and once per heartbeat, so that `look` notices when this process was suspended."""
        if not self._times:
            return []
        return [min(self._times.values()) + self._timeouts.silent_s, self._last_look + self._timeouts.heartbeat_s]

    def silent(self, now: float) -> list[str]:
        """The hosts whose agents have been silent for too long."""
        return [host for host, heard in self._times.items() if now >= heard + self._timeouts.silent_s]

    def look(self, now: float) -> None:
        """Look at the clock: after a time in which this process stood still, no agent has been silent."""
        stood_still = now - self._last_look - self._timeouts.heartbeat_s
        self._last_look = now
        if self._times and stood_still > self._timeouts.silent_s / 2:
            self._times = {host: max(heard, now) for host, heard in self._times.items()}
        if self._times and stood_still > self._timeouts.lost_s / 2:
            self._stood_still = (now, stood_still)

    def why_gone(self, host: str, reason: str, now: float) -> str:
        """``reason``, or that this process was silent for so long that the host's agent has given up the run."""
        self.look(now)
        when, seconds = self._stood_still
        if now > when + self._timeouts.request_s:
            return reason
        stood = f"the launcher itself stood still for {seconds:.0f} s (stopped, or its machine asleep)"
        return f"{stood}, and {host} gave it up: {reason}"
