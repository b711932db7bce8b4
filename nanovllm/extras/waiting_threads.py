"""How long a thread of OpenMP that waits for others spins before it sleeps. Imported before torch, if possible.

libgomp reads this once, when torch loads it. A thread that waits for others then sleeps after about 0.3 ms instead of
the 4 ms that 300,000 turns take: next to another busy process, it would spin while the others need its core.
"""

import os
import sys

if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "20000"
    import torch  # noqa: F401

    del os.environ["GOMP_SPINCOUNT"]  # programs that this process starts decide for themselves
