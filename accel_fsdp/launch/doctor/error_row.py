"""A row in the tables of error messages."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownError:
    """`pattern`: the text that a user sees, in any case.

    `cause`: its usual cause. `means`: the meaning of a message that doesn't name the cause; such rows come after the
    others.

    `seen`: reports of it, as repository#issue. `unless`: a text that matches is another error. `follows`: it also
    follows from an error of the script on another rank, which is then the cause.
    """

    pattern: str
    cause: str
    fix: str
    seen: tuple[str, ...] = ()
    means: str = ""
    unless: str = ""
    follows: bool = False

    @property
    def often(self) -> str:
        """The cause, marked as usual, because it comes from a table and not from this machine."""
        return f"often: {self.cause}"
