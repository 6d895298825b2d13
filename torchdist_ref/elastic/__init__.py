"""What programs use of torch's elastic package besides its launcher: helpers around stores, ports and samplers.

Starting and restarting ranks is in `torchdist_ref.launcher`. The agent behind torchrun works beside this library as
it is, so none of it is repeated here.
"""
