"""What libraries print beside the run's own lines."""

from __future__ import annotations

import sys

import datasets
import huggingface_hub.utils
import transformers


def quiet_libraries(is_main: bool) -> None:
    """Progress bars only on a terminal, where a carriage return redraws them; other ranks report nothing but errors."""
    if not (is_main and sys.stderr.isatty()):
        transformers.utils.logging.disable_progress_bar()
        datasets.disable_progress_bars()
        huggingface_hub.utils.disable_progress_bars()
    if not is_main:
        transformers.utils.logging.set_verbosity_error()
