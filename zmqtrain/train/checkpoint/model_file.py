"""``model.safetensors`` in a run's directory, which holds the run's newest model, and ``model.json``, which describes it.

With each checkpoint it becomes that checkpoint's model, by a link rather than a copy. A model that belongs to no checkpoint (if
the job keeps none, or a script does) is sent on its own. This runs beside the coordinator.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack

from zmqtrain.durable import replace_file
from zmqtrain.errors import CheckpointError, DamagedError
from zmqtrain.exchange.checkpoint_part import ALONE, ALONE_WRITTEN, unpack_manifest
from zmqtrain.net.endpoint import Endpoint, PeerId, Tag
from zmqtrain.strict_json import dumps
from zmqtrain.train.checkpoint.folder import MODEL, PartWriter
from zmqtrain.waiting import settle
from zmqtrain.wire.payload import Payload, Value

NAME, ABOUT = "model.safetensors", "model.json"
_PARTIAL = f".{MODEL}.partial"


class ModelFile:
    """The model file of one run. `run` it as a task for as long as the run lasts."""

    def __init__(self, endpoint: Endpoint, folder: Path | None, failed: Callable[[int, str], None]) -> None:
        """``folder``: the run's directory; ``None``: models that arrive are dropped. ``failed`` gets the step and the reason
        if one cannot be written; the run continues."""
        self._folder, self._failed = folder, failed
        self._given_up: Tag | None = None  # the rest of what arrives with this tag is dropped
        self._writer: PartWriter | None = None
        self._tag: Tag = ()  # of what is being written
        self._written: dict[Tag, asyncio.Future[None]] = {}
        self._subscription = endpoint.subscribe(ALONE)
        endpoint.serve(ALONE_WRITTEN, self._on_written)

    async def run(self) -> None:
        """Receive model files and write them, until cancelled."""
        try:
            async for _, tag, payload in self._subscription:
                future = self._future(tag[1:])
                if tag == self._given_up:
                    continue
                if tag[1:2] == self._tag[1:2] and tag[3:] < self._tag[3:]:  # other workers send it since, on another grid
                    settle(future, None)
                    continue
                if tag != self._tag:
                    self._tag, self._writer = tag, None
                try:
                    if await asyncio.to_thread(self._take, payload):
                        settle(future, None)
                except CheckpointError as error:
                    settle(future, CheckpointError(f"the model cannot be written: {error}"))
                    self._give_up(tag)
                except (OSError, DamagedError) as error:  # a full disk
                    settle(future, None)
                    self._give_up(tag)
                    self._failed(int(tag[1]), (isinstance(error, OSError) and error.strerror) or str(error))
        finally:
            self._subscription.close()
            for future in self._written.values():
                future.cancel()

    def _give_up(self, tag: Tag) -> None:
        self._given_up, self._writer = tag, None
        if self._folder is not None:
            shutil.rmtree(self._folder / _PARTIAL, ignore_errors=True)

    def publish(self, checkpoint: Path) -> None:
        """The checkpoint is complete: its model becomes the run's. Raises `OSError`."""
        if self._folder is None:
            return
        about = msgpack.unpackb((checkpoint / f"{MODEL}.msgpack").read_bytes(), strict_map_key=False)
        self._put(checkpoint / NAME, about)

    def _take(self, payload: Payload) -> bool:
        """Write the next message of a model, in a thread. Returns whether the model is complete."""
        if self._folder is None:
            return True
        partial = self._folder / _PARTIAL
        if self._writer is None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            listed, self._about = unpack_manifest(payload)
            self._writer = PartWriter(partial, MODEL, listed, self._about)
        else:
            self._writer.write(payload.frames(), payload.dtype, payload.numel)
        if not self._writer.complete:
            return False
        self._writer.close()
        self._writer = None
        self._put(partial / NAME, self._about)
        shutil.rmtree(partial, ignore_errors=True)
        return True

    def _put(self, source: Path, about: Mapping[str, Any]) -> None:
        """Replace both files so that neither is ever seen half written."""
        assert self._folder is not None
        new = self._folder / f".{NAME}.tmp"
        new.unlink(missing_ok=True)
        try:
            try:
                new.hardlink_to(source)
            except OSError:  # a file system without links
                shutil.copyfile(source, new)
            os.replace(new, self._folder / NAME)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        write_about(self._folder, about)

    def _future(self, key: Tag) -> asyncio.Future[None]:
        return self._written.setdefault(key, asyncio.get_running_loop().create_future())

    async def _on_written(self, caller: PeerId, step: int, name: str, *mark: int) -> Value:
        await asyncio.shield(self._future((step, name, *mark)))
        return None


def write_about(folder: Path, about: Mapping[str, Any]) -> None:
    """Write the description of the model in ``folder``."""
    replace_file(folder / ABOUT, dumps(dict(about), indent=2) + "\n")


def model_lines(folder: Path, steps: int) -> list[str]:
    """Lines that describe the model that a run has left, and how to load it; none if there is no model.

    ``steps``: the steps that the run is known to have trained; after a failure these may be fewer than the model's."""
    about = read_about(folder)
    if about is None:
        return []
    step, file = about.get("step"), folder / NAME
    when = (
        f"after step {step}"
        if not isinstance(step, int) or step >= steps
        else f"after step {step} of {steps}, from the last checkpoint"
    )
    return [
        f"the model {when} ({about.get('model')}) is {file}; in PyTorch:",
        "    from safetensors.torch import load_file",
        f'    model.load_state_dict(load_file("{file}"))',
    ]


def read_about(folder: Path) -> dict[str, Any] | None:
    """The description of the model in ``folder``; ``None`` if there is no model."""
    with suppress(OSError, ValueError, RecursionError):
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        if isinstance(about, dict) and (folder / NAME).is_file():
            return about
    return None
