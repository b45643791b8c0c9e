"""Files that readers never see half written, and what must still be on disk after a power failure."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Write a file atomically: readers find the old text or the new one, never a part.

    Args:
        path: the file. Another one beside it, ``.NAME.tmp``, is written first; it is removed if that fails.
        text: all that the file is to contain.

    Raises ``OSError``. It is not synced: after a power failure the file may be the old one, or empty.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to disk: a file that was renamed has its new name only then for certain. Raises ``OSError``."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
