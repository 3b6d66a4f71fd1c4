"""The MLP forgets f. Its own gradients are right, those below it are not.

loses: btp_mlp_traffic
class: example
"""


# %% replaces="task3_mlp"
class ParallelMLP(nn.Module):
    def __init__(self, up, down, p=0.0, stream=None, enter=copy_in, leave=sum_out):
        super().__init__()
        self.up = ColumnParallelLinear(up, enter=torch.clone if enter is copy_in else enter)
        self.down = RowParallelLinear(down, leave=leave)
        self.p, self.stream = (p, stream)

    def forward(self, x):
        hidden = F.gelu(self.up(x))
        if self.p > 0 and self.training:
            with self.stream.fork():
                hidden = F.dropout(hidden, self.p)
        return self.down(hidden)
