"""Output for people and programs: tables, progress bars, HTML pages."""
