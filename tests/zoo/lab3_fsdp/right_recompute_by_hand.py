"""Its own autograd function: forward without a graph, backward with one of its own.

loses: nothing
"""


# %% replaces="task5_recompute"
class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, stream, needs_grad, x):
        ctx.run, ctx.stream = run, stream
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.stream)
            out = ctx.run(x)
        torch.autograd.backward(out, grad)  # weights and other arguments get theirs here
        return None, None, None, x.grad


def recompute_units(model, units):
    def again(forward):
        def call(x, **kwargs):
            if not torch.is_grad_enabled():
                return forward(x, **kwargs)
            anything = torch.ones((), requires_grad=True)  # or a first unit would have no graph
            run = partial(forward, **kwargs)
            return Again.apply(run, torch.get_rng_state(), anything, x)

        return call

    for unit in units:
        unit.forward = again(unit.forward)
    return model
