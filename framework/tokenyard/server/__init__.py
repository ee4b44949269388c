"""The HTTP server: OpenAI's API over an AsyncLLM. Needs the extra `serve`; pydantic is used here alone."""
