"""Commands of this Python that are forked from a process which has imported all that they need."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pretend_gpu

_MODULE = [sys.executable, "-m"]
_POPEN = subprocess.Popen


class ForkedPopen:
    """Takes the place of `subprocess.Popen` for `python -m MODULE`, where this process has threads
    of no other work. Other commands are started as ever.

    The process has the pretended GPUs that CUDA_VISIBLE_DEVICES names.
    """

    def __new__(cls, command: Any, *rest: Any, **options: Any) -> Any:
        if list(command[:2]) != _MODULE:
            return _POPEN(command, *rest, **options)
        return super().__new__(cls)

    def __init__(self, command: list[str], **options: Any) -> None:
        self.args, self.stdout, self.stdin, self.stderr = command, None, None, None
        self.returncode: int | None = None
        out, reading = options.get("stdout"), -1
        if out == subprocess.PIPE:
            reading, out = os.pipe()
            self.stdout = os.fdopen(reading, encoding="utf-8")
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(command, out if isinstance(out, int) else out.fileno(), options)
        if reading >= 0:
            os.close(out)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        ends = time.monotonic() + (timeout or 1e9)
        while self.poll() is None:
            if time.monotonic() > ends:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, *_: Any, **__: Any) -> tuple[str, str]:
        text = self.stdout.read() if self.stdout else ""
        self.wait()
        return text, ""

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def __enter__(self) -> ForkedPopen:
        return self

    def __exit__(self, *_: Any) -> None:
        self.wait()


def _become(command: list[str], out: int, options: dict[str, Any]) -> None:
    code = 1
    try:
        os.dup2(out, 1)
        os.dup2(out, 2)
        # This process's own may seek, as in a file.
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, "utf-8", closefd=False) for fd in (1, 2))
        if options.get("start_new_session"):
            os.setsid()
        environment = dict(options.get("env") or os.environ)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(options.get("cwd") or Path.cwd())
        if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
            pretend_gpu.install(visible.count(",") + 1)
        module, *sys.argv[1:] = command[2:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1 if ended.code else 0
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        with contextlib.suppress(Exception):
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
