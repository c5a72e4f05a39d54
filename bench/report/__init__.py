"""Reports on what a database holds."""
