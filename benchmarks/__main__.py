"""``python -m benchmarks NAME``: run one benchmark and print its cases."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from benchmarks.run import NAMES, run_bench
from zmqtrain.errors import ZmqTrainError

app = typer.Typer(name="benchmarks", add_completion=False, pretty_exceptions_enable=False)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help=", ".join(NAMES[:-1]) + f" or {NAMES[-1]}.")],
    json_lines: Annotated[bool, typer.Option("--json", help="Print JSON lines only, for machines.")] = False,
    encrypted: Annotated[bool, typer.Option("--encrypted", help="net: what encryption costs, and strangers at the doors.")] = False,
    mxnet_python: Annotated[
        str | None, typer.Option(help="server and quality: a Python that has MXNet, to measure its kvstore in the same run.")
    ] = None,
    mxnet_script: Annotated[str | None, typer.Option(help="server: the script that times MXNet's kvstore.")] = None,
    mpi_python: Annotated[
        str | None, typer.Option(help="host: a Python that has mpi4py, to measure mpirun's all-reduce in the same run.")
    ] = None,
    mpi_script: Annotated[str | None, typer.Option(help="host: the script that times it.")] = None,
    torchft_python: Annotated[
        str | None, typer.Option(help="failures: a Python that has torchft, to measure it in the same run.")
    ] = None,
    parts: Annotated[
        list[str] | None,
        typer.Option(
            "--part",
            help="cluster: launch, links, ddp or accuracy alone. efficiency: figure, uneven, lenet, lenet-merged, cifarnet or "
            "cifarnet-merged. merged: emulated, simulated, staleness or pipelining. soak: an exchange. quality: a problem and a "
            "network. compression and accuracy: a problem. May be repeated.",
        ),
    ] = None,
    workers: Annotated[
        list[int] | None, typer.Option(help="efficiency: predict and measure with 2, 4 or 8 workers alone. May be repeated.")
    ] = None,
    peers_python: Annotated[
        str | None, typer.Option(help="quality: a Python that has torchft, hivemind and what zmqtrain needs, to run them, too.")
    ] = None,
    systems: Annotated[
        list[str] | None,
        typer.Option(
            "--system",
            help="quality, accuracy and compression: some systems alone, beside DDP, one process or none. May be repeated.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="cluster: where MNIST is, for accuracy. quality and compression: CIFAR-10 and Shakespeare. accuracy: all three. "
            "Also ZMQTRAIN_DATA."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="quality: one network, seed and learning rate, and little training.")
    ] = False,
    minutes: Annotated[float | None, typer.Option(help="soak: how long all its runs train together; 30.")] = None,
    every: Annotated[float | None, typer.Option(help="soak: seconds between two faults; 10.")] = None,
) -> None:
    """Measure speed on this machine, beside a peer where one is installed."""
    code = run_bench(
        name,
        json_lines=json_lines,
        encrypted=encrypted,
        mxnet_python=mxnet_python,
        mxnet_script=mxnet_script,
        mpi_python=mpi_python,
        mpi_script=mpi_script,
        torchft_python=torchft_python,
        peers_python=peers_python,
        systems=systems or (),
        parts=parts or (),
        workers=workers or (),
        data=data,
        quick=quick,
        minutes=minutes,
        every=every,
    )
    raise typer.Exit(code)


def main() -> None:
    """Run the command; our own errors come out as one message, without a traceback."""
    try:
        app()
    except ZmqTrainError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
