"""f in front of the norms: their gradients are shares.

loses: btp_block
says: btp_block or f is not where it belongs
"""


# %% replaces="task6_block"
class ParallelBlock(nn.Module):
    def __init__(self, full, p=0.0, stream=None, enter=copy_in, leave=sum_out):
        super().__init__()
        self.norm1, self.norm2 = (copy.deepcopy(full.norm1), copy.deepcopy(full.norm2))
        self.attention = ParallelAttention(full.qkv, full.out, full.num_heads, torch.clone, leave)
        self.mlp = ParallelMLP(full.up, full.down, p, stream, torch.clone, leave)
        self.p, self.enter = p, enter

    def forward(self, x):
        x = x + F.dropout(self.attention(self.norm1(self.enter(x))), self.p, self.training)
        return x + F.dropout(self.mlp(self.norm2(self.enter(x))), self.p, self.training)
