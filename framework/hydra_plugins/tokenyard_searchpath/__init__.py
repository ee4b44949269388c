"""Found by Hydra itself; see search_path.py."""
