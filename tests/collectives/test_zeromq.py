"""Every collective once over ZeroMQ, in real processes."""

from __future__ import annotations

import multiprocessing

import pytest

from tests.collectives import real_process


@pytest.mark.parametrize(("size", "numel"), [(3, 400_003)])
def test_all_collectives_between_processes(size: int, numel: int) -> None:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(size)]
    processes = [context.Process(target=real_process.run, args=(rank, size, numel, pipes[rank][1])) for rank in range(size)]
    try:
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()  # so that a process that ends early is heard of as an EOFError
        addresses = [mine.recv() for mine, _ in pipes]
        for mine, _ in pipes:
            mine.send(addresses)
        assert [mine.recv() for mine, _ in pipes] == [[]] * size
        for process in processes:
            process.join()
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()
