"""What a fork of `tests.launcher.ready.ReadyProcess` does: it is the zygote of one launch."""

from __future__ import annotations

import os
import socket
import sys
import tempfile

import zmqtrain.launcher.child  # noqa: F401 - all that its forks need is in memory
from tests.launcher.ready import FOLDER
from zmqtrain.launcher.forkserver import ENTRY, import_entry
from zmqtrain.launcher.zygote import serve_launcher


def main(channel: int) -> int:
    """Serve the launcher at the channel's other end, as if started by it."""
    os.chdir(os.environ[FOLDER])
    del sys.path[0]  # the folder of the tests; the launcher's is put there
    tempfile.tempdir = None  # TMPDIR is the launcher's
    serve_launcher(socket.socket(fileno=channel), import_entry(ENTRY))
    return 0
