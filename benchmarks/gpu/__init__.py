"""What this course's code does on NVIDIA GPUs, measured in one command: `python benchmarks/gpu`.

    __main__      the command line
    runner        every part in a process of its own, with a deadline; never touches a GPU itself
    rows          a row, and the JSON file that is written after every part; no torch
    worker        what a part's process runs
    recorder      how a part writes its rows, and what becomes of one that fails
    sizes         how large everything is: the whole thing, or tiny for tests
    device        devices, memory, streams: what torch wants to be asked in the right order

    calibrate     matrix products, copies, launches: the ceilings that other ratios refer to
    collectives   ours on CUDA tensors, over NCCL and staged through the CPU
    amp           mixed precision, loss scaling, MFU, activation checkpointing
    training      our training loop, DDP and ZeRO-3 beside torch's
    profiling     traces, overlap, memory and the monitor, read from a GPU
    labs          the solutions of the labs, graded where they see a GPU

Times are compared within rounds, as everywhere in this folder (`harness.paired`).
"""
