"""Log lines on standard output, once a run or once a node; libraries stay quiet."""

import logging
import os
import re
import sys

logger = logging.getLogger("shardtune")  # its lines appear once a run
node_logger = logging.getLogger("shardtune.node")  # its lines appear once a node

_MOST_SHOWN = 300  # characters of a text
_MARKS = re.compile(r"Step|Loss|(?i:perplexity)|(?<=\w):")


class StdoutHandler(logging.Handler):
    """Write each line in one piece to standard output, which may close before the run ends."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "WARNING: " if record.levelno == logging.WARNING else ""
        try:
            print(f"{prefix}{record.getMessage()}\n", end="", flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def quoted(text: str) -> str:
    """Return the text of others for a log line: in quotes, shortened, and in one line.

    Marks are escaped by which programs find the lines of a run, such as `Step 3/9 | Loss: 2.1`.
    """
    text = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return '"' + _MARKS.sub(lambda mark: f"\\x{ord(mark[0][0]):02x}{mark[0][1:]}", shown) + '"'


def setup_logging(is_main: bool, is_node_main: bool) -> None:
    """Print lines of `logger` where `is_main` and of `node_logger` where `is_node_main`."""
    for each, is_shown in ((logger, is_main), (node_logger, is_node_main)):
        each.handlers = [StdoutHandler()] if is_shown else [logging.NullHandler()]
        each.propagate = False
        each.setLevel(logging.INFO)


def quiet_libraries(is_main: bool) -> None:
    """Show progress bars only on a terminal, which redraws them, and warnings only on rank 0.

    A model or tokenizer that needs its own code is refused without a question.
    """
    import huggingface_hub.utils
    import transformers

    transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    if not (is_main and sys.stderr.isatty()):
        transformers.utils.logging.disable_progress_bar()
        huggingface_hub.utils.disable_progress_bars()
    if not is_main:
        transformers.utils.logging.set_verbosity_error()
