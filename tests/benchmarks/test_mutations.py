"""The auditor finds faults that are put into the protocol on purpose."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.mutations import MUTATIONS, Mutation, search, shape
from benchmarks.patches import Patches
from zmqtrain.server.shard import TensorEntry
from zmqtrain.simulate.explore import try_seed

#: Runs on grids really train, which takes time, so only some are tests: of each kind one.
GRIDS = {"begun_is_counted", "broken_forward_kept", "from_the_wrong_row", "newcomer_without_momentum", "begins_before_all"}
GRIDS |= {"others_stay", "from_several_groups", "not_aligned", "best_part_counts", "newcomer_with_old_values"}
TESTED = [each for each in MUTATIONS if each.seed < 100 and (not each.shape.startswith("grid") or each.put.__name__ in GRIDS)]


@pytest.mark.parametrize("mutation", TESTED, ids=lambda each: each.put.__name__)
def test_it_is_found(mutation: Mutation) -> None:
    """By the seed that is known, or soon by another one if the protocol has changed since. `benchmarks mutations` tries all."""
    found = search(mutation, [mutation.seed, *range(1, 30)])
    assert found.seed is not None, f"the auditor does not notice that {mutation.name}"


def test_a_mutation_of_something_that_is_gone_fails() -> None:
    with pytest.raises(KeyError):
        Patches().around(TensorEntry, "no_such_method", lambda before: before)


def test_all_is_put_back() -> None:
    before: Any = vars(TensorEntry)["update"]
    with MUTATIONS[0].in_place():
        assert vars(TensorEntry)["update"] is not before
    assert vars(TensorEntry)["update"] is before
    topology, horizon_s = shape(MUTATIONS[0].shape)
    assert try_seed(1, topology, "random", horizon_s).broken == ()
