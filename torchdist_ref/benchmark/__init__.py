"""How fast is it: ``python -m torchdist_ref.benchmark``, in the manner of NVIDIA's nccl-tests, for every backend.

::

    python -m torchdist_ref.benchmark [collectives] --ops all_reduce,broadcast --sizes 4,1K,1M --backends ref,gloo
    python -m torchdist_ref.benchmark store        sets, gets and adds a second; a barrier of clients
    python -m torchdist_ref.benchmark faults       from a death, a mismatch or a Ctrl-C to the error
    python -m torchdist_ref.benchmark start        from nothing to a group, and back
    python -m torchdist_ref.benchmark hooks        DDP's communication hooks: bytes, errors, step times, loss

What makes the figures comparable: in every one of the five, all contestants are alive at once and take turns within
each round, and the ratios are medians of same-round ratios; so what disturbs one disturbs all. Each command is a file:
a program for the ranks, and a few lines that print. Adding a command: a file with `arguments` and `main`, and a line
in `__main__`. Nothing in the rest of the package imports this.
"""
