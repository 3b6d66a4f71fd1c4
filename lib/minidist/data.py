"""Synthetic data that a model can learn, generated from a seed: nothing is downloaded.

>>> inputs_NT, targets_NT = make_tokens(100, context=16, vocab_size=32, seed=1)
>>> inputs_NT.shape, bool((inputs_NT[:, 1:] == targets_NT[:, :-1]).all())
(torch.Size([100, 16]), True)

The same arguments give the same data on every rank and on every machine with the same torch
version.
Letters of shapes: N samples, T tokens, C channels, H and W height and width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def make_tokens(
    num_sequences: int, context: int, vocab_size: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Sequences of a random Markov chain, and the same sequences shifted by one token.

    Four tokens can follow each token, with probabilities 1/2, 1/4, 1/8 and 1/8 (fewer if
    `vocab_size` is below 4). So no model gets below 1.21 nats per token, and a model that only
    counts tokens stays near ln(vocab_size). The chain depends on `vocab_size` only: draw training
    and test sets from the same chain with different seeds.

    Returns:
        inputs_NT and targets_NT, int64.
    """
    num_followers = min(4, vocab_size)
    chain = torch.Generator().manual_seed(vocab_size)
    order = torch.rand(vocab_size, vocab_size, generator=chain).argsort(1)
    followers_VF = order[:, :num_followers]
    generator = torch.Generator().manual_seed(seed)
    weights_F = torch.tensor([4.0, 2.0, 1.0, 1.0])[:num_followers]
    tokens_NT = torch.empty(num_sequences, context + 1, dtype=torch.int64)
    tokens_NT[:, 0] = torch.randint(vocab_size, (num_sequences,), generator=generator)
    if num_sequences:
        picks_NT = torch.multinomial(
            weights_F, num_sequences * context, replacement=True, generator=generator
        ).view(num_sequences, context)
        for t in range(context):
            tokens_NT[:, t + 1] = followers_VF[tokens_NT[:, t], picks_NT[:, t]]
    return tokens_NT[:, :-1].contiguous(), tokens_NT[:, 1:].contiguous()


def make_images(
    num: int, num_classes: int = 10, size: int = 16, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Noisy images: each image is the pattern of its class plus noise.

    The patterns depend on `num_classes` and `size` only: draw training and test sets with the same
    patterns and different seeds.

    Returns:
        images_NCHW (float32, 3 channels) and labels_N (int64).
    """
    patterns = torch.randn(
        num_classes, 3, size, size, generator=torch.Generator().manual_seed(num_classes)
    )
    generator = torch.Generator().manual_seed(seed)
    labels_N = torch.randint(num_classes, (num,), generator=generator)
    noise_NCHW = torch.randn(num, 3, size, size, generator=generator)
    return patterns[labels_N] + 2.0 * noise_NCHW, labels_N


def make_regression(
    num: int, in_features: int, out_features: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Targets that are a smooth non-linear function of the inputs, with a little noise.

    Returns:
        inputs (num, in_features) and targets (num, out_features), float32.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(in_features, out_features, generator=generator) / in_features**0.5
    inputs = torch.randn(num, in_features, generator=generator)
    noise = torch.randn(num, out_features, generator=generator)
    return inputs, torch.tanh(inputs @ weight) + 0.05 * noise
