"""MLP and attention written out, with plain parameters in plain containers.

loses: nothing
"""


# %% replaces="task3_mlp"
class Held(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight = parameter(weight)
        self.bias = None if bias is None else parameter(bias)


class ParallelMLP(nn.Module):
    def __init__(self, up, down, p=0.0, stream=None, enter=copy_in, leave=sum_out):
        super().__init__()
        self.up = Held(my_slice(up.weight, 0), None if up.bias is None else my_slice(up.bias, 0))
        self.down = Held(my_slice(down.weight, 1), down.bias)
        self.p, self.stream, self.enter, self.leave = p, stream, enter, leave

    def forward(self, x):
        hidden = F.gelu(F.linear(self.enter(x), self.up.weight, self.up.bias))
        if self.training and self.p:
            with self.stream.fork():
                keep = torch.rand_like(hidden) >= self.p
            hidden = hidden * keep / (1 - self.p)
        y = self.leave(hidden @ self.down.weight.T)
        return y if self.down.bias is None else y + self.down.bias


# %% replaces="task4_attention"
class ParallelAttention(nn.Module):
    def __init__(self, qkv, out, num_heads, enter=copy_in, leave=sum_out):
        super().__init__()
        n, rank = dist.get_world_size(), dist.get_rank()
        mine = range(num_heads)[rank * num_heads // n : (rank + 1) * num_heads // n]
        if len(mine) * n != num_heads:
            raise ValueError(f"[rank {rank}] {num_heads} heads on {n} ranks")
        width = qkv.in_features // num_heads

        def pick(tensor):
            heads = tensor.unflatten(0, (3, num_heads, width))
            return heads[:, list(mine)].flatten(0, 2)

        self.qkv = Held(pick(qkv.weight), None if qkv.bias is None else pick(qkv.bias))
        self.out = Held(my_slice(out.weight, 1), out.bias)
        self.heads, self.enter, self.leave = len(mine), enter, leave

    def forward(self, x):
        b, t, _ = x.shape if self.enter is copy_in else (x := self.enter(x)).shape
        x = self.enter(x) if self.enter is copy_in else x
        qkv = F.linear(x, self.qkv.weight, self.qkv.bias).view(b, t, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhik,bhjk->bhij", q, k) / q.shape[-1] ** 0.5
        later = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        y = torch.einsum("bhij,bhjk->bihk", weights, v).reshape(b, t, -1)
        y = self.leave(y @ self.out.weight.T)
        return y if self.out.bias is None else y + self.out.bias
