"""What runs in a worker process: the model runner with its persistent batch, and the sampler."""
