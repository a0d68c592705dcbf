"""From an mlx-lm folder back to what other programs read: safetensors for transformers, GGUF for llama.cpp."""
