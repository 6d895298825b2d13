"""Benchmarks: ``python -m torchdist_ref.benchmark``, in the manner of NVIDIA's nccl-tests, for every backend.

::

    python -m torchdist_ref.benchmark [collectives] --ops all_reduce,broadcast --sizes 4,1K,1M --backends ref,gloo
    python -m torchdist_ref.benchmark calls        cost of the public API and of imports
    python -m torchdist_ref.benchmark ddp          a step of training, by model and hook
    python -m torchdist_ref.benchmark faults       from a death, a mismatch or a Ctrl-C to the error
    python -m torchdist_ref.benchmark fit          numbers of a simulation's network, for this machine
    python -m torchdist_ref.benchmark hooks        DDP's communication hooks: bytes, errors, step times, loss
    python -m torchdist_ref.benchmark predict      real times beside simulated ones
    python -m torchdist_ref.benchmark simulation   the speed of simulated ranks in real time
    python -m torchdist_ref.benchmark start        from nothing to a group, and back
    python -m torchdist_ref.benchmark store        sets, gets and adds a second; a barrier of clients

In every one all contestants are alive at once and take turns within each round, and ratios are medians of same-round
ratios; so a disturbance affects all alike. `harness` reads options and runs a command, `ranks` starts processes,
`rounds` is what each rank sees, `report` is the output. A command is a file with `add_options`, `run` and `show`,
and a name in `__main__`.

Nothing in the rest of the package imports this.
"""
