"""The picture of a run: which members are on which host, and how they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

#: What became of members that are gone against everybody's will.
GONE = ("lost", "failed")


def places(members: Iterable[Mapping[str, Any]], slow: Collection[str], group_size: int) -> list[dict[str, Any]]:
    """For each host with workers or servers its name (``host``), whether it is ``lost`` as a whole, and its ``tiles``.

    Args:
        members: as `zmqtrain.observe.dashboard.state.RunState.to_dict` gives them.
        slow: the peers that are slow now.
        group_size: workers of a group.
    """
    found: dict[str, dict[str, Any]] = {}
    for member in members:
        role, _, rank = str(member["peer"]).partition("/")
        if not rank:
            continue  # the coordinator
        place = found.setdefault(member["host"], {"host": member["host"], "lost": False, "tiles": []})
        if role == "agent":
            place["lost"] = member["state"] in GONE
            continue
        group = int(rank) // group_size if role == "worker" and rank.isdecimal() else None
        name = member["peer"] if group is None else f"{member['peer']}, group {group}"
        words = [name, member["health"], "slow" if member["peer"] in slow else ""]
        tile = {"role": role, "rank": rank, "group": group, "state": member["state"], "slow": member["peer"] in slow}
        place["tiles"].append({**tile, "text": ", ".join(filter(None, words))})
    return [place for place in found.values() if place["tiles"]]
