"""Builds the wheel, installs it in a new environment with nothing but what it needs, and trains there: ``make test-wheel``.

It also looks at the description that a package index would show: no link in it may be relative to the repository.

Not part of the suite: it installs torch once more, which takes minutes and 1 GB. It ends by saying what zmqtrain and its
dependencies take beyond torch and torch's own, to download and on the disk, and fails if it is more than `MOST_MB` to download.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: What pip may download beyond torch, in MB.
MOST_MB = 60
#: Run in the new environment: sizes of what torch does not need itself, by package.
SIZES = """
import re
from importlib.metadata import distribution, distributions

def closure(name, seen, extras=()):
    key = re.sub(r"[-_.]+", "-", name).lower()
    try:
        found = distribution(key)
    except Exception:
        return seen
    if key not in seen or extras:
        seen.add(key)
        for requirement in found.requires or ():
            extra = re.search(r"extra == .([\\w-]+)", requirement)
            if extra is None or extra[1] in extras:
                needed = re.match(r"([\\w.-]+)\\s*(?:\\[([^]]*)\\])?", requirement)
                closure(needed[1], seen, re.findall(r"[\\w.-]+", needed[2] or ""))
    return seen

with_torch = closure("torch", {"pip", "setuptools", "wheel"})
for each in distributions():
    key = re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower()
    if key not in with_torch:
        files = {file.locate() for file in each.files or ()}
        print(key, sum(file.stat().st_size for file in files if file.is_file()))
"""


def run(*command: object, cwd: Path) -> str:
    """The output of a command that must succeed, without this checkout on its path."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def install(folder: Path) -> Path:
    """Build the wheel and install it in a new environment, whose Python is returned. The versions are those of constraints.txt."""
    wheels = folder / "wheels"
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", wheels, ROOT, cwd=folder)
    (wheel,) = wheels.glob("zmqtrain-*.whl")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    constraints = ("-c", ROOT / "constraints.txt")
    run(python, "-m", "pip", "download", "-q", "--only-binary", ":all:", "--dest", wheels, *constraints, wheel, cwd=folder)
    run(python, "-m", "pip", "install", "-q", "--no-compile", "--no-index", "--find-links", wheels, wheel, cwd=folder)
    run(python, "-m", "pip", "check", cwd=folder)
    text = run(python, "-c", "from importlib.metadata import metadata; print(metadata('zmqtrain').get_payload())", cwd=folder)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    relative = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    if relative or not text.startswith("# zmqtrain"):
        sys.exit(f"a package index could not show the description: {relative or text[:200]}")
    return python


def train(python: Path, folder: Path) -> None:
    """Train the README's program, and load its model with nothing but torch and safetensors."""
    readme = (ROOT / "README.md").read_text()
    for language, name in (("python", "task.py"), ("toml", "two-groups.toml")):
        (folder / name).write_text(re.findall(rf"```{language}\n(.*?)```", readme, re.DOTALL)[0])
    zmqtrain = python.with_name("zmqtrain")
    run(zmqtrain, "check", "two-groups.toml", cwd=folder)
    printed = run(zmqtrain, "launch", "two-groups.toml", "--run-dir", "run", cwd=folder)
    print(next(line for line in printed.splitlines() if line.startswith("done in")))
    loading = "from safetensors.torch import load_file; assert load_file('run/model.safetensors')"
    run(python, "-c", loading, cwd=folder)
    run(zmqtrain, "report", "run", cwd=folder)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = install(folder)
        train(python, folder)
        sizes = {
            name: int(size) / 1e6 for name, size in (line.split() for line in run(python, "-c", SIZES, cwd=folder).splitlines())
        }
        files = {re.sub(r"[-_.]+", "-", each.name.split("-")[0]).lower(): each for each in (folder / "wheels").glob("*.whl")}
        download = sum(files[name].stat().st_size for name in sizes) / 1e6
    print(", ".join(f"{name} {size:.1f}" for name, size in sorted(sizes.items(), key=lambda item: -item[1])))
    print(f"beyond torch and what torch needs, zmqtrain installs {len(sizes)} packages: {sum(sizes.values()):.1f} MB on the disk,")
    print(f"{download:.1f} MB to download (at most {MOST_MB})")
    return int(download > MOST_MB)


if __name__ == "__main__":
    sys.exit(main())
