"""Paged attention in plain torch: every device, no compiler."""
