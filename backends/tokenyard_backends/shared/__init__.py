"""What several attention backends do alike; each module one thing, and none of it a backend."""
