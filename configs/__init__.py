"""The Hydra configs of Tokenyard: `hydra.searchpath: [pkg://tokenyard.configs]`."""
