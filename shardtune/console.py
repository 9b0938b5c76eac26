"""The terminal: what libraries print beside a command's own lines."""

from __future__ import annotations

import sys

import datasets
import huggingface_hub.utils
import transformers


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
