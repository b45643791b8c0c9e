"""``hosts.json`` in the run directory: the hosts on which a run may have left something, for `zmqtrain stop` after the launcher is
gone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from zmqtrain.durable import replace_file

_NAME = "hosts.json"


@dataclass(slots=True)
class LeftPlaces:
    """The hosts on which something of a run may be left. Contains no secrets."""

    directory: Path
    """The run directory."""
    run: str
    """The run's name on its hosts."""
    python: str
    """The Python interpreter of hosts for which the topology file names none."""
    hosts: list[str]
    """The hosts on which something may be left."""

    @classmethod
    def read(cls, directory: Path) -> LeftPlaces | None:
        """Read what `write` wrote; ``None`` if nothing is left."""
        try:
            value = json.loads((directory / _NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return cls(directory, value["run"], value["python"], list(value["hosts"]))

    def write(self) -> None:
        """Write this to the run directory."""
        text = json.dumps({"run": self.run, "python": self.python, "hosts": self.hosts})
        replace_file(self.directory / _NAME, text + "\n")

    def forget(self, host: str) -> None:
        """Remove a host on which nothing is left. The file is removed with the last host."""
        if host in self.hosts:
            self.hosts.remove(host)
            if not self.hosts:
                (self.directory / _NAME).unlink(missing_ok=True)
            elif (self.directory / _NAME).exists():
                self.write()
