"""``zmqtrain agent``: the process around `zmqtrain.run.agent.Agent` on a real host: its signals, its fork server, its memory."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from contextlib import AsyncExitStack, suppress

from zmqtrain.arena import Arena, shared_memory_missing
from zmqtrain.death import die_with_parent
from zmqtrain.errors import ConnectivityError, HostLimitError, PeerLostError, ZmqTrainError
from zmqtrain.launcher.faults import obeyed
from zmqtrain.launcher.forked import ForkedProcesses
from zmqtrain.launcher.forkserver import ForkServer
from zmqtrain.launcher.local import PARENT
from zmqtrain.launcher.signals import heed_no_preemption, wanted_on_sigterm
from zmqtrain.launcher.streams import survive_closed_streams
from zmqtrain.membership.agent_link import AgentLink
from zmqtrain.membership.description import fetch_description
from zmqtrain.membership.environment import COORDINATOR, RoleEnvironment
from zmqtrain.net.loop import run
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.run.agent import Agent
from zmqtrain.run.report import report_of


async def run_agent(environment: RoleEnvironment) -> int:
    """Run an agent, from joining until its host's part of the run is over. Returns the process's exit code.

    The fork server ends roles that are still running when this process ends."""
    timeouts = environment.timeouts
    async with AsyncExitStack() as stack:
        endpoint = await open_zeromq(environment.peer, settings=environment.settings())
        stack.push_async_callback(endpoint.close)
        endpoint.add_peer(COORDINATOR, environment.coordinator)
        # torch is imported while the agent joins.
        forks = await stack.enter_async_context(ForkServer())
        link = await AgentLink.join(endpoint, coordinator_address=environment.coordinator, timeouts=timeouts)
        description = await fetch_description(endpoint, timeout=timeouts.request_s)
        try:
            region = None
            if description.topology.compute.shared_memory and shared_memory_missing() is None:
                # The memory exists as long as any process has it open; roles that end are replaced in their slots.
                region = Arena.create(len(description.placement.of_host(environment.peer.partition("/")[2])))
            agent = Agent(link, description, environment, ForkedProcesses(forks, description, region))
            _heed_signals(agent)
            with obeyed(agent, description, environment.shaping, environment.peer.partition("/")[2]):
                await agent.run()
        except ConnectivityError as error:
            # The run continues without this host, or is over: in both cases its roles are not needed any more.
            print(f"{environment.peer}: {error}", file=sys.stderr, flush=True)
            return ConnectivityError.exit_code
        except (ZmqTrainError, OSError) as error:
            # The launcher shows it; told only that this process has ended, it could not say why.
            report = report_of(_named(error), environment.peer)
            with suppress(ZmqTrainError):
                await link.membership.fail(report)
            return int(report["exit_code"])
    return 0


def _named(error: ZmqTrainError | OSError) -> ZmqTrainError:
    """The error in words that say what to do."""
    if isinstance(error, ZmqTrainError):
        return error
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return HostLimitError(f"the agent cannot open any more files ({error.strerror}); raise the limit (ulimit -n)")
    if error.errno in (errno.EAGAIN, errno.ENOMEM):
        return HostLimitError(f"the agent cannot start a process ({error.strerror}); raise the limits (ulimit -u, ulimit -v)")
    return ZmqTrainError(f"the agent failed: {type(error).__name__}: {error}")


def _heed_signals(agent: Agent) -> None:
    """SIGTERM and SIGINT end this host's part of the run in an orderly way. SIGUSR1 asks for a checkpoint first, and so does
    SIGTERM under schedulers that use it as a warning."""
    loop = asyncio.get_running_loop()
    preempts = {signal.SIGUSR1, signal.SIGTERM} if wanted_on_sigterm() else {signal.SIGUSR1}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        loop.add_signal_handler(number, agent.preempt if number in preempts else agent.stop)


def main() -> int:
    """``zmqtrain agent``: everything comes from the environment."""
    survive_closed_streams()  # which are the launcher's
    environment = RoleEnvironment.from_environ()
    if environment is None:
        print(
            "zmqtrain agent is started by an engine, which sets ZMQTRAIN_PEER, ZMQTRAIN_COORDINATOR and ZMQTRAIN_TOKEN",
            file=sys.stderr,
        )
        return 2
    heed_no_preemption()  # until it has joined and can report it
    parent = os.environ.pop(PARENT, None)
    if parent is not None:
        die_with_parent(int(parent))
    try:
        return run(run_agent(environment))
    except ConnectivityError as error:
        # The coordinator has refused it if it is lost itself: the run is over.
        refused = error.reason if isinstance(error, PeerLostError) and error.peer == environment.peer else ""
        if not refused or parent is None:  # otherwise the launcher, on this machine, says how the run has ended
            print(f"{environment.peer}: {refused or error}", file=sys.stderr, flush=True)
        return error.exit_code
