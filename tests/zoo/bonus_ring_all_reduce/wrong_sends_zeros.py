"""The right number of messages of the right size to the right neighbour, with nothing in them.

loses: ring_sum, ring_ops, ring_small,
    ring_bytes, ring_neighbours, ring_messages, ring_time
because: nothing is computed, and messages without content are no ring
says: ring_sum The tensor is as it was
says: ring_small The tensor is as it was
says: ring_bytes this rank's messages held 0 different numbers
says: ring_time this rank's messages held 0 different numbers
"""


# %% replaces="task4_all_reduce"
def ring_all_reduce(tensor, op="sum"):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = chunk_bounds(tensor.numel(), n)
    for sent, received in ring_steps(rank, n):
        outgoing, incoming = (
            tensor.new_zeros(end - begin) for begin, end in (chunks[sent], chunks[received])
        )
        exchange(outgoing, incoming)
    return tensor
