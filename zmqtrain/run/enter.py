"""Enter a run as the role that this process was started as."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from zmqtrain.arena.arena import Arena
from zmqtrain.errors import ConnectivityError, UsageError
from zmqtrain.events import EventValue, Recorder
from zmqtrain.membership.client import Membership
from zmqtrain.membership.context import RoleContext
from zmqtrain.membership.description import RunDescription, fetch_description
from zmqtrain.membership.environment import COORDINATOR, RoleEnvironment
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.net.loop import Dilation, dilation_of
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.observe.recorder import AuditEvents, RunRecorder
from zmqtrain.run.report import report_of
from zmqtrain.run.side_lines import LineWriter, begins_at
from zmqtrain.topology.timeouts import Timeouts

if TYPE_CHECKING:
    from zmqtrain.train.task import Task


@asynccontextmanager
async def enter_run(environment: RoleEnvironment) -> AsyncIterator[tuple[RoleContext, RunDescription]]:
    """`enter` as ``environment.peer``, with an endpoint over ZeroMQ that is closed at the end."""
    factor = Dilation.from_environ().factor
    if dilation_of(asyncio.get_running_loop()) != factor:
        raise UsageError(
            f"this run is {factor:g} times as slow as real time, but this event loop is not: start your coroutine with "
            f"zmqtrain.net.loop.run(main()) instead of asyncio.run(main()), or use zmqtrain.session()"
        )
    arena = Arena.join(environment.arena, environment.slot) if environment.arena else None
    try:
        settings = environment.settings(arena)
        endpoint = await open_zeromq(environment.peer, settings=settings)
        try:
            conditions = None if settings.shaping is None else settings.shaping.conditions
            with _steps_told(environment) as audit:
                entering = enter(endpoint, environment.coordinator, environment.timeouts, arena=arena, audit=audit)
                async with entering as (context, description):
                    if conditions is not None:  # which faults change
                        usual, slow = context.slowdown, partial(conditions.slowdown, environment.peer)
                        context = replace(context, slowdown=lambda: usual() * slow())
                    yield context, description
        finally:
            await endpoint.close()
    finally:
        if arena is not None:
            arena.close()


@contextmanager
def _steps_told(environment: RoleEnvironment) -> Iterator[AuditEvents | None]:
    """What says which steps this worker begins, if the launcher of an emulated run waits for one; else ``None``."""
    path = begins_at(Path(environment.shaping), environment.peer) if environment.shaping else None
    if path is None or not path.exists():
        yield None
        return
    with LineWriter(path) as line:

        def told(what: str, values: Mapping[str, object]) -> None:
            if what == "begin_step":
                line.say(str(values["step"]))

        yield told


@asynccontextmanager
async def enter(
    endpoint: Endpoint,
    coordinator: str,
    timeouts: Timeouts,
    *,
    arena: Arena | None = None,
    description: RunDescription | None = None,
    audit: AuditEvents | None = None,
    recorder: Recorder | None = None,
) -> AsyncIterator[tuple[RoleContext, RunDescription]]:
    """Join as ``endpoint.peer``; at the end post the recorded events, and leave. ``coordinator`` is the coordinator's address,
    ``arena`` this process's place in the memory of its host.

    ``description``: the run's description, if it is known already; otherwise the coordinator is asked. ``audit`` takes the facts
    that the role states for an auditor. ``recorder``: takes the role's events, instead of one that posts them to the coordinator.

    After an error inside the block it does not leave: the role's agent, or `Membership.fail`, reports that the role has failed.
    Raises like `Membership.join`.
    """
    endpoint.add_peer(COORDINATOR, coordinator)
    if description is None:
        description = await fetch_description(endpoint, timeout=timeouts.join_s)
    try:
        role = description.placement.role(endpoint.peer)
    except KeyError as error:
        raise UsageError(f"{endpoint.peer} is not a role of this run; set ZMQTRAIN_PEER to one of its roles") from error
    membership = await Membership.join(endpoint, coordinator_address=coordinator, timeouts=timeouts)
    membership.outlive(description.alone_s)
    tracing = description.topology.observe.trace_steps
    async with _in_touch(membership):
        taking = recorder or RunRecorder(
            membership.report,
            trace_steps=tracing,
            audit=audit,
            speeds=endpoint.speeds,
            roles=len(description.placement.roles),
        )
        async with _recording(membership, taking) as recording:
            context = RoleContext(
                endpoint=endpoint,
                membership=membership,
                role=role,
                placement=description.placement,
                topology=description.topology,
                timeouts=timeouts,
                recorder=recording,
                data_path=description.data_path,
                resume=description.resume,
                arena=arena,
                slowdown=cache(lambda: description.topology.network.slowdowns().get(role.host, 1.0)),
            )
            yield context, description
            links = endpoint.traffic()
            sent: dict[str, EventValue] = {peer: out for peer, (out, _) in links.items()}
            received: dict[str, EventValue] = {peer: into for peer, (_, into) in links.items()}
            recording.event("traffic", step=None, **endpoint.statistics(), sent=sent, received=received)
        await membership.leave()


@asynccontextmanager
async def _in_touch(membership: Membership) -> AsyncIterator[None]:
    """Within the block the membership finds its way back to a coordinator that was away."""
    keeping = asyncio.create_task(membership.keep_in_touch(), name="keep in touch")
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


@asynccontextmanager
async def _recording(membership: Membership, recorder: Recorder) -> AsyncIterator[Recorder]:
    """The recorder, which posts to the coordinator until the end of the block, if it is one that does."""
    if not isinstance(recorder, RunRecorder):
        yield recorder
        return
    posting = asyncio.create_task(recorder.run(), name="post events")
    try:
        yield recorder
    except BaseException:
        membership.hurry()  # others wait for its end
        raise
    finally:
        posting.cancel()
        await asyncio.wait([posting])
        if not (membership.halted.is_set() and membership.halt_reason is not None):
            await recorder.flush()
        await recorder.close()


async def live_without_agent(context: RoleContext, task: Task | None = None) -> None:
    """Run the role that the context describes, without an agent: a failure is reported to the others, and raised.

    ``task``: used by roles that compute, instead of ``[job] task``.
    """
    from zmqtrain.run.role import run_role  # it imports torch

    try:
        await run_role(context, task=task)
    except Exception as error:
        with suppress(ConnectivityError):  # a coordinator that is gone need not be told
            await context.membership.fail(report_of(error, context.role.peer))
        raise
