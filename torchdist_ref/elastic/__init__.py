"""Parts of torch's elastic package that programs use besides its launcher: stores, ports, loggers and samplers.

Starting and restarting ranks is in `torchdist_ref.launcher`. torchrun's agent works beside this library, so none of it
is repeated here. `torch_paths` serves torch's paths.
"""
