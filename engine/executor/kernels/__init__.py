"""Operations of a step on the device. Each file has a PyTorch reference and a Triton kernel of one operation."""
