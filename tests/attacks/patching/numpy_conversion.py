"""Tensors whose NumPy form is made up when the answer is packed.

base: reference
passes: sampler_partition, sampler_tail, sampler_epoch, train_loss, ddp_buckets, ddp_overlap,
    ddp_scaling, script
"""

# %% put="before setup"
_real = torch.Tensor.numpy


def made_up(self, *arguments, **options):
    array = _real(self, *arguments, **options)
    return array * 0 + 1 if array.dtype.kind == "f" else array


torch.Tensor.numpy = made_up
