"""BatchScheduler: the mechanism that policies steer. Imports no torch."""

from tokenyard.scheduler.batch import BatchScheduler

__all__ = ["BatchScheduler"]
