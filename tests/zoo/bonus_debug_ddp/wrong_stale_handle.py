"""Sends the last bucket, but waits for the last handle only.

loses: debug_bucket_wait
class: example
"""


# %% replaces="mend_3"
def reduce_in_buckets(params, bucket_bytes):
    bucket, size, sent = [], 0, []
    last = len(params) - 1
    for i, p in enumerate(params):
        bucket.append(p.grad)
        size += p.grad.nbytes
        if size >= bucket_bytes or i == last:
            data = torch.cat([grad.flatten() for grad in bucket])
            work = dist.all_reduce(data, async_op=True)
            sent.append((data, bucket))
            bucket, size = [], 0
    work.wait()
    for data, grads in sent:
        parts = (data / dist.get_world_size()).split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))
