"""Runs the numeric tests as on other processors: ``python -m tests.on_processors [pytest arguments]``, `make test-processors`.

``python -m tests.on_processors few`` runs a few of them, in a minute of processor time for all variants together:
continuous integration does.

torch, oneDNN and the number of threads choose the kernels, and with them the order of sums, so float32 results differ from
processor to processor. Each variant below limits the kernels to what an older processor has. A variant that this processor
cannot run is skipped, with the reason. Exits with 1 if any variant fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

#: What is compared with one process's numbers.
FOLDERS = ("tests/parallel", "tests/train", "tests/host")
#: Of each kind of layer, the test with the most cases for its time.
FEW = (
    "tests/host/test_sums.py",
    "tests/parallel/test_sums.py",
    "tests/parallel/test_domain_batch_norm.py",
    "tests/parallel/test_domain_convolution.py::test_convolution",
    "tests/parallel/test_model_linear.py::test_divided_outputs_and_inputs",
    "tests/parallel/test_model_lstm.py::test_any_kind",
    "tests/parallel/test_model_attention.py",
    "tests/train/test_replica.py::test_replica_trains_as_plain_torch",
)
#: From the least able on, as torch names them.
CAPABILITIES = ("default", "avx2", "avx512")


@dataclass(frozen=True, slots=True)
class Variant:
    """Which kernels may be used, and how many threads."""

    torch: str
    """ATEN_CPU_CAPABILITY"""
    onednn: str
    """ONEDNN_MAX_CPU_ISA"""
    threads: int

    def environment(self) -> dict[str, str]:
        return {
            "ATEN_CPU_CAPABILITY": self.torch,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            "OMP_WAIT_POLICY": "passive",  # threads that spin would take the processors from those that compute
        }

    def __str__(self) -> str:
        return f"torch {self.torch}, oneDNN {self.onednn}, {self.threads} thread{'s' if self.threads > 1 else ''}"


#: Each pair of a torch capability and a number of threads, and each oneDNN instruction set with both numbers of threads.
VARIANTS = (
    Variant("default", "SSE41", 1),
    Variant("default", "AVX2", 4),
    Variant("avx2", "AVX2", 1),
    Variant("avx2", "AVX512_CORE", 4),
    Variant("avx512", "AVX512_CORE", 1),
    Variant("avx512", "SSE41", 4),
)


def capability() -> str:
    """The best that torch finds on this processor, in the words of `CAPABILITIES`."""
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    environment = {key: value for key, value in os.environ.items() if key != "ATEN_CPU_CAPABILITY"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment).stdout.strip()
    return found.lower() if found.lower() in CAPABILITIES else "default"


def main(arguments: list[str]) -> int:
    """Run all variants, and say what became of each."""
    most = CAPABILITIES.index(capability())
    # Either one at a time, in two processes, or two at a time.
    few = arguments == ["few"]
    chosen = ["-q", *FEW] if few else arguments or ["-q", "-n", "2", "--dist", "loadfile", *FOLDERS]

    def outcome_of(variant: Variant) -> str:
        if CAPABILITIES.index(variant.torch) > most:
            return "skipped: this processor has no more than " + CAPABILITIES[most]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *chosen],
            env={**os.environ, **variant.environment()},
            stdout=subprocess.PIPE if few else None,
            stderr=subprocess.STDOUT if few else None,
            text=True,
            check=False,
        )
        print(f"== {variant}\n{done.stdout or ''}", flush=True)
        return "passed" if done.returncode == 0 else f"failed: pytest ended with {done.returncode}"

    with ThreadPoolExecutor(2 if few else 1) as pool:
        outcomes = list(zip(VARIANTS, pool.map(outcome_of, VARIANTS), strict=True))
    print("\n".join(f"{variant}: {outcome}" for variant, outcome in outcomes))
    return int(any(outcome.startswith("failed") for _, outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
