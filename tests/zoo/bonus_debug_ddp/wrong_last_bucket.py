"""Waits for every handle, but what is left at the end is never sent.

loses: debug_bucket_tail
class: example
says: debug_bucket_tail what is left at the end travels, too
"""


# %% replaces="mend_3"
def reduce_in_buckets(params, bucket_bytes):
    bucket, size, sent = [], 0, []
    for p in params:
        bucket.append(p.grad)
        size += p.grad.nbytes
        if size >= bucket_bytes:
            data = torch.cat([grad.flatten() for grad in bucket])
            sent.append((dist.all_reduce(data, async_op=True), data, bucket))
            bucket, size = [], 0
    for work, data, grads in sent:
        work.wait()
        parts = (data / dist.get_world_size()).split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))
