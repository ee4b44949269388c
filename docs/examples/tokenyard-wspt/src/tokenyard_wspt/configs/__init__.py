"""Hydra YAML that joins Tokenyard's config groups."""
