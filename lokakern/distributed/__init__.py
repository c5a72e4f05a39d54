"""FP8 communication: gradients under DDP, weights under FSDP2."""
