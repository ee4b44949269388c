"""The decision trace: what a scheduler was asked and what it decided, call by call, so that it can be made again."""
