"""No activation between the layers, and GELU on what comes out.

loses: btp_mlp, btp_mlp_traffic
because: the check of what travels wants the right summands in it, as a proof that they were
    computed.
"""


# %% replaces="task3_mlp"
class ParallelMLP(nn.Module):
    def __init__(self, up, down, p=0.0, stream=None, enter=copy_in, leave=sum_out):
        super().__init__()
        self.up = ColumnParallelLinear(up, enter=enter)
        self.down = RowParallelLinear(down, leave=leave)
        self.p, self.stream = (p, stream)

    def forward(self, x):
        hidden = self.up(x)
        if self.p > 0 and self.training:
            with self.stream.fork():
                hidden = F.dropout(hidden, self.p)
        return F.gelu(self.down(hidden))
