"""Collects the tensors of batches as they arrive at an FC server, until a batch is complete. Without I/O."""

from __future__ import annotations

from collections import Counter

from zmqtrain.errors import ProtocolError
from zmqtrain.merged_fc.executor import BatchPart
from zmqtrain.merged_fc.messages import EVALUATE, MOST_TENSORS, ActivationsMeta, parse_activations_tag
from zmqtrain.net.endpoint import PeerId, Tag
from zmqtrain.wire.payload import Payload

#: The incomplete batches that one worker may have here: those of one step and one evaluation.
MOST_BATCHES = 4


class Arriving:
    """Batches that are not complete."""

    def __init__(self) -> None:
        self._here: dict[tuple[PeerId, str | int, int], dict[int, Payload]] = {}
        self._batches = Counter[PeerId]()

    def add(self, sender: PeerId, tag: Tag, payload: Payload) -> tuple[str | int, int, BatchPart] | None:
        """Add a tensor. If its batch is now complete, returns the batch: step and micro-batch (or ``evaluate`` and a number), and
        the worker's part; otherwise ``None``.

        Raises `ProtocolError` if the tensor belongs to no batch."""
        (what, number), index, _ = parse_activations_tag(tag)
        key = (sender, what, number)
        more = key not in self._here and self._batches[sender] == MOST_BATCHES
        if not 0 <= index < MOST_TENSORS or more:
            raise ProtocolError(f"{sender} sent more tensors than belong to a batch, or more batches than it may")
        here = self._here.get(key, {})
        if index in here:
            raise ProtocolError(f"{sender} sent tensor {index} of {tag!r} twice")
        here[index] = payload
        self._batches[sender] += key not in self._here
        self._here[key] = here
        if 0 not in here:
            return None
        meta = ActivationsMeta.from_value(here[0].meta)
        if set(here) != set(range(meta.tensors)):
            return None
        del self._here[key]
        self._batches[sender] -= 1
        return what, number, BatchPart(meta, tuple(here[each] for each in range(meta.tensors)))

    def forget(self, sender: PeerId, *, training: bool = False) -> None:
        """Drop what has arrived of the sender's incomplete batches; only of those of steps, if ``training``."""
        for key in [key for key in self._here if key[0] == sender and not (training and key[1] == EVALUATE)]:
            del self._here[key]
            self._batches[sender] -= 1
