"""``hosts.json`` in the run directory: where a run may have left something, for whoever comes when the launcher is gone."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

_NAME = "hosts.json"


@dataclass(slots=True)
class Places:
    """The hosts that may have something of a run. It holds no secrets."""

    directory: Path
    """The run directory."""
    run: str
    """The run's name on its hosts."""
    python: str
    """The Python of hosts for which the topology file names none."""
    hosts: list[str]
    """Where something may be left."""

    @classmethod
    def read(cls, directory: Path) -> Places | None:
        """What `write` has written; ``None`` where there is nothing left."""
        try:
            value = json.loads((directory / _NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return cls(directory, value["run"], value["python"], list(value["hosts"]))

    def write(self) -> None:
        """Say so in the run directory."""
        path = self.directory / _NAME
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"run": self.run, "python": self.python, "hosts": self.hosts}) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    def forget(self, host: str) -> None:
        """There is nothing left on this host. Without any hosts, there is no file."""
        if host in self.hosts:
            self.hosts.remove(host)
            if not self.hosts:
                (self.directory / _NAME).unlink(missing_ok=True)
            elif (self.directory / _NAME).exists():
                self.write()
