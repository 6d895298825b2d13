"""GPipe pipeline parallelism as torch had it until version 2.3, at ``torchdist_ref.pipeline.sync``.

A batch is cut into micro-batches, which pass through the partitions of a model one after the other. Reading order:
`execution` (micro-batches, the schedule, the run), `checkpoint` (recomputing activations), `skip` (skip connections),
`batchnorm`, `pipe` (the module that users see). `torch_paths` serves torch's paths. Y. Huang et al., *GPipe*, NeurIPS
2019; C. Kim et al., *torchgpipe*, arXiv:2004.09910.
"""
