"""Jobs in which faults are looked for, and seeds that have found something."""

from __future__ import annotations

import pytest

from benchmarks.mutations import SHAPES, shape
from zmqtrain.simulate.explore import try_seed


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("gossip", 6),  # the view of a loss came after the greeting of the next process of that name
        ("averaging-outer", 6),  # and a wait for the lost one had begun in between
        ("gossip", 47),  # a group was made of members of which one was lost already, but not for the coordinator, which was away
        ("gossip-hypercube", 16),
        ("allreduce", 8),  # rank 0 is lost before it has given its parameters to all
        ("averaging-elastic", 43),  # a host comes back after the end
        ("groups", 22),  # a host is cut off while the run fails
        ("allreduce", 81),  # a worker is lost before all have joined
        ("groups", 95),  # a host comes back when the run has ended without it
        ("groups", 3),  # the launcher dies before all know that all have joined
        ("gossip", 150),  # workers come back when all is trained
        ("allreduce", 186),  # a role is started again by two
        ("servers-sync", 4),
        ("servers-sync", 163),  # the members change when a group that rested has begun a step again
        ("teams-sync", 132),  # a worker comes between two agreements about the end
        ("teams-sync", 257),
        ("teams-gossip", 3),
        ("grid", 2),
        ("grid-elastic", 319),  # the launcher dies while it hands out what a run resumes
        ("grid-elastic", 918),  # a worker is ended while it builds its part of a grid
        ("grid-elastic", 2487),  # a link ends by a damaged message while a request is being served
        ("grid-elastic", 730046),  # one that was lost is back before another has built its part
        ("merged-fc", 6),
        ("averaging", 50004),  # the others leave while one that comes back asks one of them that is lost
        ("merged-copied", 3174),  # a worker is given up while it joins
        ("allreduce", 9000076),  # one of those who agree was given a newer view than the others were told
        ("gossip", 9000207),  # a flipped bit in what comes before a state
        ("allreduce", 20000073),  # the next change of the members came before the last one
        ("servers-bounded", 20000140),  # servers waited for a worker that had come too late, and told nobody what they had
        ("gossip-epoch", 21000041),  # a group is lost that alone had what another lost one had trained
        ("gossip-epoch", 23000129),  # a group is lost when all have trained, with what no other model contains
        ("averaging-epoch", 23000214),  # two are lost while one that has come says what its model contains
        ("servers-async", 23000170),  # one came and was lost again before it began, so two changes of the members were the same
        ("averaging", 25000277),  # a worker gets the batches of others before it has agreed with them on a change that is in these
        ("servers-async", 24000016),  # one that finishes waits to deliver what another needs no more, which has left
        ("servers-sync", 24000088),  # one waits for the last step of others, which rest
        ("averaging-outer", 25000227),  # a host is started again while the others leave
        ("servers-async", 30000103),  # a server is asked for something while it hands over and ends
        ("gossip-hypercube", 25000065),  # one that was lost had sent its model of a step that the next of its name takes part in
        ("grids-servers", 1138),  # one had not begun when others agreed on a change, and missed it
        ("averaging-epoch", 32000112),  # one is lost that had said what its model contains, and the average is made without it
        ("allreduce", 32000205),  # one is lost before the last step, of which its part was left by others
        ("servers-async", 33000155),  # three faults delay one worker at once, each many times
        ("teams-sync", 20000002),  # nobody knew any more who takes part, and a worker waited on
    ],
)
def test_nothing_breaks(name: str, seed: int) -> None:
    topology, horizon_s = shape(name)
    assert try_seed(seed, topology, "random", horizon_s).broken == ()


def test_there_are_twenty_seven_and_each_says_how_it_is_tried() -> None:
    files = list(SHAPES.glob("*.toml"))
    assert len(files) == 27
    for file in files:
        assert f"# zmqtrain simulate benchmarks/shapes/{file.name} --faults random" in file.read_text()
