"""OpenAI's API: chat and text completions, responses, embeddings, models; and Jina's and Cohere's rerank."""
