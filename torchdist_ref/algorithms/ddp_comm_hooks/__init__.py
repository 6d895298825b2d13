"""Communication hooks: what happens to a bucket of gradients between backward and the optimizer."""
