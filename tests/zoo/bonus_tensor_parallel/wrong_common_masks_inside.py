"""Drops hidden features with the common generator: the same places on all ranks.

loses: btp_block_dropout
"""


# %% replaces="task3_mlp"
class ParallelMLP(nn.Module):
    def __init__(self, up, down, p=0.0, stream=None, enter=copy_in, leave=sum_out):
        super().__init__()
        self.up = ColumnParallelLinear(up, enter=enter)
        self.down = RowParallelLinear(down, leave=leave)
        self.p, self.stream = (p, stream)

    def forward(self, x):
        hidden = F.gelu(self.up(x))
        if self.p > 0 and self.training:
            hidden = F.dropout(hidden, self.p)
        return self.down(hidden)
