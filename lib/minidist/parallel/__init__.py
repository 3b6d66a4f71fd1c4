"""The ways of splitting training over ranks, one module or folder each; none imports another.

Importing this package imports none of them: `from minidist.parallel.data import BucketedDDP`.
"""
