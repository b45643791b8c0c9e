"""The picture of a run: which members are on which host, and how they are."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

#: What became of members that are gone against everybody's will.
GONE = ("lost", "failed")


def places(members: Iterable[Mapping[str, Any]], slow: Collection[str], group_size: int) -> list[dict[str, Any]]:
    """For each host with workers or servers, in the order of their names, its name (``host``), whether it is ``lost`` as a whole,
    and its ``tiles``.

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
    return sorted((place for place in found.values() if place["tiles"]), key=lambda place: _natural(place["host"]))


def _natural(name: str) -> list[tuple[int, str]]:
    """Orders node2 before node10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]
