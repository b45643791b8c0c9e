"""``python -m benchmarks fidelity``: simulated step times beside those of the same job in real processes on an emulated network."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.case import Case, case_of
from zmqtrain.errors import ZmqTrainError

WORKERS = (2, 3, 4, 6)
STALENESS = ("sync", "async")
STEPS = 60
#: The first steps wait for connections, and are left out.
WARM = 4
#: 8 MB of parameters, 96 ms a step.
PROFILE = {
    "layers": [{"name": f"layer{number}", "numel": 250_000, "forward_s": 0.004, "backward_s": 0.008} for number in range(8)],
    "batch_size": 32,
}
#: Where times never vary, simulated workers that begin together send together for ever, while real ones drift apart; so they vary
#: by a tenth here, by the same draws in both worlds.
_TOPOLOGY = """
[job]
name = "fidelity"
steps = {steps}
[[hosts]]
name = "node[1-{workers}]"
slots = 1
[compute]
groups = {workers}
batch_size = 32
device = "modelled"
profile = "{profile}"
bucket_size = "1 MiB"
noise = {{ kind = "normal", spread = 0.1 }}
[exchange]
kind = "model_server"
staleness = "{staleness}"
[network]
bandwidth = "1 Gbit/s"
latency = "200 us"
"""


def bench_fidelity(*, workers: Sequence[int] = WORKERS, steps: int = STEPS) -> Iterator[Case]:
    """For each number of workers, synchronous and not: the mean step time of an emulated launch, and as its peer the simulated one.

    The ratio is measured by simulated time: above 1 where the simulation is too fast. One model server lies beside a worker.
    """
    for number in workers:
        for staleness in STALENESS:
            measured_s, simulated_s = compare(number, staleness, steps)
            case = f"step of {number} workers, {staleness}"
            yield case_of("fidelity", case, measured_s * 1e3, "ms", "simulated", simulated_s * 1e3, "value/peer")


def compare(workers: int, staleness: str, steps: int) -> tuple[float, float]:
    """Mean seconds of a step, measured and simulated."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "profile.json").write_text(json.dumps(PROFILE))
        file = folder / "fidelity.toml"
        file.write_text(_TOPOLOGY.format(steps=steps, workers=workers, profile=folder / "profile.json", staleness=staleness))
        measured = _mean_step(["launch", str(file), "--emulate"], folder / "measured")
        simulated = _mean_step(["simulate", str(file)], folder / "simulated")
    return measured, simulated


def _mean_step(command: Sequence[str], run: Path) -> float:
    done = subprocess.run(
        [sys.executable, "-m", "zmqtrain", *command, "--run-dir", str(run)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ZmqTrainError(f"zmqtrain {' '.join(command)} failed: {done.stderr.strip()[-500:]}")
    seconds = []
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "step" and event["step"] >= WARM:
            seconds.append(float(event["values"]["seconds"]))
    return statistics.fmean(seconds)
