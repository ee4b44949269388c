"""From Hydra configs to a running engine: the only place where DictConfig lives."""
