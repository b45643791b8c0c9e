"""Whether a run on a grid of several rows may give up."""

from zmqtrain.simulate.grid_audit import GridAudit


def test_a_row_is_gone_when_all_are_lost_that_had_it() -> None:
    audit = GridAudit()
    audit.lost(["a"])
    assert not audit.a_row_is_gone, "nobody has anything yet"
    assert audit.may_give_up
    audit.begins(0, 2, ["a", "b", "c", "d"])  # columns a b and c d
    audit.lost(["b"])
    assert audit.a_row_is_gone is audit.may_give_up is False
    audit.joined("b")
    audit.lost(["d"])
    assert audit.a_row_is_gone, "another process of that name has nothing of it"


def test_whoever_is_in_the_next_grid_has_its_part() -> None:
    audit = GridAudit()
    audit.begins(0, 2, ["a", "b", "c", "d"])
    audit.lost(["b"])
    audit.joined("b")
    audit.begins(1, 2, ["a", "b", "c", "d"])
    audit.begins(0, 2, ["x", "y", "x", "y"])  # told late
    audit.lost(["d"])
    assert not audit.a_row_is_gone
    audit.lost(["b"])
    assert audit.a_row_is_gone
