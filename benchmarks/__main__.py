"""python -m benchmarks SECTION [options]; `python -m benchmarks SECTION --help` has its options.

`all` measures every section of RESULTS.md. The other sections write files of their own.
"""

import ast
import shlex
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks import results
from distTest.gone import refuse_gone

# Modules with `add_options(parser)` and `main(options)`.
SECTIONS = ("models", "plans", "published")


def main(arguments: Sequence[str]) -> None:
    refuse_gone("benchmarks", arguments)
    names = ("all", *results.SECTIONS, *SECTIONS)
    parser = ArgumentParser(
        "python -m benchmarks",
        description=__doc__,
        usage="%(prog)s SECTION",
        epilog="\n".join(f"{name:11} {_subject(name)}" for name in names[1:]),
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("section", choices=names)
    name = parser.parse_args(arguments[:1]).section
    module = import_module(f"benchmarks.{name if name in SECTIONS else 'results'}")
    parser = ArgumentParser(
        f"python -m benchmarks {name}",
        description=module.__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    module.add_options(parser)
    if name in results.SECTIONS:
        parser.set_defaults(sections=[name])
    parser.set_defaults(command=shlex.join(["python", "-m", "benchmarks", *arguments]))
    module.main(parser.parse_args(arguments[1:]))


def _subject(section: str) -> str:
    """Return the first sentence of a section's module without importing it."""
    source = Path(__file__).with_name(f"{section}.py").read_text("utf-8")
    first, _, _ = (ast.get_docstring(ast.parse(source)) or "").replace("\n", " ").partition(". ")
    return first.partition(";")[0].rstrip(".")


if __name__ == "__main__":
    main(sys.argv[1:])
