"""``program.py EXAMPLE ARGUMENTS ...``: an example, where torchvision may not fit torch."""

import runpy
import sys

from tests.torchvision_operators import define

if __name__ == "__main__":
    define()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
