"""A Ray cluster of two nodes on this machine, in a process of its own: prints its address, and ends when its input does."""

from __future__ import annotations

import sys


def main() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False, wait=True)
    print(f"address {cluster.address}", flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
