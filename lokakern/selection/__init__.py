"""Dispatch: the fastest kernel within an error budget, chosen from measurements."""

from lokakern.selection.dispatcher import use_choices as use_choices
