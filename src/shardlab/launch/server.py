"""Imported by the fork server alone, before torch: what must hold then, and when the launcher has gone.

Spinning: a thread of torch's OpenMP that waits for the others spins for about a millisecond before it sleeps. Where
another process wants the same cores, the spinning threads keep the working ones from running: a step of a small
model was seen to take 3.7 s where it takes 0.02 alone. With a fraction of that spinning it takes 0.06 s under the
same load, and alone 5 to 10 % more than before (2 % for a larger model). The library reads the variable once, when
it is loaded.

Memory: the C library gives large blocks back to the system at once, so each tensor of logits costs a page fault
every 4 KiB. With torch's large allocations on huge pages (2 MiB) head and loss of a small language model took 0.72
to 0.79 of the time. Torch reads the variable at its first allocation.

Leaving: Python would take down torch first, which lasts up to a second and has been seen not to end at all.
"""

import atexit
import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# Asking CUDA itself how many devices there are, as an import of torch's compiler may, would break it in every fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
atexit.register(os._exit, 0)
