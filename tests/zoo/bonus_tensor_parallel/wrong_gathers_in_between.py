"""Gathers the hidden features and splits them again.

loses: btp_mlp_traffic
class: example
says: btp_mlp_traffic nothing has to be gathered between them
"""


# %% replaces="task3_mlp"
class ParallelMLP(nn.Module):
    def __init__(self, up, down, p=0.0, stream=None, enter=copy_in, leave=sum_out):
        super().__init__()
        self.up = ColumnParallelLinear(up, gather_output=True, enter=enter)
        self.down = RowParallelLinear(down, input_is_parallel=False, leave=leave)
        self.p, self.stream = (p, stream)

    def forward(self, x):
        hidden = F.gelu(self.up(x))
        if self.p > 0 and self.training:
            with self.stream.fork():
                hidden = F.dropout(hidden, self.p)
        return self.down(hidden)
