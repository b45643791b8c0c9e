"""An agent that was started over ssh: followed, found again after the connection broke, and stopped."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from zmqtrain.errors import HostsError, SshError
from zmqtrain.launcher.ssh.session import Client, Login
from zmqtrain.topology.timeouts import Timeouts

#: Pauses between attempts to log in again, in seconds: the first, and the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
#: Seconds that stopping may take in addition to the grace time: for processes that are killed, and the network.
STOPPING_S = 20.0


class SshHandle:
    """Implements `zmqtrain.launcher.engine.Handle`. One caller at a time: `wait` is cancelled before `stop`."""

    def __init__(
        self,
        session: Login,
        client: Client,
        run: str,
        timeouts: Timeouts,
        *,
        say: Callable[[str], None],
        log: Callable[[str, str], None],
        offset: int = 0,
        alone_s: float = 0.0,
    ) -> None:
        """``alone_s``: how long the agent goes on without a launcher. ``say`` prints lines for the user; ``log(host, text)`` takes
        what the agent itself prints, from ``offset`` on."""
        self._session, self._client, self._run, self._timeouts = session, client, run, timeouts
        self._say, self._log = say, log
        self._offset, self._alone_s = offset, alone_s
        self._code: int | None = None
        session.on_log(self._printed)

    @property
    def host(self) -> str:
        """The host's name in the topology file."""
        return self._session.target.name

    async def wait(self) -> int:
        """Wait for the agent's exit code. A broken connection is tried again without limit: the agent's heartbeats tell whether
        the host is lost."""
        while self._code is None:
            try:
                self._code = await self._session.follow(self._offset)
            except (SshError, HostsError):
                self._say(f"{self.host}: the ssh connection is lost. The run continues; ssh is tried again")
                await self._come_back()
        return self._code

    async def stop(self, grace_s: float) -> bool:
        """End the agent, and remove the run's folder on the host. Returns whether that succeeded; if not, a line says so."""
        try:
            async with asyncio.timeout(grace_s + STOPPING_S + self._timeouts.connect_s):
                try:
                    await self._stop(grace_s)
                except SshError:
                    await self._log_in()
                    await self._stop(grace_s)
        except (SshError, HostsError, TimeoutError) as error:
            why = str(error) or f"{self.host}: no answer"
            self._say(
                f"{why}. Its agent ends by itself {self._timeouts.lost_s + self._alone_s:g} s after its last contact with the "
                f"launcher; "
                f"`zmqtrain stop` tries again"
            )
            return False
        finally:
            await self._session.close()
        return True

    async def _stop(self, grace_s: float) -> None:
        answer = await self._session.ask("stop", grace_s=grace_s, offset=self._offset)
        code = answer["stopped"]
        self._code = -signal.SIGKILL if code is None else int(code)
        await self._session.ask("remove")

    async def _come_back(self) -> None:
        """Log in again, and retry until it succeeds."""
        pause_s = FIRST_PAUSE_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            try:
                await self._log_in()
            except SshError:
                continue
            self._say(f"{self.host}: the ssh connection is back")
            return

    async def _log_in(self) -> None:
        await self._session.close()
        session = await Login.open(self._client, self._session.target, self._run, connect_s=self._timeouts.connect_s)
        session.on_log(self._printed)
        self._session = session
        if session.state["agent"] == "none":  # the run's folder has been removed
            self._code = -signal.SIGKILL

    def _printed(self, text: str, offset: int) -> None:
        self._offset = offset
        self._log(self.host, text)
