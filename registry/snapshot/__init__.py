"""The read side of dispatch: all measurements of a device, in memory."""
