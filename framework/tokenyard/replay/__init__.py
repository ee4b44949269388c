"""Making the calls of a recorded trace again: no model, no executor, the same scheduler."""
