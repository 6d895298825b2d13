"""Backend `ref` inside torch: ``torch.distributed.init_process_group("ref")``."""
