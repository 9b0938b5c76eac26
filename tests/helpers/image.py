"""The Dockerfile, read."""

import re

from helpers.commands import REPOSITORY


def instructions() -> list[tuple[str, str]]:
    """Return each instruction and its text, in order, without the comments."""
    text = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^#.*|\\\n", "", text, flags=re.MULTILINE).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines) if name]


def image_files() -> list[str]:
    """Return the files and folders of the repository that the image has."""
    copies = [text.split() for name, text in instructions() if name == "COPY"]
    for *sources, target in copies:
        assert target == "./" or [target] == sources, "each under its own name"
    return [source for *sources, _ in copies for source in sources]
