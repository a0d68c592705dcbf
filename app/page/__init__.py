"""The page of `mlxinfer app`, in Gradio: conversations, models, comparisons. Nothing here is imported without it."""
