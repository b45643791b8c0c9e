"""Tensors that know where on the grid their parts are, so that a model's own forward computes on a grid what it computes alone.

`tensor` has the tensor, `dispatch` what becomes of an operator that meets one; each of the other modules has the rules of one kind
of operators (below autograd) or functions (above it).
"""

from zmqtrain.parallel.placed import (
    fused,
    indexing,
    layers,
    meeting,
    norms,
    packed,
    pointwise,
    products,
    random,
    reductions,
    samples,
    strips,
    views,
)
from zmqtrain.parallel.placed.tensor import Placed, World, from_local, to_local

__all__ = ["Placed", "World", "from_local", "to_local"]

_RULES = fused, indexing, layers, meeting, norms, packed, pointwise, products, random, reductions, samples, strips, views
