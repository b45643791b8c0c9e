"""Layers whose model is divided over the rows of a grid: each process has 1/Pr of the weights and 1/Pc of the batch."""

from zmqtrain.parallel.model.attention import MultiheadAttention
from zmqtrain.parallel.model.batch_norm import BatchNorm
from zmqtrain.parallel.model.convolution import Convolution
from zmqtrain.parallel.model.cross_entropy import CrossEntropy
from zmqtrain.parallel.model.divided import Divided
from zmqtrain.parallel.model.dropout import Batch, Masks
from zmqtrain.parallel.model.embedding import Embedding
from zmqtrain.parallel.model.linear import Linear
from zmqtrain.parallel.model.lstm import LSTM
from zmqtrain.parallel.model.site import Site

__all__ = [
    "LSTM",
    "Batch",
    "BatchNorm",
    "Convolution",
    "CrossEntropy",
    "Divided",
    "Embedding",
    "Linear",
    "Masks",
    "MultiheadAttention",
    "Site",
]
