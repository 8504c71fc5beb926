"""One of two processes, each with its own free memory; prints what it chose.

python -m tests.engines.auto_processes PORT RANK
"""

import json
import sys

import jax

import foretune as ft
from foretune._engines import auto

from ..problems import regression

if __name__ == "__main__":
    port, rank = sys.argv[1], int(sys.argv[2])
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, initialization_timeout=60)
    auto.free_bytes = lambda: float((2 - rank) * 2**30)
    choice = ft.Auto().explain(*regression(steps=5))
    print(json.dumps([str(choice), choice.limit - choice.given]), flush=True)
    jax.distributed.shutdown()
