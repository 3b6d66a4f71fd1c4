"""One flat tensor for all float32 gradients, cut into ranges, of which they become views.

Laid out in forward order and reduced from the end; other dtypes go one by one at the end. Divides
before it reduces. A megabyte is 10**6 bytes. Broadcasts by an all-reduce. Not an nn.Module.

loses: nothing
class: example
"""


# %% replaces="task7_ddp"
class DDP:
    def __init__(self, module, bucket_cap_mb=25.0):
        self.module = module
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                mine = tensor if dist.get_rank() == 0 else torch.zeros_like(tensor)
                dist.all_reduce(mine)
                tensor.copy_(mine)

        trained = [p for p in module.parameters() if p.requires_grad]
        self.params = [p for p in trained if p.dtype == torch.float32]
        self.others = [p for p in trained if p.dtype != torch.float32]
        self.flat = torch.zeros(sum(p.numel() for p in self.params), device=self.params[0].device)
        self.start, self.bucket_of, self.ranges = [], [], [[0, 0]]
        for param in self.params:
            begin = self.ranges[-1][1]
            if (begin - self.ranges[-1][0] + param.numel()) * 4 > bucket_cap_mb * 10**6 and (
                begin > self.ranges[-1][0]
            ):
                self.ranges.append([begin, begin])
            self.start.append(begin)
            self.bucket_of.append(len(self.ranges) - 1)
            self.ranges[-1][1] = begin + param.numel()
        for index, param in enumerate(self.params):
            param.register_post_accumulate_grad_hook(lambda _, i=index: self.store(i))
        self.reset()

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def reset(self):
        self.to_come = [self.bucket_of.count(b) for b in range(len(self.ranges))]
        self.stored = set()
        self.works = []
        self.next_range = len(self.ranges) - 1

    def view(self, index):
        param = self.params[index]
        begin = self.start[index]
        return self.flat[begin : begin + param.numel()].view_as(param)

    def store(self, index):
        with torch.no_grad():
            gradient = self.params[index].grad
            if gradient is None:
                self.view(index).zero_()
            else:
                self.view(index).copy_(gradient / dist.get_world_size())
        self.stored.add(index)
        self.to_come[self.bucket_of[index]] -= 1
        while self.next_range >= 0 and self.to_come[self.next_range] == 0:
            begin, end = self.ranges[self.next_range]
            self.works.append(dist.all_reduce(self.flat[begin:end], async_op=True))
            self.next_range -= 1

    def finish_gradient_synchronization(self):
        for index in range(len(self.params)):
            if index not in self.stored:
                self.params[index].grad = None
                self.store(index)
        for work in self.works:
            work.wait()
        for index, param in enumerate(self.params):
            param.grad = self.view(index)
        for param in self.others:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        self.reset()
