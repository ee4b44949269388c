"""The client's side of OpenAI's API: what `chat --url`, `bench serve` and `run-batch --url` share. Needs aiohttp."""
