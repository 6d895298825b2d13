"""Backend `ref` inside torch: ``torch.distributed.init_process_group("ref")``.

`torchdist_ref.backends` registers it with torch when torch starts.
"""
