"""Frozen choices: a file of dispatch's answers, used without a database."""
