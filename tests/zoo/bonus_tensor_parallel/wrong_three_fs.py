"""Queries, keys and values each enter the parallel region on their own.

loses: btp_attention_traffic
class: example
"""


# %% replaces="task4_attention"
class ParallelAttention(nn.Module):
    def __init__(self, qkv, out, num_heads, enter=copy_in, leave=sum_out):
        super().__init__()
        n = dist.get_world_size()
        if num_heads % n:
            raise ValueError(f"{num_heads} heads cannot be split over {n} ranks")
        self.num_heads = num_heads // n
        rows = torch.arange(qkv.out_features, device=qkv.weight.device)
        thirds = [third.chunk(n) for third in rows.chunk(3)]
        rows = torch.cat([third[rank] for rank in range(n) for third in thirds])
        ordered = nn.Linear(1, 1, bias=qkv.bias is not None)
        ordered.weight = parameter(qkv.weight[rows])
        if qkv.bias is not None:
            ordered.bias = parameter(qkv.bias[rows])
        self.qkv = ColumnParallelLinear(ordered, enter=enter)
        self.out = RowParallelLinear(out, leave=leave)

    def forward(self, x):
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.three(x)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def three(self, x):
        weights = self.qkv.weight.chunk(3)
        biases = [None] * 3 if self.qkv.bias is None else self.qkv.bias.chunk(3)
        return [F.linear(self.qkv.enter(x), w, b) for w, b in zip(weights, biases)]
