"""Takes away what only Linux has, from minidist's own code. Python reads this when it starts."""

import builtins
import ctypes
import io
import os
import sys

for name in ("sched_getaffinity", "pidfd_open", "memfd_create", "eventfd"):
    if hasattr(os, name):
        delattr(os, name)


def is_asked(path):
    """Whether minidist asks for something in /proc."""
    callers = [sys._getframe(depth).f_code.co_filename for depth in (2, 3, 4)]
    is_path = isinstance(path, str | os.PathLike)
    return is_path and os.fspath(path).startswith("/proc") and "minidist" in str(callers)


def without_proc(function):
    def call(path=".", *args, **kwargs):
        if is_asked(path):
            raise FileNotFoundError(2, "there is no /proc here", str(path))
        return function(path, *args, **kwargs)

    return call


builtins.open = io.open = without_proc(io.open)
os.listdir, os.readlink = map(without_proc, (os.listdir, os.readlink))
is_folder = os.path.isdir
os.path.isdir = lambda path: not is_asked(path) and is_folder(path)


class CDLL(ctypes.CDLL):
    def __getattr__(self, name):
        if name == "prctl":
            raise AttributeError(name)
        return super().__getattr__(name)


ctypes.CDLL = CDLL
