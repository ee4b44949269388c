"""The engine: its loop, the driver of the loop, and what a front end does before and after it. Imports no torch."""
