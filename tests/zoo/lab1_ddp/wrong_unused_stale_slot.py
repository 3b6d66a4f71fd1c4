"""An unused parameter brings the last step's mean again, where zero_grad(set_to_none=False) clears.

Only a gradient that is None is taken for unused; with set_to_none=False it is zeros, and the bucket
still holds what the last step left in it.

loses: ddp_unused
"""


# %% replaces="task7_ddp"
class DDP(nn.Module):
    """Data parallelism: the same module on every rank, gradients averaged while backward runs.

    Wrapping makes parameters and buffers those of rank 0. After `loss.backward()` call
    `finish_gradient_synchronization()`; then every p.grad is the mean over all ranks.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25.0):
        """Wraps `module`; gradients travel in buckets of at most `bucket_cap_mb` MB."""
        super().__init__()
        self.module = module
        ### BEGIN SOLUTION
        self.world_size = dist.get_world_size()

        # Step 1: all ranks start from rank 0's state. Tied tensors come once.
        for tensor in chain(module.parameters(), module.buffers()):
            dist.broadcast(tensor.detach(), src=0)

        # Step 5: buckets, in about the order in which backward delivers. It is the same order on
        # all ranks, because it depends on the model only.
        self.buckets: list[Bucket] = []
        self.num_launched = 0  # buckets[:num_launched] are on their way
        cap_bytes = bucket_cap_mb * 2**20
        group: list[nn.Parameter] = []
        for param in reversed([p for p in module.parameters() if p.requires_grad]):
            full = sum(p.nbytes for p in group) + param.nbytes > cap_bytes
            if group and (full or param.dtype != group[0].dtype):
                self.buckets.append(self._make_bucket(group))
                group = []
            group.append(param)
        if group:
            self.buckets.append(self._make_bucket(group))

        # Step 3: be told of each gradient when it is complete.
        for bucket in self.buckets:
            for param in bucket.slots:
                param.register_post_accumulate_grad_hook(partial(self._on_gradient, bucket))

    @staticmethod
    def _make_bucket(params: list[nn.Parameter]) -> Bucket:
        """One flat tensor for the gradients of `params`, and each one's place in it."""
        flat = torch.cat([torch.zeros_like(p).flatten() for p in params])
        pieces = flat.split([p.numel() for p in params])
        slots = {p: piece.view(p.shape) for p, piece in zip(params, pieces, strict=True)}
        return Bucket(flat, slots, waiting=set(params))

    def _on_gradient(self, bucket: Bucket, param: nn.Parameter) -> None:
        """Hook: during backward, `param.grad` has just become complete."""
        if param not in bucket.waiting:
            raise RuntimeError("call finish_gradient_synchronization() before the next backward()")
        bucket.slots[param].copy_(param.grad)
        bucket.waiting.remove(param)
        self._launch_full_buckets()

    def _launch_full_buckets(self) -> None:
        """Starts the all-reduce of every bucket that is full, never one before its predecessor.

        Step 6: collectives are matched by order, so this order must not depend on the rank.
        """
        for bucket in self.buckets[self.num_launched :]:
            if bucket.waiting:
                return
            bucket.work = dist.all_reduce(bucket.flat, op=dist.ReduceOp.SUM, async_op=True)
            self.num_launched += 1
        ### END SOLUTION

    def forward(self, *args, **kwargs):
        """Runs the module."""
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Returns when every p.grad is the mean of this step's gradients over all ranks."""
        ### BEGIN SOLUTION
        with torch.no_grad():
            # Step 4: whoever still waits was not used here. Other ranks may have used it, so this
            # rank brings zeros (or what the gradient was before, if it was not cleared).
            for bucket in self.buckets:
                for param in bucket.waiting:
                    if param.grad is None:
                        bucket.slots[param].zero_()
                bucket.waiting.clear()
            self._launch_full_buckets()

            for bucket in self.buckets:
                bucket.work.wait()
                bucket.flat /= self.world_size  # step 2: the mean
                for param, slot in bucket.slots.items():
                    if param.grad is None:
                        param.grad = slot.clone()
                    else:
                        param.grad.copy_(slot)

                # Ready for the next step.
                bucket.work = None
                bucket.waiting.update(bucket.slots)
            self.num_launched = 0
        ### END SOLUTION
