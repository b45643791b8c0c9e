"""Runs drawn at random, and how they are interrupted: data for both worlds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

SAMPLES = 96
#: What becomes of a run before it goes on from its newest checkpoint.
KILL, PREEMPT, DONE = "kill", "preempt", "done"


@dataclass(frozen=True)
class Interruption:
    """One of them."""

    kind: str
    when: float
    """As a share of the uninterrupted run's time, or of its steps."""
    target: float
    """Which of the roles, as a share of their number."""


@dataclass(frozen=True)
class Draw:
    """A topology's sections, and what happens to the run."""

    seed: int
    sections: dict[str, dict[str, Any]]
    steps: int
    optimizer: str
    interruptions: tuple[Interruption, ...]

    @property
    def exchange(self) -> dict[str, Any]:
        return self.sections["exchange"]

    @property
    def exact(self) -> bool:
        """Whether the resumed run must have the same bits: nothing depends on who comes first, and nobody is lost."""
        kind = self.exchange["kind"]
        if kind == "model_server":
            return self.exchange["staleness"] == "sync" and not self.exchange["merged_fc"]
        return not (kind == "gossip" and self.elastic)

    @property
    def close(self) -> bool:
        """Whether it must be the same but for the order in which groups add up."""
        return self.exact or (self.exchange["kind"] == "model_server" and self.exchange["staleness"] == "sync")

    @property
    def elastic(self) -> bool:
        return bool(self.sections["job"].get("elastic"))

    @property
    def divided(self) -> bool:
        return "grid" in self.sections["compute"]


def draw(seed: int) -> Draw:
    """The draw of this number."""
    chance = random.Random(seed)
    pick = chance.choice
    kind = pick(["allreduce", "allreduce", "model_server", "model_server", "model_server", "averaging", "gossip"])
    groups = pick([1, 1, 2, 2, 3, 4]) if kind not in ("gossip", "averaging") else pick([2, 3, 4])
    size = pick([1, 1, 2]) if groups < 4 else 1
    accumulate = pick([1, 1, 1, 2])
    compute: dict[str, Any] = {
        "groups": groups,
        "group_size": size,
        "batch_size": 8,
        "bucket_size": pick(["200 B", "1 KiB", "4 MiB"]),
        "overlap": chance.random() < 0.8,
        "accumulate": accumulate,
    }
    exchange = _exchange(chance, kind, groups)
    optimizer = {"clip_norm": 0.5} if chance.random() < 0.2 else {}
    shuffle = pick(["none", "global", "global", "ring"])
    if size == 2 and chance.random() < 0.4 and shuffle != "ring" and not exchange.get("merged_fc"):
        compute["grid"] = "2x1"
        if kind != "model_server":
            optimizer = {}
    if exchange.get("merged_fc"):
        optimizer = {}
    own = random.Random(f"compression {seed}")  # so that the other choices of a draw are what they were before there was one
    if kind == "allreduce" and "grid" not in compute:
        exchange["compression"] = own.choice(["none", "none", "int8", "sign", "topk", "powersgd"])
    elif exchange.get("compression") == "topk":
        exchange["compression"] = own.choice(["topk", "sign", "powersgd"])
    if exchange.get("compression") == "topk":
        exchange["compression_ratio"] = 0.2
    elif exchange.get("compression") == "powersgd":
        exchange["compression_rank"] = 1
    if optimizer and kind == "gossip":
        exchange["gossip"]["granularity"] = "batch"
    steps = chance.randint(6, 10)
    job: dict[str, Any] = {"seed": chance.randint(0, 99), "checkpoint_every": chance.randint(1, 5)}
    if kind == "gossip" and size == 1:
        job["elastic"] = chance.random() < 0.6
    elif kind == "gossip":
        job["elastic"] = False
    interruptions = tuple(
        Interruption(pick([KILL, KILL, PREEMPT, PREEMPT, DONE]), chance.uniform(0.05, 1.0), chance.random())
        for _ in range(pick([1, 1, 2]))
    )
    sections = {"job": job, "compute": compute, "exchange": exchange, "optimizer": optimizer, "data": {"shuffle": shuffle}}
    return Draw(seed, sections, steps, pick(["sgd", "adam"]), interruptions)


def _exchange(chance: random.Random, kind: str, groups: int) -> dict[str, Any]:
    pick = chance.choice
    if kind == "allreduce":
        return {"kind": kind, "every": pick([1, 2, 3, 4])}
    if kind == "gossip":
        gossip = {
            "exchange": pick(["weights", "gradients"]),
            "granularity": pick(["bucket", "batch"]),
            "rotation": chance.random() < 0.7,
        }
        return {"kind": kind, "gossip": gossip}
    if kind == "averaging":
        every = chance.randint(1, 4)
        averaging: dict[str, Any] = {"method": pick(["average", "elastic", "outer"])}
        if averaging["method"] == "outer":
            averaging["deltas"] = pick(["float32", "fp16", "int8"])
        if every > 1:
            averaging |= {"fragments": pick([1, 2]), "overlap_steps": pick([0, 1])}
        return {"kind": kind, "every": every, "averaging": averaging}
    exchange: dict[str, Any] = {
        "kind": kind,
        "staleness": pick(["sync", "sync", "async", {"bound": 1}]),
        "shards": chance.randint(1, 5),
        "compression": pick(["none", "none", "fp16", "topk"]),
        "split_size": pick(["64 B", "4 MiB"]),
        "merged_fc": chance.random() < 0.25,
    }
    if exchange["merged_fc"]:
        exchange |= {"split": "4", "shards": min(exchange["shards"], 2)}
    elif exchange["staleness"] != "sync":
        exchange["snapshot"] = chance.random() < 0.4
    return exchange
