"""The terminal: how a command line is refused, and what libraries print beside a command's own lines."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

import datasets
import huggingface_hub.utils
import transformers

from shardtune.errors import Refused


class Parser(argparse.ArgumentParser):
    """Refuses what it does not understand, so that it is said and ends as every other refusal."""

    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message} - see {self.prog} --help")


def quiet_libraries(is_main: bool) -> None:
    """Progress bars only on a terminal, where a carriage return redraws them; other ranks report nothing but errors.

    Neither do they ask: a model or tokenizer that needs code of its own is refused, on a terminal too.
    """
    transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    if not (is_main and sys.stderr.isatty()):
        transformers.utils.logging.disable_progress_bar()
        datasets.disable_progress_bars()
        huggingface_hub.utils.disable_progress_bars()
    if not is_main:
        transformers.utils.logging.set_verbosity_error()
