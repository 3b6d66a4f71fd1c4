"""Multi-tensor operations; the flag is a minimum of "all is well"; frexp and ldexp.

loses: nothing
class: example
"""


# %% replaces="task1_formats"
def lost_share(values, dtype, scale=1.0):
    there = values.ne(0)
    gone = there & values.mul(scale).to(dtype).eq(0)
    return gone.sum().item() / max(1, there.sum().item())


def safe_scale(gradients, dtype):
    tops = [None] * dist.get_world_size()
    dist.all_gather_object(
        tops, max(torch.stack(torch._foreach_norm(gradients, math.inf)).tolist())
    )
    ratio = torch.finfo(dtype).max / max(tops)
    _, exponent = math.frexp(ratio)
    return math.ldexp(1.0, exponent - 1)


# %% replaces="task2_scaler"
class LossScaler:
    def __init__(
        self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000
    ):
        self.v = dict(s=init_scale, g=growth_factor, b=backoff_factor, n=growth_interval, t=0)
        self.fine = None

    def get_scale(self):
        return self.v["s"]

    def scale(self, loss):
        return torch.mul(loss.float(), self.get_scale())

    @torch.no_grad()
    def unscale_(self, optimizer):
        if self.fine is not None:
            raise RuntimeError("already unscaled")
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        torch._foreach_div_(grads, self.get_scale())
        fine = torch.stack([g.isfinite().all() for g in grads]).all().to(torch.int64)
        dist.all_reduce(fine, op=dist.ReduceOp.MIN)
        self.fine = fine.item() == 1

    def step(self, optimizer):
        if self.fine is None:
            self.unscale_(optimizer)
        if self.fine:
            optimizer.step()
        return self.fine

    def update(self):
        v = self.v
        v["t"] = (v["t"] + 1) % v["n"] if self.fine else 0
        if not self.fine:
            v["s"] *= v["b"]
        elif v["t"] == 0:
            v["s"] *= v["g"]
        self.fine = None

    def state_dict(self):
        return dict(self.v)

    def load_state_dict(self, state):
        self.v = dict(state)
