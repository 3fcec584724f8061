"""Buckets: gradients that are summed over the replicate axis as one tensor, from their sizes alone, without torch.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 3.2.
"""

FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
"""Sizes at which a bucket is closed: large enough to amortise a collective's start, the first one small so that it
leaves early. DDP's own choice (Li et al. 2020, section 3.2.3)."""


def buckets(parameters: list[tuple[int, int]]) -> list[list[int]]:
    """Numbers of the parameters of each bucket. parameters: elements and bytes an element, in the order of backward"""
    cut: list[list[int]] = [[]]
    size = 0
    for number, (elements, itemsize) in enumerate(parameters):
        if size >= (BUCKET_BYTES if len(cut) > 1 else FIRST_BUCKET_BYTES):
            cut.append([])
            size = 0
        cut[-1].append(number)
        size += elements * itemsize
    return cut
