"""Which serving options, kernels and checkpoints bring a cell nearer to its limit; how it scales over GPUs."""
