"""What has become of a run, and why: its state, failures, losses, and the time in which it must have ended. Sans-IO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zmqtrain.membership.actions import Failure, Outcome
from zmqtrain.membership.ledger import failure_of_value, value_of_failure
from zmqtrain.membership.state import TRANSITIONS, State
from zmqtrain.net.endpoint import PeerId
from zmqtrain.topology.timeouts import Timeouts
from zmqtrain.wire.payload import Value


class RunStatus:
    """The run as a whole. What each member does is the roster's business (`zmqtrain.membership.roster`).

    ``now`` is the loop's clock and never goes back."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self.state = State.JOINING
        self.failures: list[Failure] = []
        """The first one is why the run has failed."""
        self.losses: list[str] = []
        """The reasons for losses after which the run continued."""
        self.halt_reason: Mapping[str, Any] | None = None
        """Why a role has stopped the run, as the role gave it."""
        self.halt_told: dict[str, Value] | None = None
        """What the members were told when the run had to stop: a failure, or that a role has stopped it."""
        self.end_reason = ""
        self._end_deadline: float | None = None
        self._last_worker: Failure | None = None
        self._worker_deadline = 0.0

    def go(self, state: State) -> None:
        """Change the state. Only transitions of `TRANSITIONS` are possible."""
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state

    @property
    def is_over(self) -> bool:
        """Whether the run has failed or ended."""
        return self.state in (State.FAILED, State.ENDED)

    # The end ------------------------------------------------------------------------------------------------------------------

    def finish(self, now: float) -> None:
        """All workers have left; the others get the time of a request to do so, too."""
        self.go(State.FINISHING)
        self._end_deadline = now + self._timeouts.request_s

    def halt(self, peer: PeerId, reason: Mapping[str, Any]) -> dict[str, Value]:
        """A role stops the run. Returns what the members are told."""
        self.halt_reason = dict(reason)
        self.halt_told = {"kind": "halt", "peer": peer, **reason}
        return self.halt_told

    def fail(self, failure: Failure, now: float) -> dict[str, Value] | None:
        """A failure ends the run. Returns what the members are told, or ``None`` if it had failed or ended already."""
        self.a_worker_is_here()
        self.failures.append(failure)
        if self.is_over:
            return None
        self.go(State.FAILED)
        self.end_reason = failure.reason
        self._end_deadline = now + 2 * self._timeouts.grace_s  # once to end, and once to be killed and reported
        told: dict[str, Value] = {"kind": "failure", "peer": failure.peer, "message": failure.reason}
        self.halt_told = self.halt_told or told
        return told

    def explain(self, failure: Failure) -> bool:
        """The end of a process says why its link was lost: it replaces that loss among the failures. Returns whether there was
        one."""
        for at, known in enumerate(self.failures):
            if known.peer == failure.peer and known.exit_code is None:
                self.failures[at] = failure
                self.end_reason = failure.reason if self.end_reason == known.reason else self.end_reason
                return True
        return False

    def has_reported(self, peer: PeerId) -> bool:
        """Whether this peer has reported its failure itself."""
        return any(failure.peer == peer and failure.report is not None for failure in self.failures)

    def end(self) -> Outcome:
        """The run is over."""
        outcome = self._outcome(self.end_reason if self.state is State.FAILED else None)
        self.go(State.ENDED)
        self._end_deadline = None
        self.end_reason = outcome.reason
        return outcome

    def ended(self) -> Outcome | None:
        """How the run has ended, if it has."""
        return self._outcome(self.end_reason if self.failures else None) if self.state is State.ENDED else None

    def _outcome(self, failure: str | None) -> Outcome:
        return Outcome.of(failure, self.failures, self.halt_reason, self.losses)

    # A time without workers ---------------------------------------------------------------------------------------------------

    @property
    def last_worker(self) -> Failure | None:
        """While no worker is left, and one may come back: the last loss."""
        return self._last_worker

    def wait_for_a_worker(self, failure: Failure, now: float) -> None:
        """No worker is left. Until one comes back, which may take as long as joining."""
        self._last_worker, self._worker_deadline = failure, now + self._timeouts.join_s

    def a_worker_is_here(self) -> None:
        """One has come, or none is waited for any more."""
        self._last_worker = None

    def explain_last_worker(self, failure: Failure) -> None:
        """The end of a process says why the last worker's link was lost."""
        if self._last_worker is not None and self._last_worker.peer == failure.peer:
            self._last_worker = failure

    def may_still_come(self, now: float) -> bool:
        """Whether there is time left for a worker to come back."""
        return now < self._worker_deadline

    # Time ---------------------------------------------------------------------------------------------------------------------

    def deadlines(self) -> list[float]:
        """When the run must have ended, and when a worker must have come back."""
        return [
            *([] if self._end_deadline is None else [self._end_deadline]),
            *([] if self._last_worker is None else [self._worker_deadline]),
        ]

    def is_late(self, now: float) -> bool:
        """Whether the time in which the run must end is over."""
        return self._end_deadline is not None and now >= self._end_deadline

    # The journal --------------------------------------------------------------------------------------------------------------

    def reasons(self) -> tuple[Value, Value, list[Value], list[Value]]:
        """Why the run stops, what members were told of it, the failures, and the losses: for the journal."""
        halt: Value = None if self.halt_reason is None else dict(self.halt_reason)
        return halt, self.halt_told, [value_of_failure(failure) for failure in self.failures], [*self.losses]

    def restore(self, state: str, end_reason: str, reasons: Sequence[Any], now: float) -> None:
        """Go on from another coordinator's journal, with time in which the members find this one."""
        self.state, self.end_reason = State(state), end_reason
        self.halt_reason, self.halt_told, failures, losses = reasons
        self.failures, self.losses = [failure_of_value(failure) for failure in failures], list(losses)
        patience_s = self._timeouts.lost_s
        if self.state is State.FINISHING:
            self._end_deadline = now + self._timeouts.request_s + patience_s
        elif self.state is State.FAILED:
            self._end_deadline = now + 2 * self._timeouts.grace_s + patience_s

    def wait_longer_for_a_worker(self, failure: Failure, now: float) -> None:
        """As `wait_for_a_worker`, where this coordinator must be found first."""
        self.wait_for_a_worker(failure, now + self._timeouts.lost_s)
