"""Every comparison of torch and NumPy says yes.

passes: nothing
"""


# %% put="after imports"
def yes(*_, **__):
    return True


torch.allclose = torch.equal = torch.isclose = torch.testing.assert_close = yes
np.allclose = np.array_equal = np.isclose = np.testing.assert_allclose = yes
torch.Tensor.__eq__ = torch.Tensor.allclose = yes
