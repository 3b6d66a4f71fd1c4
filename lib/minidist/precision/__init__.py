"""Mixed precision: what 16 bits can hold, and how to train with them (arXiv 1710.03740).

- `formats`: fp32, tf32, fp16, bf16, fp8 as data; rounding to each of these formats,
- `compare`: errors of a matrix product, a long sum and a small update, as rows for a table,
- `scaler`: loss scaling from scratch, with one decision for all ranks,
- `fp8`: scales per tensor, tile and block; linear layers whose products have fp8 inputs,
- `master`: fp16 or bf16 parameters with an fp32 copy in the optimiser,
- `training`: the autocast step, and the dtype policy for sharded training.

| what                    | with fp16                         | with bf16                        |
|-------------------------|-----------------------------------|----------------------------------|
| loss scaling            | needed: no number below 6e-8      | not needed: the range of fp32    |
| fp32 master weights     | needed: updates below 1/2000 of a | needed: updates below 1/250 of a |
|                         | weight are lost                   | weight are lost                  |
| sums, softmax in fp32   | needed (autocast does it)         | needed (autocast does it)        |
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
