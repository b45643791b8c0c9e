"""Training loops as people write them. Each runs in a session, and in plain PyTorch on the whole batch."""

# The table has the rows in the order in which these are imported.
# isort: off
from tests.embed.loops.loop import Loop, network
from tests.embed.loops.rows import ALLREDUCE, ASYNC, AVERAGING, GOSSIP, KINDS, ROWS, SYNC, Row, table
from tests.embed.loops import ordinary, gradients, passes, rates, parameters, models

# isort: on

__all__ = [
    "ALLREDUCE",
    "ASYNC",
    "AVERAGING",
    "GOSSIP",
    "KINDS",
    "ROWS",
    "SYNC",
    "Loop",
    "Row",
    "gradients",
    "models",
    "network",
    "ordinary",
    "parameters",
    "passes",
    "rates",
    "table",
]
