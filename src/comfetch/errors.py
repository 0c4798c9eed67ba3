"""Name every way in which comfetch refuses.

ComfetchError
├── OptionError       an argument that cannot be meant (also a ValueError)
├── ModelError        a model that cannot be sketched as asked; lists every problem found
├── MismatchError     tensors, sketches or plans that do not belong together (also a ValueError)
├── FileError         a file that is missing, damaged or does not fit
├── DataError         a dataset that is missing, damaged or cannot be split as asked
├── UploadError       a client's upload that is refused
└── RunError          a run that cannot start or go on
"""


class ComfetchError(Exception):
    """Base of every refusal of comfetch."""


class OptionError(ComfetchError, ValueError):
    """An argument that cannot be meant."""


class ModelError(ComfetchError):
    """A model that cannot be sketched as asked."""

    @classmethod
    def of(cls, problems: list[str]) -> "ModelError":
        """Make one error of all problems, so that they can be mended in one go."""
        if len(problems) == 1:
            return cls(problems[0])
        return cls(f"{len(problems)} problems:\n" + "\n".join(f"  - {problem}" for problem in problems))


class MismatchError(ComfetchError, ValueError):
    """Tensors, sketches or plans that do not belong together."""


class FileError(ComfetchError):
    """A file that is missing, damaged or does not fit."""


class DataError(ComfetchError):
    """A dataset that is missing, damaged or cannot be split as asked."""


class UploadError(ComfetchError):
    """A client's upload that is refused."""


class RunError(ComfetchError):
    """A run that cannot start or go on."""
