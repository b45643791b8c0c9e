"""Whether workers hold the same center, or the same state of an outer optimizer, judged by samples of its elements."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.errors import ProtocolError
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload

#: The most elements of a bucket's state that are compared. A missed or doubled average changes nearly all of them.
_SAMPLES = 16
#: The states are equal to the bit, unless processors treat the smallest numbers differently.
_TOLERANCE = 1e-6


async def require_alike(group: Group, state: Mapping[str, Payload], tag: str) -> None:
    """Raise `ProtocolError` on all members of ``group`` if their states differ. All of them call it."""
    samples = {name: _samples(payload) for name, payload in state.items() if isinstance(payload, TensorPayload)}
    if group.size == 1 or not samples:
        return
    own = np.concatenate(list(samples.values()))
    mean = TensorPayload.of(own.copy())
    await all_reduce(group, mean, (tag, "alike"))
    mean.scale_(1.0 / group.size)
    differs = TensorPayload.of(np.zeros(group.size))
    start = 0
    for values in samples.values():
        expected = mean.numpy()[start : start + len(values)]
        start += len(values)
        limit = _TOLERANCE * float(np.abs(expected).max(initial=0.0))
        if np.abs(values - expected).max(initial=0.0) > limit:
            differs.numpy()[group.rank] = 1.0
    await all_reduce(group, differs, (tag, "alike", "found"))
    if wrong := [peer for peer, found in zip(group.members, differs.numpy(), strict=True) if found]:
        raise ProtocolError(
            f"the workers do not agree on the state of the averaging ({', '.join(wrong)}): there is no model of the run. "
            "Resume it from its latest checkpoint, and report this as a defect"
        )


def _samples(payload: TensorPayload) -> NDArray[np.float64]:
    flat = payload.tensor.detach().reshape(-1)
    return np.array(flat[:: max(1, -(-flat.numel() // _SAMPLES))].double().cpu().numpy())
