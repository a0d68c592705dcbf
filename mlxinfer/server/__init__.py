"""The HTTP server: OpenAI's chat and text completions over loaded models. Only `app` and `run` import FastAPI."""
