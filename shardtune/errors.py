"""How a run ends early."""


class Refused(Exception):
    """The run cannot start: every problem found, each as `<what> - <what to do>`.

    The command prints one `ERROR:` line a problem on stderr and exits with 2.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(problems))


class Stopped(Exception):
    """All ranks stop the run together for a cause that they share, `<what> - <what to do>`; exit code 1."""
