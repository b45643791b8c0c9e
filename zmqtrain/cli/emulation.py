"""``--emulate`` and its options, for all commands that launch."""

from __future__ import annotations

from zmqtrain.errors import UsageError
from zmqtrain.launcher.emulate import KINDS, Emulation
from zmqtrain.net.loop import Dilation
from zmqtrain.topology.schema import Topology


def emulation_of(topology: Topology, emulate: bool, shaping: str | None, dilation: float | None) -> Emulation | None:
    """The emulation that the options ask for, or ``None``. Raises `UsageError`."""
    if not emulate:
        if shaping is not None or dilation is not None:
            raise UsageError(f"--{'dilation' if shaping is None else 'shaping'} is only for emulated runs: add --emulate")
        return None
    kind = next((known for known in KINDS if known == (shaping or "auto")), None)
    if kind is None:
        raise UsageError(f"--shaping {shaping}: must be one of {', '.join(KINDS)}")
    emulation = Emulation(kind, Dilation.beginning_now(topology.network.dilation))
    emulation.check(topology)
    return emulation
