"""Backends of torch itself (Gloo, NCCL and those that others registered with torch), on our stores and groups."""
