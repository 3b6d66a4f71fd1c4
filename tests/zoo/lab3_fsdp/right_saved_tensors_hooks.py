"""Frees without resizing storages: autograd saves where a weight was, not the weight.

loses: nothing
"""


# %% replaces="task3_fsdp"
class Unit:
    def __init__(self, module):
        self.params = list(module.parameters())
        self.shapes = [p.shape for p in self.params]
        self.sizes = [p.numel() for p in self.params]
        flat = torch.cat([p.detach().reshape(-1) for p in self.params])
        n, r = dist.get_world_size(), dist.get_rank()
        self.size = (len(flat) + n - 1) // n
        flat = torch.nn.functional.pad(flat, (0, n * self.size - len(flat)))
        self.shard = nn.Parameter(flat.view(n, self.size)[r].clone())
        self.whole, self.work, self.got = None, None, 0
        self.drop()

    def drop(self):
        self.whole = None
        for p in self.params:
            p.data = p.data.new_empty(0)

    def fetch(self):
        if self.whole is None:
            self.whole = self.shard.new_empty(self.size * dist.get_world_size())
            self.work = all_gather_single(self.whole, self.shard.detach(), async_op=True)

    def need(self):
        self.fetch()
        if self.work is not None:
            self.work.wait()
            self.work = None
            pieces = self.whole[: sum(self.sizes)].split(self.sizes)
            for p, piece, shape in zip(self.params, pieces, self.shapes, strict=True):
                p.data = piece.view(shape)


class FSDP(nn.Module):
    def __init__(self, model, units):
        super().__init__()
        self.model, self.units = model, [Unit(m) for m in units]
        for i, m in enumerate(units):
            m.register_forward_pre_hook(lambda *_, i=i: self.ready(i, 1))
            m.register_forward_hook(lambda m, x, out, i=i: self.after(i, out))
            for p in m.parameters():
                p.register_post_accumulate_grad_hook(lambda p, i=i: self.grad_came(i))

    def ready(self, i, step):
        self.units[i].need()
        if 0 <= i + step < len(self.units):
            self.units[i + step].fetch()

    def after(self, i, out):
        self.units[i].drop()
        if out.requires_grad:
            out.register_hook(lambda g: self.ready(i, -1))

    def grad_came(self, i):
        unit = self.units[i]
        unit.got += 1
        if unit.got < len(unit.params):
            return
        unit.got = 0
        unit.drop()
        flat = torch.cat([p.grad.reshape(-1) for p in unit.params])
        for p in unit.params:
            p.grad = None
        n = dist.get_world_size()
        flat = torch.nn.functional.pad(flat, (0, n * unit.size - len(flat)))
        mine = torch.empty_like(unit.shard)
        reduce_scatter_single(mine, flat)
        mine.div_(n)
        if unit.shard.grad is None:
            unit.shard.grad = mine
        else:
            unit.shard.grad.add_(mine)

    def pack(self, t):
        for unit in self.units:
            if unit.whole is None or not t.numel():
                continue
            if t.untyped_storage().data_ptr() == unit.whole.untyped_storage().data_ptr():
                return unit, t.size(), t.stride(), t.storage_offset()
        return t

    def unpack(self, saved):
        if isinstance(saved, torch.Tensor):
            return saved
        unit, *where = saved
        unit.need()
        return unit.whole.as_strided(*where)

    def local_parameters(self):
        return [unit.shard for unit in self.units]

    def forward(self, *args):
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            return self.model(*args)
