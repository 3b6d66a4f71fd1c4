"""minidist: small working implementations of distributed training, to be read and to be run."""

__version__ = "0.1.0"
