"""``zmqtrain check FILE``: what a launch of the file would do, and what would prevent it.

If hosts are other machines, it checks them, too, with a process on each that the file's engine starts and ends. If all hosts are
this machine, it imports the task and calls its function, as a worker would.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from json import dumps
from pathlib import Path

from zmqtrain.cli.check_tables import print_faults, print_tables, rows_of
from zmqtrain.cli.emulation import emulation_of
from zmqtrain.cli.overrides import load_with
from zmqtrain.errors import EngineError, HostLostError, HostsError, TopologyError, UsageError
from zmqtrain.launcher.check.file import Finding, look_at_file
from zmqtrain.launcher.check.hosts import findings_of
from zmqtrain.launcher.engine import GatheringEngine, RemoteEngine, make_engine
from zmqtrain.launcher.preflight import PreflightReport, inspect_hosts
from zmqtrain.topology.schema import Topology
from zmqtrain.train.data_path import data_path_of
from zmqtrain.train.device.profile import Profile
from zmqtrain.versions import PACKAGES, versions

FAULTY = 2
#: If one of these checks fails, importing the task would only repeat the error.
_NEEDED = ("task", "data")


def run_check(
    path: str | Path,
    json: bool = False,
    *,
    data: str | None = None,
    file_only: bool = False,
    emulate: bool = False,
    load: bool | None = None,
    settings: Sequence[str] = (),
) -> int:
    """Check a topology file and print what was found. The exit code is 0, or 2 if anything would prevent the run.

    ``data``: the value of ``--data`` at the launch. ``file_only``: check no other machine. ``emulate``: check the hosts as
    ``launch --emulate`` would place them on this machine. ``load``: import the task here; ``None``: only if all hosts are this
    machine. ``settings``: changes to the file, ``section.key=value``.
    """
    try:
        topology = load_with(Path(path), settings)
    except TopologyError as error:
        print_faults(error, json)
        return FAULTY
    topology, unasked = _with_room(topology, emulate=emulate, ask=not file_only)
    placement, findings = look_at_file(topology, data, emulate=emulate)
    findings += unasked
    if load is None:
        load = not file_only and (emulate or topology.engine.kind == "local")
    if load and all(finding.ok or finding.name not in _NEEDED for finding in findings):
        from zmqtrain.launcher.check.code import look_at_code

        findings += look_at_code(topology, data)
    look: PreflightReport | None = None
    if not file_only and all(finding.ok for finding in findings if finding.name in ("engine", "faults")):
        look = _look(topology, data, findings, emulate=emulate)
    if look is not None:
        findings += findings_of(topology, placement, look, versions(), _model_bytes(topology))
    rows = list(rows_of(topology, placement, look, findings))
    faults = sum(not finding.ok for finding in findings)
    if json:
        for row in rows:
            print(dumps(row))
        print(dumps({"row": "result", "file": str(path), "ok": not faults, "faults": faults}))
    else:
        print_tables(rows, not faults, str(path))
    return FAULTY if faults else 0


def _with_room(topology: Topology, *, emulate: bool, ask: bool) -> tuple[Topology, list[Finding]]:
    """The topology with the slots that the file leaves out filled in, for the hosts that can be asked."""
    from zmqtrain.launcher.ssh.room import lacks_room, with_room, with_room_here
    from zmqtrain.net.loop import run

    if not lacks_room(topology):
        return topology, []
    if emulate:
        return with_room_here(topology), []
    if not ask:
        return topology, [Finding("slots", True, "slots that the file does not give are asked from the hosts at launch")]
    notes: list[str] = []
    try:
        topology = run(with_room(topology, notes.append))
    except (HostsError, HostLostError) as error:
        return topology, [Finding("slots", False, f"the hosts could not be asked for their processors: {error}")]
    return topology, [Finding("slots", True, note) for note in notes]


def _look(topology: Topology, data: str | None, findings: list[Finding], *, emulate: bool) -> PreflightReport | None:
    """Check the hosts, if there is anything to check. Adds a finding if the check itself fails."""
    from zmqtrain.net.loop import run

    try:
        emulation = emulation_of(topology, emulate, None, None)
        if emulation is None:
            engine = make_engine(topology.engine.kind)
            if not isinstance(engine, RemoteEngine):
                return None
            if isinstance(engine, GatheringEngine):
                findings.append(Finding("hosts", True, "they are checked when they join, at launch"))
                return None
        path = data_path_of(data, topology)
        work = inspect_hosts(
            topology,
            emulation,
            token=secrets.token_hex(16),
            packages=PACKAGES,
            paths=(path,) if path is not None and Path(path).is_absolute() else (),
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
        return run(work, dilation=None if emulation is None else emulation.dilation)
    except (UsageError, EngineError) as error:
        findings.append(Finding("hosts", False, str(error)))
        return None


def _model_bytes(topology: Topology) -> int:
    """Bytes of the model's parameters if a profile gives them, otherwise 0."""
    if topology.compute.profile is None:
        return 0
    try:
        return 4 * Profile.load(topology.compute.profile).numel
    except UsageError:
        return 0
