"""Constants of the schedules, with unit, machine and date: the sizes from which `choose` takes another algorithm.

Each table lists, for an operation, pairs of the largest size in bytes and the algorithm up to that size; the size is
that of the whole buffer. To measure again: `python -m torchdist_ref.benchmark` with ``TORCHDIST_REF_ALGORITHM`` set.

Do not add here: constants without a source, or code.
"""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
# (largest size in bytes, algorithm), read from the top.
SizeTable = tuple[tuple[float, str], ...]

# Bytes. With more than two ranks on one host, one round of all_reduce, in which every rank reads every tensor, is
# faster up to here. Measured with 4 and 8 ranks on 2 cores of an AMD EPYC, Linux 6.18, 2026-11-21.
ONE_ROUND_BYTES = 256 * KIB

# Within a host, the direct algorithm is used except in these cases. Measured as above, 2026-11-22.
# - A second round costs one more synchronization, and saves the addition of all tensors on each reducing rank.
# - When the blocks for all ranks no longer fit into one window, each window of a direct exchange waits for all ranks,
#   while a pairwise exchange waits for one peer at a time. Reductions stay direct: pairwise, they would round the sum
#   after each peer.
WITHIN_A_HOST: dict[str, SizeTable] = {
    "all_reduce": ((ONE_ROUND_BYTES, "direct"), (float("inf"), "two_shot")),
    "reduce": ((4 * MIB, "direct"), (float("inf"), "two_shot")),
    "all_to_all": ((2 * MIB, "direct"), (float("inf"), "pairwise")),
}

# Two ranks on one host have one peer each, and a second round is faster only where tensors exceed the cache.
# Measured with 2 ranks on 2 cores of the same machine, 2026-11-22.
BETWEEN_TWO: dict[str, SizeTable] = {"all_reduce": ((4 * MIB, "direct"), (float("inf"), "two_shot"))}

# Largest number of ranks on one host for which the tables above hold. With more ranks, an algorithm in which every rank
# reads from every other one spends more on signals, whose number grows with the square of the ranks, than on copies.
MOST_DIRECT_RANKS = 64

# More ranks than that on one host, which share few cores or are simulated: algorithms with few messages for each rank.
# 2026-11-29.
MANY_WITHIN_A_HOST: dict[str, SizeTable] = {
    "all_reduce": ((4 * KIB, "recursive_doubling"), (float("inf"), "blocks")),
    "reduce": ((float("inf"), "tree"),),
    "all_gather": ((float("inf"), "bruck"),),
    "reduce_scatter": ((float("inf"), "recursive_halving"),),
    "barrier": ((float("inf"), "dissemination"),),
}

# Between hosts: the limits of Thakur, Rabenseifner and Gropp 2005, scaled for a latency of tens of microseconds
# through Python. These are not measured here.
BETWEEN_HOSTS: dict[str, SizeTable] = {
    "all_reduce": ((64 * KIB, "recursive_doubling"), (1024 * KIB, "halving_doubling"), (float("inf"), "two_shot")),
    "reduce": ((64 * KIB, "tree"), (float("inf"), "halving_doubling")),
    "broadcast": ((64 * KIB, "tree"), (float("inf"), "scatter_all_gather")),
    "all_gather": ((512 * KIB, "bruck"), (float("inf"), "ring")),
    "gather": ((float("inf"), "tree"),),
    "scatter": ((float("inf"), "tree"),),
    "reduce_scatter": ((512 * KIB, "recursive_halving"), (float("inf"), "direct")),
    "all_to_all": ((16 * KIB, "bruck"), (float("inf"), "pairwise")),
    "barrier": ((float("inf"), "dissemination"),),
    "send": ((float("inf"), "direct"),),
}

# Between hosts, for sums whose partial results must not travel, since they would be rounded (16-bit floats): algorithms
# in which a rank reads the values of all ranks.
UNROUNDED: dict[str, SizeTable] = {
    "all_reduce": ((64 * KIB, "direct"), (float("inf"), "two_shot")),
    "reduce": ((64 * KIB, "direct"), (float("inf"), "two_shot")),
    "reduce_scatter": ((float("inf"), "direct"),),
}
