"""Built-in plugins: one file each, written with nothing that a third party could not use."""
