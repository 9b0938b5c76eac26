"""Pin and watch each process of the tests: Python runs this when it begins, since PYTHONPATH has
the folder first (helpers/pinned.py). Then run the next `sitecustomize` of that path, a fault's."""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

import guard
import pins

pins.pin()
guard.watch()
_here = os.path.dirname(__file__)  # noqa: PTH120 - pathlib takes time
if _next := PathFinder.find_spec(__name__, [each for each in sys.path if each != _here]):
    assert _next.loader
    _next.loader.exec_module(module_from_spec(_next))
