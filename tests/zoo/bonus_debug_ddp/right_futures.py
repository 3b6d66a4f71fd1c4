"""Futures and callbacks in place of handles; buckets are cut before a gradient would overfill them.

loses: nothing
"""


# %% replaces="mend_3"
def reduce_in_buckets(params, bucket_bytes):
    world_size = dist.get_world_size()

    def send(grads):
        data = torch.nn.utils.parameters_to_vector(grads)
        future = dist.all_reduce(data, async_op=True).get_future()

        def store(done):
            torch._foreach_copy_(
                grads,
                [
                    part.view_as(grad) / world_size
                    for grad, part in zip(
                        grads, data.split([g.numel() for g in grads]), strict=True
                    )
                ],
            )

        return future.then(store)

    futures, bucket = [], []
    for p in reversed(params):
        if bucket and sum(g.nbytes for g in bucket) + p.grad.nbytes > bucket_bytes:
            futures.append(send(bucket))
            bucket = []
        bucket.append(p.grad)
    if bucket:
        futures.append(send(bucket))
    torch.futures.wait_all(futures)


# %% replaces="mend_9"
def prepare_once(build, load):
    ready = torch.zeros(1)
    if dist.get_rank() == 0:
        build()
        ready += 1
    dist.all_reduce(ready, async_op=True).wait()
    assert ready.item() == 1
    return load()
