"""The ways of splitting training over ranks, one module or folder each.

They do not import each other, with two exceptions: `hybrid` combines several of them, and `fsdp`
uses `zero.materialise`.
Importing this package imports none of them: write `from minidist.parallel.data import BucketedDDP`.
"""
