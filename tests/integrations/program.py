"""``program.py EXAMPLE ARGUMENTS ...``: an example, where torchvision may not fit torch.

``program.py --ranks=PACKAGES EXAMPLE ARGUMENTS ...``: two ranks of it, with what torchrun would tell them. They are forked once
torch and these packages are imported: each rank would otherwise take seconds for them, and torchrun for torch.

Where ``EVERY`` is a number, examples train on every image of so many.
"""

import os
import runpy
import sys
from importlib import import_module

import digits
from torch.distributed import TCPStore
from torch.utils.data import TensorDataset

from tests.torchvision_operators import define

#: Of a port in the pipe on which ranks are told it.
PORT_BYTES = 8


def fewer(every: int) -> None:
    """Examples load every image of so many."""
    whole = digits.load

    def load() -> tuple[TensorDataset, TensorDataset]:
        train, test = whole()
        return TensorDataset(*train[::every]), TensorDataset(*test[::every])

    digits.load = load


def example() -> None:
    """Run what the arguments say."""
    fewer(int(os.environ.get("EVERY", "1")))
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


def ranks(packages: list[str], count: int = 2) -> int:
    """Fork, and wait for all. Returns an exit code that is not 0 if one had such a code."""
    for package in packages:
        import_module(package)
    pids = []
    told, tell = os.pipe()
    for rank in range(count):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            port = int(os.read(told, PORT_BYTES))
            said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in said.items()})
            os.environ.update({"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "test"})
            example()
            return 0
        pids.append(pid)
    # As torchrun does: the store is at a port of its own choice. It has threads, so it begins after the forks.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(tell, count * f"{store.port:{PORT_BYTES}}".encode())
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in pids)


if __name__ == "__main__":
    define()
    option, _, packages = sys.argv[1].partition("=")
    if option == "--ranks":
        del sys.argv[1]
        sys.exit(ranks(packages.split(",")))
    example()
