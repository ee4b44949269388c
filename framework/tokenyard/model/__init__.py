"""Models: files and formats, tokenizers, decoders. Import the modules themselves: some need torch, some do not."""
