"""Counts the thin matrices and forgets what travels as it is.

loses: powersgd_numbers
says: powersgd_numbers what is not compressed is sent, too
"""


# %% replaces="task8_planning"
def numbers_sent(shapes, rank):
    pairs = [matrix_shape(tuple(shape), rank) for shape in shapes]
    return sum(rank * sum(nm) for nm in pairs if nm)


def compression_ratio(shapes, rank):
    return sum(math.prod(shape) for shape in shapes) / numbers_sent(shapes, rank)


def seconds_saved(shapes, rank, world_size, latency_s, bandwidth, compress_s):
    def seconds(numbers, calls):
        return 2 * (world_size - 1) * (calls * latency_s + 4 * numbers / world_size / bandwidth)

    whole = sum(math.prod(shape) for shape in shapes)
    return seconds(whole, 1) - seconds(numbers_sent(shapes, rank), 3) - compress_s
