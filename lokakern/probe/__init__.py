"""What a model's operands look like, and where FP8 is safe and fast in it."""
