"""Orthonormalises with torch.linalg.qr: other signs, and full columns for zeros.

Planning by a function for one ring; updates by hand, which clear gradients afterwards.

loses: nothing
"""


# %% replaces="task1_orthonormalise"
def orthonormalise(matrix):
    return torch.linalg.qr(matrix)[0]


# %% replaces="task4_matrix_shape"
def matrix_shape(shape, rank):
    n, *others = shape or (0,)
    m = math.prod(others)
    return (n, m) if others and n * m > rank * (n + m) else None


# %% replaces="task8_planning"
def numbers_of(shapes):
    return sum(math.prod(shape) for shape in shapes)


def numbers_sent(shapes, rank):
    pairs = [matrix_shape(shape, rank) for shape in shapes]
    low = sum(rank * (n + m) for n, m in filter(None, pairs))
    return low + numbers_of(shape for shape, pair in zip(shapes, pairs) if pair is None)


def compression_ratio(shapes, rank):
    return numbers_of(shapes) / numbers_sent(shapes, rank)


def seconds_saved(shapes, rank, world_size, latency_s, bandwidth, compress_s):
    def ring_s(numbers):
        return 2 * (world_size - 1) * (latency_s + 4 * numbers / (world_size * bandwidth))

    thirds = 3 * [numbers_sent(shapes, rank) / 3]
    return ring_s(numbers_of(shapes)) - sum(map(ring_s, thirds)) - compress_s


# %% replaces="task9_train"
def train(model, reducer, batches, lr, loss_fn):
    losses = []
    for x, y in batches:
        loss = loss_fn(model(x), y)
        loss.backward()
        reducer.reduce_gradients()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
                parameter.grad = None
        losses.append(float(loss))
    return losses
