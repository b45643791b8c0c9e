"""How layers are divided that are divided together: those of attention, by heads, and of MLPs, by hidden units."""

from __future__ import annotations

from dataclasses import dataclass

from zmqtrain.collectives.group import bounds
from zmqtrain.parallel.placement import Divisions, scaled


@dataclass(frozen=True, slots=True)
class Paired:
    """One layer of a pair."""

    by: str
    """``outputs`` or ``inputs``."""
    units: int
    """Into how many its features can be divided: heads, or each for itself."""
    size: int
    """Features in one of them."""
    fewest: int
    """Units of the layer of the pair that has the fewest: keys that several queries share."""
    packs: int = 1
    """How many activations one layer makes, one after another: queries, keys and values. Units and sizes are those of each."""

    def divisions(self, rows: int) -> Divisions | None:
        """Of its features, or of the first of its activations; ``None`` where the layers of the pair would not be divided alike."""
        few = bounds(self.fewest, rows)
        many = bounds(self.units, rows)
        if self.fewest < rows or scaled(few, self.units // self.fewest) != many:
            return None
        return scaled(many, self.size)
