"""Errors of lokakern; messages state the argument, the value found, and the expectation."""


class LokakernError(Exception):
    """Base of all lokakern errors."""


class ShapeError(LokakernError, ValueError):
    """Operand shapes, strides or sizes do not fit the operation."""


class FormatError(LokakernError, TypeError):
    """A dtype, format or granularity is not supported by the operation."""


class DeviceError(LokakernError, ValueError):
    """Operands are on different devices, or a device is unknown."""


class BudgetError(LokakernError, ValueError):
    """An error budget is not a finite, non-negative number."""


class UnknownNameError(LokakernError, KeyError):
    """The name of an op, kernel, suite, distribution or regime is unknown."""

    def __str__(self) -> str:  # KeyError would print the repr of its argument
        return str(self.args[0]) if self.args else ""


class UnsupportedError(LokakernError):
    """No kernel supports this problem on this device."""


class MissError(LokakernError):
    """Dispatch has no measurement for the problem and ``on_miss`` is "raise"."""


class DatabaseError(LokakernError):
    """A database cannot be read, is newer than this code, or has invalid rows."""


class ChoicesError(LokakernError):
    """A file of frozen choices cannot be used here, or there is nothing to freeze."""


class DisagreementError(LokakernError):
    """Ranks of a job would choose different kernels."""


class MeasurementError(LokakernError):
    """A measurement that fulfills the contracts is not possible."""


class DeviceLostError(MeasurementError):
    """A kernel left the device unusable for this process, as after an illegal memory access."""


class SuiteError(LokakernError, ValueError):
    """A suite file cannot be read, or has problems that cannot be measured."""


class CompilationError(LokakernError):
    """A kernel does not compile here, or there is no compiler."""


class LaunchError(LokakernError):
    """The driver refused to load or launch a kernel."""
