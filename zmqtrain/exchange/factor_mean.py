"""The mean over a group of ranks as the product of thin factors: PowerSGD (Vogels, Karimireddy, Jaggi 2019, algorithm 1).

Factors are linear in what they approximate, so they can be added up on the way: the ranks all-reduce P, make its columns
orthonormal, and all-reduce Q. What is no matrix is added up as it is, with P. All ranks compute the mean from the same sums by
operations whose bits do not depend on the processor, so they end with identical bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.arithmetic import Arithmetic
from zmqtrain.exchange.checkpoint_part import require_like
from zmqtrain.exchange.rounded_mean import tensor_of
from zmqtrain.net.endpoint import Tag
from zmqtrain.wire.compress import Matrix, kept_of
from zmqtrain.wire.compress.factors import Layout, lefts_of, orthonormal, rights_of
from zmqtrain.wire.compress.feedback import with_kept
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload


class FactorMean:
    """Means of payloads of float32 or float64; a number identifies successive payloads of one kind on all ranks.

    What the product of a rank's own factors leaves out of its payload is added to its next one (error feedback)."""

    def __init__(self, rank: int, matrices: Mapping[int, Sequence[Matrix]], arithmetic: Arithmetic) -> None:
        """``rank``: of the factors. ``matrices``: those in each payload."""
        self._rank, self._matrices, self._arithmetic = rank, matrices, arithmetic
        self._state: dict[str, Tensor] = {}  # "lost/INDEX": what is still to be sent; "right/INDEX": Q

    async def mean(self, group: Group, index: int, payload: Payload, tag: Tag, *, priority: int = 0) -> None:
        """``payload`` becomes the mean over all ranks."""
        layout, do = self._layout(index, payload.numel), self._arithmetic.do
        if group.size == 1 or not layout.matrices:
            await all_reduce(group, payload, tag, priority=priority)
            await do(lambda: payload.scale_(1.0 / group.size), payload)
            return
        whole, own_rights = torch.empty(0), torch.empty(0)  # what this rank has to send, and its own Q
        dtype, share = payload.dtype, 1.0 / group.size

        def left(flat: Tensor) -> Tensor:
            nonlocal whole
            whole = with_kept(self._state, f"lost/{index}", flat, in_place=False)  # a step may be given up before its end
            return torch.cat((*layout.rest_of(whole), lefts_of(layout, whole, self._right(index, layout, whole))))

        def right(lefts: Tensor) -> Tensor:
            nonlocal own_rights
            own_rights = rights_of(layout, whole, lefts)
            return own_rights.clone()

        def middle() -> tuple[Payload, Payload, Payload]:
            first.scale_(share)
            rest, lefts = first.part(0, layout.rest_numel), first.part(layout.rest_numel, first.numel)
            lefts = lefts.mapped(dtype, lefts.numel, lambda flat: orthonormal(layout, flat), None)
            return rest, lefts, lefts.mapped(dtype, layout.right_numel, right, None)

        def whole_mean(rights: Tensor) -> Tensor:
            start = layout.first_rights(str(index), whole)
            self._state[f"right/{index}"] = layout.warm(rights, self._right(index, layout, whole), start)
            sent = layout.whole(torch.empty_like(whole), layout.joined_rest(whole), tensor_of(lefts), own_rights)
            self._state[f"lost/{index}"] = kept_of(whole, sent)
            return layout.whole(sent, tensor_of(rest), tensor_of(lefts), rights)

        def end() -> None:
            second.scale_(share)
            payload.copy_(second.mapped(dtype, payload.numel, whole_mean, None))

        first = await do(lambda: payload.mapped(dtype, layout.rest_numel + layout.left_numel, left, None), payload)
        await all_reduce(group, first, (*tag, "left"), priority=priority)
        rest, lefts, second = await do(middle, payload)
        await all_reduce(group, second, (*tag, "right"), priority=priority)
        await do(end, payload)

    def _layout(self, index: int, numel: int) -> Layout:
        return Layout.of(numel, self._rank, self._matrices[index])

    def _right(self, index: int, layout: Layout, like: Tensor) -> Tensor:
        """Q with which the next mean starts."""
        kept = self._state.get(f"right/{index}")
        return layout.first_rights(str(index), like) if kept is None else kept

    def state(self, group: Group) -> Mapping[str, Payload]:
        """The state that a checkpoint has to keep, by name: what was not sent yet, and Q. Tensors alias this object's own."""
        return {name: TensorPayload.of(tensor) for name, tensor in self._state.items()}

    def restore(self, group: Group, state: Mapping[str, Payload]) -> None:
        """Continue with what `state` returned."""
        self._state = {name: tensor_of(payload).clone() for name, payload in state.items()}

    def require_like(self, group: Group, payloads: Mapping[str, Payload]) -> None:
        """Raise `CheckpointError` unless what was restored fits ``payloads``, which are given by their numbers."""
        fits: dict[str, Payload] = {}
        for index, payload in payloads.items():
            layout = self._layout(int(index), payload.numel)
            if layout.matrices:
                right = TensorPayload.empty(layout.right_numel, payload.dtype)
                fits |= {f"lost/{index}": payload, f"right/{index}": right}
        for name, tensor in self._state.items():
            if name not in fits:
                raise CheckpointError(f"the checkpoint has {name!r:.60}, which belongs to nothing in this run")
            require_like(name, TensorPayload.of(tensor), fits[name])
