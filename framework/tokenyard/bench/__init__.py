"""What `tokenyard bench` measures: the scheduler and the K/V manager without a model, and each part of a real step."""
