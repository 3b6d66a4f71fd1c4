"""Ranks drop units of their own, the same ones in every run whatever its seed.

loses: debug_seed_dropout
"""


# %% replaces="mend_11"
def build_model(make_model, seed, rank):
    torch.manual_seed(seed)
    model = make_model()
    torch.manual_seed(1000 + rank)
    return model
