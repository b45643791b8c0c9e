"""What a fork of `tests.launcher.ready.ReadyProcess` does: it is a zygote, an agent's fork server, or a command."""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from importlib import import_module

import msgpack

import zmqtrain.cli.launch
import zmqtrain.launcher.run
import zmqtrain.launcher.session_child  # noqa: F401 - all that the forks need is in memory, torch's compiler only where it is used
from tests.launcher.ready import FORK_SERVER, PYTHON, ZYGOTE
from zmqtrain.cli.main import main as command
from zmqtrain.launcher.entries import SCRIPT_ENTRY
from zmqtrain.launcher.forkserver import LARGEST_MESSAGE, import_entry
from zmqtrain.launcher.zygote import RUNNING, serve_agent, serve_launcher

# A second for each worker of a divided model: a tensor of a class of its own has torch import these at its first operation, and
# gradients that are given to a backward, as those of merged layers are, a part of them.
import_module("torch.distributed.tensor")
with suppress(ImportError):
    import sklearn.datasets  # noqa: F401 - of the examples; a second for each of their workers


def main(channel: int) -> int:
    """Do what the message in the channel says, as if started by the test."""
    with socket.socket(fileno=channel) as said:
        message, files, _flags, _address = socket.recv_fds(said, LARGEST_MESSAGE, 2)
    folder, environ, what = msgpack.unpackb(message)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    tempfile.tempdir = None  # TMPDIR is another one now
    if what in (ZYGOTE, FORK_SERVER):
        del sys.path[0]  # the folder of the tests; the launcher's or the agent's is put there
        entry = import_entry(SCRIPT_ENTRY)
        if what == FORK_SERVER:
            serve_agent(files[0], os.getppid(), entry)
        serve_launcher(socket.socket(fileno=files[0]), entry)
    else:
        os.dup2(files[0], 1)
        os.close(files[0])
        os.environ.setdefault(RUNNING, str(files[1]))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.path[0] = folder
        if what[0] == PYTHON:
            sys.argv = what[1:]
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            sys.argv = ["zmqtrain", *what]
            command()
    return 0
