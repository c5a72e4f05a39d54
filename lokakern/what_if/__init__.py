"""What formats that no kernel here multiplies would cost in error, and which GPUs have them."""
