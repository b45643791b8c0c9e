"""An entry of a fork server whose module speaks when Python exits."""

from __future__ import annotations

import atexit

atexit.register(print, "bye")


def main(_report: int) -> int:
    return 0
