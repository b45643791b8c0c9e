"""Packs the folder of a launch into one small file, to copy it to other machines."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from zmqtrain.errors import UsageError
from zmqtrain.topology.job import Job
from zmqtrain.topology.rounded import rounded_size

#: Folders that are not part of a program: those of version control, tools and runs, and environments, which cannot be moved.
LEFT_OUT = frozenset(
    {
        ".git", ".hg", ".svn", ".jj", "runs", "__pycache__", ".venv", "venv", "node_modules", ".cache", ".mypy_cache",
        ".pytest_cache", ".ruff_cache", ".hypothesis", ".import_linter_cache", ".tox", ".nox", ".ipynb_checkpoints", ".idea",
        ".vscode",
    }
)  # fmt: skip
#: Files that mark a folder as an environment, or as a cache.
_SAYS_SO = ("pyvenv.cfg", "CACHEDIR.TAG")
#: An error names this many of the largest files.
_NAMED = 5
#: The most files in a program's folder; a folder with more is probably something else, such as a home directory.
MOST_FILES = 20_000


def pack(folder: Path, limit: int) -> bytes:
    """The folder as a compressed tar file: the same bytes for the same files.

    Links to files in the folder are followed, others are left out. Raises `UsageError`, which names the largest files, if they
    have more than ``limit`` bytes.
    """
    found = list(_files(folder))
    total = sum(size for _, size in found)
    if total > limit:
        largest = sorted(found, key=lambda file: -file[1])[:_NAMED]
        names = ", ".join(f"{path} ({rounded_size(size)})" for path, size in largest)
        raise UsageError(
            f"sync would copy {rounded_size(total)} of {folder} to every host, more than sync_limit = {rounded_size(limit)}. "
            f"The largest: {names}. Launch in a folder with only the program, or raise sync_limit in [engine]"
        )
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=1, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        for path, size in found:
            entry = tarfile.TarInfo(path.as_posix())
            status = (folder / path).stat()
            entry.size, entry.mtime, entry.mode = size, int(status.st_mtime), status.st_mode & 0o755
            with (folder / path).open("rb") as file:
                archive.addfile(entry, file)
    return buffer.getvalue()


def program_files(job: Job, script: str | None, folder: Path) -> list[str]:
    """The files that the job names: its script, and its task if a file gives it. Paths are as the user wrote them, or as found in
    ``[job] python_path``."""
    found = [] if script is None else [script]
    source = (job.task or "").partition(":")[0]
    if source.endswith(".py"):
        places = [os.path.join(part, source) for part in job.folders("")]
        found.append(next((path for path in places if (folder / path).is_file()), source))
    return found


def require_inside(files: Iterable[str], folder: Path) -> None:
    """Check that the files can be found under their names when the folder is copied. Raises `UsageError`."""
    for name in files:
        if Path(name).is_absolute() or not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise UsageError(
                f"sync copies {folder} to every host, but the path {name} does not lead into it: launch in the folder that "
                f"contains the file, and give a relative path"
            )


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    """Files to copy, by their paths in the folder, with their sizes. Raises `UsageError` if there are too many."""
    root = folder.resolve()
    count = 0
    for here, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT and not _is_no_program(Path(here, name)))
        for name in sorted(names):
            path = Path(here, name)
            if name.endswith(".pyc") or not path.is_file() or not path.resolve().is_relative_to(root):
                continue
            count += 1
            if count > MOST_FILES:
                raise UsageError(
                    f"sync would copy more than {MOST_FILES:,} files of {folder} to every host: launch in a folder with only the "
                    f"program"
                )
            yield path.relative_to(root), path.stat().st_size


def _is_no_program(folder: Path) -> bool:
    return folder.is_symlink() or any((folder / name).exists() for name in _SAYS_SO)
