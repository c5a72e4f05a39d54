"""What FP8 gains in the layers of a user's model."""
