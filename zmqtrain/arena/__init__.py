"""The shared-memory region of a host: buffers, owners, and words to wait at.

Read in this order: `region` (the memory), `allocator` (the parts of a slot), `arena` (a process's place in it), `words` (how
processes wait for each other without the network), `futex` (the kernel's part of that).
"""

from zmqtrain.arena.allocator import Allocator
from zmqtrain.arena.arena import Arena, Block, Place
from zmqtrain.arena.region import Region, shared_memory_missing
from zmqtrain.arena.words import Words

__all__ = ["Allocator", "Arena", "Block", "Place", "Region", "Words", "shared_memory_missing"]
