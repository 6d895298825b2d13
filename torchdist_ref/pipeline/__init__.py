"""Pipeline parallelism as torch had it until version 2.3: `sync` has the module that runs a model as a pipeline."""
