"""`mlxinfer lora`: fine-tuning with low-rank adapters. Nothing lives here yet."""
