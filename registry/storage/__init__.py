"""Database files: reading, writing, merging."""
