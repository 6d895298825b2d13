"""The parts of ``python -m torchdist_ref.launch``: options, environment, supervision, output.

The rule of this package: import the standard library, `torchdist_ref.errors` and `torchdist_ref.stores`, never torch.
A launcher lives as long as the job and should cost a few megabytes. Each file holds one part; what ranks say to each
other is not here but in the stores.
"""
