"""Where a worker's batches come from: a shuffled order of all samples, the sample ring, or a stream.

`base` says what batches are, `make` which class a run takes, and each of the other modules has one way.
"""

from zmqtrain.train.batches.base import Batches
from zmqtrain.train.batches.make import make_batches
from zmqtrain.train.batches.reading import partition_of, reader_of, same_samples, sample_batch
from zmqtrain.train.batches.ring import ring_loader

__all__ = ["Batches", "make_batches", "partition_of", "reader_of", "ring_loader", "same_samples", "sample_batch"]
