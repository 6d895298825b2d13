"""Agents of a job on several hosts, and the parts of torch's elastic package that programs use themselves.

`host_agent` is one host's agent, `coordinator` the rendezvous of all agents on a store, `roster` the rules of a job:
hosts that join, leave, end or are cut off. `torchdist_ref.launcher` starts the workers of a host. `bootstrap` and
`data` have helpers; `torch_paths` serves torch's paths.
"""
