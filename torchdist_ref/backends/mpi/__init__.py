"""Backend `mpi`: the calls of an MPI library, through mpi4py."""
