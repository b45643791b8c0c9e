"""The hosts of a file, and whether a name or a range elsewhere in the file refers to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zmqtrain.topology.broken_rule import BrokenRule, Path, rule
from zmqtrain.topology.ranges import expand
from zmqtrain.topology.suggest import did_you_mean

#: Finding a similar name is slow among thousands of hosts, so it is done for this many faults only.
MOST_SUGGESTIONS = 8


class KnownHosts:
    """Looks names up. Each range is searched once, however often it occurs in the file."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = dict.fromkeys(names)
        self._missing: dict[str, str | None] = {}
        self._suggestions = 0

    def missing(self, text: str) -> str | None:
        """The first name in ``text`` that is not a host of the file; ``None`` if all are."""
        if text not in self._missing:
            self._missing[text] = next((name for name in expand(text) if name not in self.names), None)
        return self._missing[text]

    def suggest(self, name: str, others: Iterable[str] = ()) -> str | None:
        """The host, or word of ``others``, that the user may have meant."""
        self._suggestions += 1
        return did_you_mean(name, [*self.names, *others]) if self._suggestions <= MOST_SUGGESTIONS else None

    def broken(self, text: str, path: Path) -> Iterator[BrokenRule]:
        """The broken rule at ``path``, if ``text`` there names a host that is not in the file."""
        name = self.missing(text)
        if name is not None:
            message = "is not a host of this file" if name == text else f"{name} is not a host of this file"
            few = list(self.names)[:4]
            more = ", ..." if len(self.names) > len(few) else ""
            yield rule(f"{message} ({', '.join(few)}{more})", path, ("hosts",), suggestion=self.suggest(name))
