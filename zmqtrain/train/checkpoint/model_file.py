"""``model.safetensors`` in a run's directory: the newest of the run's models; and ``model.json``, which says what it is.

With each checkpoint it becomes that one's model, which is linked and not copied. A model that belongs to no checkpoint (where the
job keeps none, or a script does) comes alone. Runs beside the coordinator.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack

from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.checkpoint_part import ALONE, ALONE_WRITTEN, unpack_manifest
from zmqtrain.net.endpoint import Endpoint, PeerId, Tag
from zmqtrain.train.checkpoint.folder import MODEL, PartWriter
from zmqtrain.wire.payload import Payload, Value

NAME, ABOUT = "model.safetensors", "model.json"


class ModelFile:
    """A run's. `run` it as a task for as long as the run lasts."""

    def __init__(self, endpoint: Endpoint, folder: Path | None) -> None:
        """``folder``: the run's directory; ``None``: nowhere, and what comes is dropped."""
        self._folder = folder
        self._writer: PartWriter | None = None
        self._written: dict[Tag, asyncio.Future[None]] = {}
        self._subscription = endpoint.subscribe(ALONE)
        endpoint.serve(ALONE_WRITTEN, self._on_written)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async for _, tag, payload in self._subscription:
                future = self._future(tag[1:])
                try:
                    if await asyncio.to_thread(self._take, payload) and not future.done():
                        future.set_result(None)
                except (CheckpointError, OSError) as error:
                    if not future.done():
                        future.set_exception(CheckpointError(f"the model cannot be written: {error}"))
                        future.exception()  # it may be that nobody asks
        finally:
            self._subscription.close()
            for future in self._written.values():
                future.cancel()

    def publish(self, checkpoint: Path) -> None:
        """The checkpoint is complete: its model is the run's from now on. Raises `OSError`."""
        if self._folder is None:
            return
        about = msgpack.unpackb((checkpoint / f"{MODEL}.msgpack").read_bytes(), strict_map_key=False)
        self._put(checkpoint / NAME, about)

    def _take(self, payload: Payload) -> bool:
        """In a thread. Returns whether the model is complete."""
        if self._folder is None:
            return True
        partial = self._folder / f".{MODEL}.partial"
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
        """Neither file is ever seen half written."""
        assert self._folder is not None
        new = self._folder / f".{NAME}.tmp"
        new.unlink(missing_ok=True)
        try:
            new.hardlink_to(source)
        except OSError:  # a file system without links
            shutil.copyfile(source, new)
        os.replace(new, self._folder / NAME)
        write_about(self._folder, about)

    def _future(self, key: Tag) -> asyncio.Future[None]:
        return self._written.setdefault(key, asyncio.get_running_loop().create_future())

    async def _on_written(self, caller: PeerId, step: int, name: str) -> Value:
        await asyncio.shield(self._future((step, name)))
        return None


def write_about(folder: Path, about: Mapping[str, Any]) -> None:
    """Write what the model in ``folder`` is."""
    new = folder / f".{ABOUT}.tmp"
    new.write_text(json.dumps(dict(about), indent=2) + "\n", encoding="utf-8")
    os.replace(new, folder / ABOUT)


def model_lines(folder: Path, steps: int) -> list[str]:
    """What to say of the model that a run has left, and how it is loaded; nothing where there is none.

    ``steps``: as many as the run is known to have done; of one that has failed they may be fewer than the model's."""
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
    """What the model in ``folder`` is; ``None`` where there is none."""
    with suppress(OSError, ValueError, RecursionError):
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        if isinstance(about, dict) and (folder / NAME).is_file():
            return about
    return None
