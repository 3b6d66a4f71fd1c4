"""Left singular vectors: another basis of the same span.

loses: nothing
"""


# %% replaces="task1_orthonormalise"
def orthonormalise(matrix):
    lengths = matrix.norm(dim=0)
    scaled = matrix / torch.where(lengths > 0, lengths, torch.ones_like(lengths))
    return torch.linalg.svd(scaled, full_matrices=False).U
