"""Import of other people's databases: validation, quarantine, download."""
