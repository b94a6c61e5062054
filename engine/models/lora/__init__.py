"""LoRA adapters (Hu et al., 2021): their format, and the products of several adapters in one step."""
