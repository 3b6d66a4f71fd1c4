"""Right, with threads, seeds and printing set as one likes them.

base: reference
"""

# %% put="after imports"
torch.manual_seed(7)
np.random.seed(7)
torch.set_num_threads(2)
torch.set_printoptions(precision=2)
np.set_printoptions(precision=2)
torch.use_deterministic_algorithms(True)
torch.autograd.set_detect_anomaly(False)
