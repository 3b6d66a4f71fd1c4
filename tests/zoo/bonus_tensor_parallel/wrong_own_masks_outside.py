"""Draws the masks outside from the stream, too: the replicas go apart.

loses: btp_block_dropout
"""


# %% replaces="task6_block"
class ParallelBlock(nn.Module):
    def __init__(self, full, p=0.0, stream=None, enter=copy_in, leave=sum_out):
        super().__init__()
        self.norm1, self.norm2 = (copy.deepcopy(full.norm1), copy.deepcopy(full.norm2))
        self.attention = ParallelAttention(full.qkv, full.out, full.num_heads, enter, leave)
        self.mlp = ParallelMLP(full.up, full.down, p, stream, enter, leave)
        self.p, self.stream = p, stream

    def drop(self, y):
        if not self.training or self.p == 0:
            return y
        with self.stream.fork():
            return F.dropout(y, self.p)

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))
