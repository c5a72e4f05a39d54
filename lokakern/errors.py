"""Every error lokakern raises on purpose: what was asked, what was found, what to do."""


class LokakernError(Exception):
    """Base of all lokakern errors."""


class ShapeError(LokakernError, ValueError):
    """Operand shapes, strides or sizes do not fit the operation."""


class FormatError(LokakernError, TypeError):
    """A dtype, format or granularity the operation does not take."""


class DeviceError(LokakernError, ValueError):
    """Operands on different devices, or a device that is unknown."""


class BudgetError(LokakernError, ValueError):
    """An error budget that is not a finite, non-negative number."""


class UnknownNameError(LokakernError, KeyError):
    """An op, kernel, suite, distribution or regime nobody registered."""

    def __str__(self) -> str:  # KeyError would print the repr of its argument
        return str(self.args[0]) if self.args else ""


class UnsupportedError(LokakernError):
    """No kernel takes this problem on this device."""


class MissError(LokakernError):
    """Dispatch has no measurement for the problem and ``on_miss="raise"`` was asked for."""


class DatabaseError(LokakernError):
    """A database that cannot be read, is newer than this code, or holds impossible rows."""


class ChoicesError(LokakernError):
    """A file of frozen choices that cannot be used here, or nothing to freeze."""


class DisagreementError(LokakernError):
    """Ranks of one job that would choose different kernels."""


class MeasurementError(LokakernError):
    """A measurement could not be made as the contracts ask."""


class DeviceLostError(MeasurementError):
    """A kernel left the device unusable for this process, as an illegal memory access does."""


class SuiteError(LokakernError, ValueError):
    """A file of a suite that cannot be read, or asks for what cannot be measured."""


class CompilationError(LokakernError):
    """A kernel that does not compile here, or nothing to compile it with."""


class LaunchError(LokakernError):
    """The driver refused to load or launch a kernel."""
