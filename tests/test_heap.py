"""What the C library keeps of freed memory, counted by the pages that the kernel maps."""

import subprocess
import sys

import pytest

#: Sixteen blocks of 1 MiB at a time, as many frames that arrive and are freed, in a thread of its own as ZeroMQ's.
_FRAMES = """
import ctypes, resource, sys, threading
from zmqtrain.heap import keep_frames

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def pages():
    blocks = [libc.malloc(1 << 20) for _ in range(16)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 20)
    for block in reversed(blocks):
        libc.free(block)

def work():
    for number in range(20):
        pages()
        if number == 3:
            counted.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    counted.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

counted = []
if sys.argv[1] == "keep" and not keep_frames():
    print("unknown")
    sys.exit()
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(counted[1] - counted[0])
"""


def _faults(how: str) -> int:
    process = subprocess.run([sys.executable, "-c", _FRAMES, how], check=True, capture_output=True, text=True)
    if process.stdout.strip() == "unknown":
        pytest.skip("this C library has no such setting")
    return int(process.stdout)


def test_frames_that_come_again_need_no_new_pages() -> None:
    assert _faults("keep") < 500
    assert _faults("leave") > 5000  # otherwise the setting is not needed any more
