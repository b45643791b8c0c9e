"""The number of files that this process may have open: each connection takes some, and the usual limit is 1,024."""

from __future__ import annotations

import errno
import resource

import zmq

from zmqtrain.errors import HostLimitError
from zmqtrain.net.trouble import Trouble

#: What the soft limit is raised to, if the hard one allows it: enough for all sockets of a context
#: (`zmqtrain.net.zeromq.MAX_SOCKETS`).
ENOUGH = 65_536
#: What a connection to another process takes at least: a socket and a mailbox there, two ends of a monitor, and a socket back. The
#: bulk lane takes as much again.
PER_PEER = 5


def allow_open_files(peers: int = 0) -> int:
    """Raise this process's soft limit on open files as far as is useful and permitted. Returns the limit. Raises `HostLimitError`
    if it cannot be enough for connections to ``peers`` peers.

    Soft limits are low by default for programs that call ``select``, which takes no descriptor above 1,023.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= most:
        limit = ENOUGH if soft == resource.RLIM_INFINITY else soft
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        limit = most
    if peers * PER_PEER > limit:
        raise HostLimitError(
            f"connections to {peers} other processes take at least {peers * PER_PEER} open files, and this process may have "
            f"{limit}: raise the hard limit (ulimit -Hn, or LimitNOFILE= of its systemd unit), or use fewer hosts"
        )
    return limit


def explained(error: zmq.ZMQError) -> HostLimitError | None:
    """The error that says what to do, if ``error`` is about open files; otherwise ``None``."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return HostLimitError(f"open files are limited to {limit}: {Trouble.FILES.value}")
