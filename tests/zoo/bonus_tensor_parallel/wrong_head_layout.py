"""Reads the features of a head with a stride, as if heads were interleaved.

loses: btp_attention, btp_attention_traffic
because: the check of what travels wants the right summands in it, as a proof that they were
    computed.
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
            part.unflatten(-1, (-1, self.num_heads)).permute(0, 3, 1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))
