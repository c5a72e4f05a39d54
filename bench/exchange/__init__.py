"""Export of databases, and verification of imported measurements."""
