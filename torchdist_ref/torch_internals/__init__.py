"""Private parts of torch that this library uses: one table of their names, and the modes of the calling thread."""
