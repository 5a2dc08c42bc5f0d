"""Training: the continuation schedule, one loop for every deep method, checkpoints, the model bundle."""
