"""All ranks have the same weights, and the same dropout.

loses: debug_seed_dropout
"""


# %% replaces="mend_11"
def build_model(make_model, seed, rank):
    torch.manual_seed(seed)
    return make_model()
