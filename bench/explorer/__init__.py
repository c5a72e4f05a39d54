"""Databases in a browser, by Datasette."""
