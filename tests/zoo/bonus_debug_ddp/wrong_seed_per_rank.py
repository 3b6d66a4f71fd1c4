"""Every rank has random numbers of its own, and weights of its own.

loses: debug_seed_weights
says: debug_seed_weights Initial weights may depend on the seed alone
class: example
"""


# %% replaces="mend_11"
def build_model(make_model, seed, rank):
    torch.manual_seed(seed + 1000 * rank)
    return make_model()
