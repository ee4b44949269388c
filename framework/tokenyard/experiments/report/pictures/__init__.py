"""Pictures of a report. Everything here needs matplotlib, of the extra `experiments`."""
