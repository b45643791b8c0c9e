"""What forked processes do in these tests; imported by the fork server, by its name alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from setproctitle import setproctitle


def main(report: int) -> int:
    """Do what the variable DO says."""
    todo = os.environ["DO"]
    if todo == "print":
        print("to standard output", flush=True)
        print(f"to standard error of {os.environ['WHO']}", file=sys.stderr, flush=True)
    elif todo == "report":
        os.write(report, b'{"message": "wrong"}')
        return 3
    elif todo == "exit":
        sys.exit(7)
    elif todo == "raise":
        raise RuntimeError("nobody has caught this")
    elif todo == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif todo == "close":
        sys.stdout.close()
        sys.stderr = None  # type: ignore[assignment]
    elif todo == "start others":
        for moved in (False, True):
            other = subprocess.Popen(
                ["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=moved
            )
            print(other.pid, flush=True)
    elif todo == "name":
        setproctitle(os.environ["WHO"])
        print(Path("/proc/self/cmdline").read_text().rstrip("\0"), flush=True)
    elif todo == "modules":
        for name in os.environ["WHO"].split():
            print(name, name in sys.modules, getattr(sys.modules[name], "said", None))
        print(
            "GIVEN",
            os.environ.get("GIVEN"),
            "LEFT",
            os.environ.get("LEFT"),
            "path",
            any(Path(p, "slow.py").exists() for p in sys.path),
        )
    elif todo == "sleep":
        print("ready", flush=True)
        time.sleep(600)
    return 0
