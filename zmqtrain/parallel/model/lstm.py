"""An LSTM divided over the rows by its hidden units."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zmqtrain.errors import UsageError
from zmqtrain.parallel.model.divided import Divided
from zmqtrain.parallel.model.dropout import Masks
from zmqtrain.parallel.model.linear import LinearOperation
from zmqtrain.parallel.model.parts import gather_traffic, gathered, split, taken
from zmqtrain.parallel.model.product import Scattered, Summed, product
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.model.traffic import Traffic, total
from zmqtrain.parallel.placement import Divisions, Placement, Range
from zmqtrain.parallel.shard import Pieces, one_range

_GATES = 4
_LINEAR = LinearOperation()


class LSTM(Divided):
    """`torch.nn.LSTM`, of which a process holds all gates of some hidden units.

    At each time step it computes these units, and the column all-gathers their new outputs, which the next time step and the next
    layer need: one message round a time step, layer and direction. Backward reduce-scatters their gradients at each time step. The
    last cells, which the caller is given, travel with the last outputs.

    ``masks`` are needed for the dropout between layers.
    """

    def __init__(self, original: nn.LSTM, site: Site, *, masks: Masks | None = None) -> None:
        super().__init__(original, site)
        if original.proj_size:
            raise UsageError(f"layer {site.layer}: an LSTM with projections (proj_size) cannot be divided")
        if original.dropout and original.num_layers > 1 and masks is None:
            raise UsageError(f"layer {site.layer} has dropout between its layers: its masks must be given")
        self.input_size, self.hidden_size, self.num_layers = original.input_size, original.hidden_size, original.num_layers
        self.bias, self.batch_first, self.bidirectional = original.bias, original.batch_first, original.bidirectional
        self.dropout, self.masks = original.dropout, masks
        self.divisions = site.divide(self.hidden_size, "hidden units")
        pieces = _packed(self.divisions, self.hidden_size, _GATES)
        for name, whole in original.named_parameters():
            self.hold(name, whole, 0, pieces)
        self._recurrent = Scattered(site, one_range(self.divisions))
        # The outputs of both directions lie one after the other in what the next layer is given.
        self._outputs = _packed(self.divisions, self.hidden_size, self.directions)

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    def flatten_parameters(self) -> None:
        """Do nothing: for programs that call the method of torch's own LSTM."""

    def forward(self, x: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(time, samples, inputs), or samples first, to the outputs of all time steps, and the last ones and cells. All whole."""
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise UsageError(f"layer {self.site.layer}: a divided LSTM needs a tensor of time, samples and features")
        x = x.transpose(0, 1) if self.batch_first else x
        part: Tensor | None = None  # of x, from the second layer on
        last: list[tuple[Tensor, Tensor]] = []
        for layer in range(self.num_layers):
            found = [
                self._run(f"l{layer}{suffix}", part, x, hx, len(last) + number, bool(number))
                for number, suffix in enumerate(("", "_reverse")[: self.directions])
            ]
            last.extend((each[2], each[3]) for each in found)
            parts, wholes = [each[0] for each in found], [each[1] for each in found]
            if self.training and self.dropout and layer < self.num_layers - 1:
                parts, wholes = self._dropped(parts, wholes)
            part, x = torch.cat(parts, -1), torch.cat(wholes, -1)
        assert part is not None
        output = taken(part, x, -1, self._outputs, self.site)
        states, whole = torch.stack([each[0] for each in last], 1), torch.stack([each[1] for each in last], 1)
        hidden, cells = taken(states, whole, -1, one_range(self.divisions), self.site)
        return output.transpose(0, 1) if self.batch_first else output, (hidden, cells)

    def _run(
        self, name: str, part: Tensor | None, x: Tensor, hx: tuple[Tensor, Tensor] | None, number: int, reverse: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One layer in one direction: own outputs of all time steps, everybody's, and the last output and cell of both."""
        site = self.site
        bias = getattr(self, f"bias_ih_{name}") + getattr(self, f"bias_hh_{name}") if self.bias else None
        weight, recurrent = getattr(self, f"weight_ih_{name}"), getattr(self, f"weight_hh_{name}")
        if part is None:
            inputs = product(x, weight, bias, _LINEAR, Summed(site, self.input_size))
        else:
            inputs = product(part, weight, bias, _LINEAR, Scattered(site, self._outputs), x)
        own: Tensor | None = None
        whole: Tensor | None = None
        cell = None if hx is None else split(hx[1][number], -1, self.divisions, site)
        outputs, wholes = [], []
        times = range(len(inputs) - 1, -1, -1) if reverse else range(len(inputs))
        for time in times:
            gates = inputs[time]
            if own is not None:
                gates = gates + product(own, recurrent, None, _LINEAR, self._recurrent, whole)
            elif hx is not None:
                gates = gates + product(hx[0][number], recurrent, None, _LINEAR, Summed(site, self.hidden_size))
            enters, stays, new, leaves = gates.chunk(_GATES, -1)
            entered = torch.sigmoid(enters) * torch.tanh(new)
            cell = entered if cell is None else torch.sigmoid(stays) * cell + entered
            own = torch.sigmoid(leaves) * torch.tanh(cell)
            if time != times[-1]:
                whole = gathered(own.detach(), -1, self.divisions, site, site.label("all_gather"))
                outputs.append(own)
                wholes.append(whole)
        assert own is not None
        assert cell is not None
        last = torch.stack((own, cell))
        last_whole = gathered(last.detach(), -1, self.divisions, site, site.label("all_gather"))
        outputs.append(own)
        wholes.append(last_whole[0])
        if reverse:
            outputs.reverse()
            wholes.reverse()
        return torch.stack(outputs), torch.stack(wholes), last, last_whole

    def _dropped(self, parts: list[Tensor], wholes: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The same elements are dropped of the parts, which have gradients, and of the wholes, which are computed with."""
        assert self.masks is not None
        grid = self.site.grid
        divided, everywhere = Placement(grid, "columns", 2, self.divisions, 1), Placement(grid, sample_dimension=1)
        for number in range(len(parts)):
            call = self.masks.begin()
            parts[number] = self.masks.drop(parts[number], self.dropout, divided, call)
            wholes[number] = self.masks.drop(wholes[number], self.dropout, everywhere, call)
        return parts, wholes

    def traffic(self, shape: tuple[int, ...], itemsize: int, *, input_gradient: bool = True) -> Traffic:
        """See `Divided.traffic`; where the caller gives no first outputs and cells."""
        site, (times, samples) = self.site, (shape[1], shape[0]) if self.batch_first else shape[:2]
        step = gather_traffic(samples, self.divisions, site, itemsize)
        last = gather_traffic(2 * samples, self.divisions, site, itemsize)
        back = self._recurrent.sent(samples, itemsize) * (times - 1)
        forward, backward = site.label("all_gather"), site.label("dx", "backward")
        runs = [{forward: step * (times - 1)}, {forward: last}, {backward: back}] * (self.directions * self.num_layers)
        if input_gradient:
            runs += [{backward: Summed(site, self.input_size).sent(times * samples, itemsize)}] * self.directions
        between = Scattered(site, self._outputs).sent(times * samples, itemsize)
        runs += [{backward: between}] * (self.directions * (self.num_layers - 1))
        return total(runs)

    def extra_repr(self) -> str:
        start, stop = self.divisions[self.site.row]
        return f"{self.input_size}, {self.hidden_size}, units {start} to {stop}, grid {self.site.grid}"


def _packed(divisions: Divisions, length: int, times: int) -> Pieces:
    """The ranges of each row in ``times`` dimensions of ``length``, which lie one after the other."""

    def ranges(division: Range) -> tuple[Range, ...]:
        return tuple((part * length + division[0], part * length + division[1]) for part in range(times))

    return tuple(ranges(division) for division in divisions)
