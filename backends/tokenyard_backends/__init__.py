"""Attention backends, one folder each: plugin.py (imports nothing heavy) and backend.py."""
